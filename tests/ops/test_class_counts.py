"""Margins grow as a class gets rarer."""

import pytest
import torch

import shortlist as sl


def test_margins_of_float64_counts_have_its_digits() -> None:
    margins = sl.class_margins(torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64), max_margin=0.3)
    assert margins.tolist() == pytest.approx([0.3, 0.3 * 3**-0.25, 0.3 * 7**-0.25], rel=1e-14)


def test_rarer_classes_have_larger_margins_and_the_rarest_the_largest() -> None:
    margins = sl.class_margins([10, 1000, 1, 10], max_margin=0.4)
    assert margins.max() == margins[2] == pytest.approx(0.4)
    torch.testing.assert_close(margins[0] / margins[1], torch.tensor(1000 / 10) ** 0.25)
    assert margins[0] == margins[3]


@pytest.mark.parametrize(
    "counts", [[3, 5], [3.0, 5.0], torch.tensor([3, 5]), torch.tensor([3.0, 5.0]).double()], ids=str
)
def test_margins_take_any_kind_of_counts(counts: list[int]) -> None:
    torch.testing.assert_close(
        sl.class_margins(counts, 0.3).double(), torch.tensor([0.3, 0.3 * (3 / 5) ** 0.25]).double()
    )
