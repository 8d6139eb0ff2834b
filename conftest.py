"""Doctests see what their readers see: torch and the names of the module in hand."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    import math

    doctest_namespace |= {"torch": torch, "math": math}
