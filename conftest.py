"""Set-up for all tests: seeds, the Hypothesis profile, and the names available in doctests."""

import math
import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # run kernels in Triton's interpreter; Triton reads this when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers fill the cores, so each gets one thread
    torch.set_num_threads(1)

# The same examples every time, so that failures are repeatable. No deadline: tests do not measure time.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Reset torch's compiler: earlier graphs count towards its limit of recompilations."""
    with warnings.catch_warnings():  # torch 2.11 warns about its own code when it imports the compiler
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace |= {"torch": torch, "math": math}
