"""The table of classes that were added, beside those of a training."""

from dataclasses import replace

from shortlist.program.reproduce.add_class import AddedResult, table


def test_the_table_has_means_over_seeds_and_the_longest_time() -> None:
    first = AddedResult(seed=0, loss="balanced_softmax", how="added", photos=None, new=40.0, old=50.0, seconds=2.0)
    others = [replace(first, seed=1, new=50.0, seconds=9.0), replace(first, how="without", photos=0, new=None)]
    columns = [list(column.cells) for column in table([first, *others]).columns]
    assert columns[1:3] == [["added", "without"], ["all", "0"]]
    new, old, seconds = columns[3:]
    assert str(new[0]).startswith("45.0 ±")
    assert new[1] == ""
    assert old == ["50.0 ± 0.0", "50.0"]
    assert seconds == ["9.0", "2.0"]
