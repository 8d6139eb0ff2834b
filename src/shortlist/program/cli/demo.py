"""The demo: four losses on the built-in look-alike characters, compared in a table and on a page."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from shortlist.program import recipes
from shortlist.program.config import differences
from shortlist.program.report.page import write_report
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import read_result
from shortlist.program.training.loop import Interrupted, train

DEMO_RECIPES = ("demo_cross_entropy", "demo_smooth", "demo_imbalanced", "demo_balanced_softmax")


def run_demo(out: Path, say: Callable[[str], None]) -> tuple[Table, Path]:
    """Train the runs that are not finished, and compare all.

    Returns:
        The table, and the path of the page.

    Raises:
        Interrupted: SIGINT or SIGTERM came; the same call continues where it stopped.
    """
    try:
        runs = [_trained(name, out / name, say) for name in DEMO_RECIPES]
    except KeyboardInterrupt:
        raise Interrupted("stopped; repeat the command to continue") from None
    return results_table(runs), write_report(runs, out / "report.html")


def _trained(recipe: str, folder: Path, say: Callable[[str], None]) -> RunFolder:
    run = RunFolder(folder)
    if run.finished and not differences(run.config, recipes.build(recipe)):
        say(f"{run.path} is already finished")
        return run
    say(f"{recipe}: {recipes.HELP[recipe]}")
    return train(recipes.build(recipe), folder=run.path, resume=True)


def results_table(runs: Sequence[RunFolder]) -> Table:
    """Test accuracy of finished runs, in percent."""
    table = Table(box=None, pad_edge=False)
    table.add_column("loss", overflow="fold")
    config = runs[0].config
    columns = [f"{average}_top{k}" for average in ("micro", "macro") for k in config.train.ks]
    columns += [f"{group}_top{config.loss.largest_k}" for group in ("few", "medium", "many")]
    for name in (*columns, "seconds"):
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    for run in runs:
        result = read_result(run)
        values = ("-" if result["test"].get(name) is None else f"{100 * result['test'][name]:.1f}" for name in columns)
        table.add_row(run.config.loss.label, *values, f"{result['train_seconds']:.0f}")
    return table
