"""Set-up for all tests: seeds, Hypothesis profile, and the names that doctests may use."""

import math
import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # kernels then run in Triton's interpreter, which must know before it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers fill the cores; threads of each would fight over them
    torch.set_num_threads(1)

# The same examples every time: a test that fails once fails again. No deadline: time is not what tests judge.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Of torch: what was compiled before counts against its limit of variants."""
    with warnings.catch_warnings():  # torch 2.11 warns of its own code as it imports the compiler
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace |= {"torch": torch, "math": math}
