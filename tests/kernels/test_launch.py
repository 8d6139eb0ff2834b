"""What the launcher of kernels remembers: a binary serves calls of its own kind and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shortlist.kernels import launch


class Kernel:
    """Counts how often it is compiled, and how often what was compiled is launched again."""

    def __init__(self) -> None:
        self.compiled = self.launched_again = 0

    def __getitem__(self, grid: object) -> Callable[..., "Binary"]:
        def compile_and_launch(*arguments: object, num_warps: int) -> Binary:
            self.compiled += 1
            return Binary(self)

        return compile_and_launch


class Binary:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch_again(*arguments: object) -> None:
            self.kernel.launched_again += 1

        return launch_again


ROOM = torch.zeros(64)
SCORES = ROOM[:16]
USUAL: dict[str, Any] = {"grid": (4, 1, 1), "scores": SCORES, "numbers": (7, 0.5), "constants": (32, True)}
OTHERS: list[dict[str, Any]] = [
    {"grid": (5, 1, 1)},
    {"scores": SCORES.double()},
    {"scores": ROOM[1:17]},  # at an address that is not divisible by 16
    {"numbers": (16, 0.5)},  # a number that is divisible by 16: the compiler makes use of it
    {"numbers": ((7, 16), 0.5)},
    {"numbers": (7, 0.25)},
    {"constants": (64, True)},
]


def call(launcher: Any, grid: Any, scores: torch.Tensor, numbers: Any, constants: Any) -> None:
    launcher(grid, (scores, None), numbers, constants, kinds=(launch.kind(scores),), num_warps=4)


def test_the_same_call_is_compiled_once() -> None:
    kernel = Kernel()
    launcher = launch.Launcher(kernel)
    for _ in range(3):
        call(launcher, **USUAL)
    assert (kernel.compiled, kernel.launched_again) == (1, 2)


@pytest.mark.parametrize("other", OTHERS)
def test_a_call_of_another_kind_is_compiled_anew(other: dict[str, Any]) -> None:
    kernel = Kernel()
    launcher = launch.Launcher(kernel)
    for changes in ({}, other, {}, other):
        call(launcher, **USUAL | changes)
    assert (kernel.compiled, kernel.launched_again) == (2, 2)


def test_sizes_that_never_come_again_do_not_pile_up() -> None:
    launcher = launch.Launcher(Kernel(), max_binaries=10)
    for size in range(100):
        call(launcher, **USUAL | {"numbers": (size, 0.5)})
    assert 0 < len(launcher) <= 10
