"""The table of classes that were added, beside those of a training."""

from dataclasses import replace
from pathlib import Path

import pytest

from shortlist import ShortlistError
from shortlist.program.reproduce.add_class import AddedResult, measure_additions, table, update_additions

FIRST = AddedResult(seed=0, loss="balanced_softmax", how="added", photos=None, new=40.0, old=50.0, seconds=2.0)


def test_the_table_has_means_over_seeds_and_the_longest_time() -> None:
    others = [replace(FIRST, seed=1, new=50.0, seconds=9.0), replace(FIRST, how="without", photos=0, new=None)]
    columns = [list(column.cells) for column in table([FIRST, *others]).columns]
    assert columns[1:3] == [["added", "without"], ["all", "0"]]
    new, old, seconds = columns[3:]
    assert str(new[0]).startswith("45.0 ±")
    assert new[1] == ""
    assert old == ["50.0 ± 0.0", "50.0"]
    assert seconds == ["9.0", "2.0"]


def test_a_measurement_replaces_its_own_results_alone(tmp_path: Path) -> None:
    path = tmp_path / "results" / "add-class.json"
    other_loss, other_seed = replace(FIRST, loss="ldam"), replace(FIRST, seed=1)
    update_additions(path, [FIRST, replace(FIRST, how="trained"), other_loss, other_seed])
    again = replace(FIRST, new=41.0)
    assert update_additions(path, [again]) == [again, other_loss, other_seed]
    assert update_additions(path, []) == [again, other_loss, other_seed]


def test_a_damaged_file_is_named_and_kept(tmp_path: Path) -> None:
    (tmp_path / "add-class.json").write_text("[{}]")
    with pytest.raises(ShortlistError, match=r"add-class\.json is damaged"):
        update_additions(tmp_path / "add-class.json", [FIRST])
    assert (tmp_path / "add-class.json").read_text() == "[{}]"


def test_a_damaged_file_is_told_before_any_training(tmp_path: Path) -> None:
    """Before even the data is looked for: there is none."""
    (tmp_path / "add-class.json").write_text("[{}]")
    with pytest.raises(ShortlistError, match=r"add-class\.json is damaged"):
        measure_additions(str(tmp_path / "no-data"), results=tmp_path)
