"""Data sets, built in or on disk."""

from shortlist.data.loading import load_problem
from shortlist.data.splits import Preprocess, Problem, Split

__all__ = ["Preprocess", "Problem", "Split", "load_problem"]
