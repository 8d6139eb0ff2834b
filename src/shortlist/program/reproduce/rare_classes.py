"""Rewrites the generated part of docs/rare-classes.md from the results of the comparisons."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.ops.class_counts import FEW_BELOW, MANY_ABOVE
from shortlist.program.compare.candidates import Candidate
from shortlist.program.compare.intervals import Interval
from shortlist.program.compare.standings import BASELINE
from shortlist.program.documents import MarkedPage
from shortlist.program.losses import Range
from shortlist.program.report.names import loss_settings, settings, shown
from shortlist.program.report.summary import ABSENT, PLUS_MINUS
from shortlist.program.reproduce import heads
from shortlist.program.reproduce.comparison_results import Found, Loss, Run, comparison_file, read_comparison
from shortlist.program.reproduce.comparisons import COMPARISONS, CONTENDERS, Comparison
from shortlist.program.reproduce.figures import rare_classes as figures
from shortlist.program.text import counted

NAME = "rare-classes"
_MINUS = "\N{MINUS SIGN}"
_GROUPS = ("few", "medium", "many")
_BY_FEW = "top-5, τ by few images"


def write_rare_classes(results: Path, docs: Path) -> Path:
    """Rewrite the tables and figures of ``docs/rare-classes.md``.

    Args:
        results: Folder of the files of the comparisons.
        docs: The folder of the document, which must hold the two marks.
    """
    files = {name: comparison_file(results, comparison, "paper") for name, comparison in COMPARISONS.items()}
    found = {name: read_comparison(COMPARISONS[name], path) for name, path in files.items() if path.is_file()}
    if not found:
        raise ShortlistError(f"there are no comparisons in {results}")
    page = MarkedPage(docs / f"{NAME}.md", "shortlist reproduce --document")
    made = [text for name, comparison in COMPARISONS.items() for text in _part(comparison, found.get(name), docs)]
    made += _heads(results / f"{heads.NAME}.json")
    page.rewrite("\n\n".join(made))
    return page.path


def _heads(path: Path) -> Iterator[str]:
    yield "## Every last layer on every network"
    yield f"`shortlist reproduce {heads.NAME}`"
    if not path.is_file():
        yield "Not run yet."
        return
    runs = heads.read_heads(path)
    labels = [CONTENDERS[name].label for name in heads.LOSSES]
    for k in (1, 5):
        lines = [
            [
                CONTENDERS[row].label,
                *(_percent(heads.mean_of(runs, row, head, f"macro_top{k}")) for head in heads.LOSSES),
            ]
            for row in heads.LOSSES
        ]
        yield f"Macro top-{k}. Rows: the loss that trained the network; columns: the loss of its new last layer."
        yield _markdown(["loss", *labels], lines)
    yield (
        f"- CIFAR-100-LT, the networks of `{heads.COMPARISON}`, frozen; last layers trained for 30 epochs, corrected "
        "for class sizes. ±: 95 % interval over seeds.\n"
        f"- {_origin(runs)}"
    )


def _part(comparison: Comparison, found: Found | None, docs: Path) -> Iterator[str]:
    yield f"## {comparison.title}"
    yield f"`shortlist reproduce {comparison.name}`"
    trained = [loss for loss in found.losses if loss.runs] if found else []
    if found is None or not trained:
        yield "Not run yet." if found is None else "Searched, and not yet trained with the seeds."
        return
    yield results_table(trained)
    for drawn in figures.draw(comparison.name, found, docs / NAME):
        yield f"![{drawn.replace('-', ' ')}]({NAME}/{drawn}.png)"
    yield "\n".join(f"- {note}" for note in _notes(comparison, trained))
    yield "Settings that the search chose:"
    yield settings_table(trained)


def results_table(losses: Sequence[Loss]) -> str:
    """A line for each loss, in percent, the best on the validation images first."""
    baseline = next((loss for loss in losses if loss.name == BASELINE), None)
    headings = [
        "loss",
        "seeds",
        "top-1",
        "top-3",
        "top-5",
        "top-1, to cross-entropy",
        "top-5, to cross-entropy",
        "top-5, few / medium / many",
        "top-5, uncorrected",
        "τ",
    ]
    lines = [_result_line(loss, baseline) for loss in losses]
    if any(loss.thinned("macro_top5") for loss in losses):
        headings.append(_BY_FEW)
        lines = [[*line, _percent(loss.thinned("macro_top5"))] for line, loss in zip(lines, losses, strict=True)]
    return _markdown(headings, lines)


def _result_line(loss: Loss, baseline: Loss | None) -> list[str]:
    taus = [run.tau for run in loss.runs if run.tau is not None]
    groups = [loss.mean(f"{group}_top5") for group in _GROUPS]
    return [
        loss.label,
        f"{len(loss.runs)}",
        *(_percent(loss.mean(f"macro_top{k}")) for k in (1, 3, 5)),
        *(_percent(loss.difference(baseline, f"macro_top{k}") if baseline else None, signed=True) for k in (1, 5)),
        " / ".join(f"{100 * group.mean:.1f}" if group else ABSENT for group in groups),
        _percent(loss.mean("macro_top5", corrected=False)),
        f"{sum(taus) / len(taus):.2f}" if taus else ABSENT,
    ]


def settings_table(losses: Sequence[Loss]) -> str:
    """What the search chose for each loss."""
    lines = []
    for loss in sorted(losses, key=lambda known: known.label):
        if loss.config is None:
            continue
        values = settings(loss.config)
        others = [name for name in loss.searched if not name.startswith("loss.")]
        texts = [loss_settings(loss.config.loss, digits=3), *(f"{name} = {shown(values[name], 3)}" for name in others)]
        lines.append([loss.label, ", ".join(text for text in texts if text)])
    return _markdown(["loss", "settings"], lines)


def _notes(comparison: Comparison, losses: Sequence[Loss]) -> Iterator[str]:
    """What the numbers are, and how they were obtained."""
    yield (
        "Macro accuracy on the test images in percent, corrected for class sizes unless it says uncorrected; the best "
        "on the validation images is first. ±: 95 % interval over seeds (Student's t); differences are paired by seed."
    )
    yield (
        f"Few, medium and many: classes with less than {FEW_BELOW}, up to {MANY_ABOVE} and more training images. τ: "
        "mean strength of the correction, chosen on the validation images."
    )
    if any(loss.thinned("macro_top5") for loss in losses):
        yield (
            "τ by few images: τ chosen on validation images that are thinned like the training images, as somebody has "
            "them who collected all images in the same way. Epoch and settings are the same as in the other columns."
        )
    if comparison.remarks:
        yield comparison.remarks
    if not comparison.base("paper").train.select_corrected:
        yield (
            "Epochs were chosen by the accuracy before the correction, which may have cost losses that ignore class "
            "sizes some of theirs."
        )
    yield _search_described(comparison)
    dropped = [loss.label for loss in losses if loss.state == "dropped"]
    if dropped:
        yield (
            f"{counted(len(dropped), 'loss', 'losses')} got no further seeds, after three or more: their paired "
            "difference to the leader on the validation images had a 95 % interval below zero."
        )
    yield _origin([run for loss in losses for run in loss.runs])


def _origin(runs: Sequence[Run | heads.HeadRun]) -> str:
    """How many runs there are, and where, when and with which commits they were made."""
    machines = ", ".join(dict.fromkeys(run.device for run in runs))
    days = sorted(run.started[:10] for run in runs)
    period = " to ".join(dict.fromkeys((days[0], days[-1])))
    commits = ", ".join(dict.fromkeys(commit for run in runs for commit in run.commit.split()))
    return f"{counted(len(runs), 'run')} {period} on {machines}{commits and f', commit {commits}'}."


def _search_described(comparison: Comparison) -> str:
    base, budget = comparison.base("paper"), comparison.budget("paper")
    every = [_axes(comparison, candidate) for candidate in comparison.contenders()]
    shared = {name for name in every[0] if all(axes.get(name) == every[0][name] for axes in every)}
    ranges: dict[str, list[str]] = {}
    for axes in every:
        for name, axis in axes.items():
            text = f"{name} {axis.low:g} to {axis.high:g}"
            if text not in ranges.setdefault(name, []):
                ranges[name].append(text)
    of_all = ", ".join(text for name in sorted(shared) for text in ranges[name])
    of_some = ", ".join(text for name in sorted(ranges) if name not in shared for text in ranges[name])
    shorter = "" if budget.epochs == base.train.epochs else f" of {counted(budget.epochs, 'epoch')}"
    return (
        f"Search: {counted(budget.trials, 'trial')}{shorter} for every loss, with a seed of their own; the first has "
        "the settings that the loss has by itself. They are judged by corrected macro top-5 accuracy on the "
        f"validation images. Searched for every loss: {of_all}. For those that have it: {of_some}."
    )


def _axes(comparison: Comparison, candidate: Candidate) -> dict[str, Range]:
    axes = candidate.axes(comparison.base("paper"), comparison.search, comparison.fixed)
    return {name: axis for name, axis in axes.items() if isinstance(axis, Range)}


def _percent(found: Interval | None, *, signed: bool = False) -> str:
    if found is None:
        return ABSENT
    mean = f"{100 * found.mean:+.1f}" if signed else f"{100 * found.mean:.1f}"
    half = "" if found.half is None else f"{PLUS_MINUS}{100 * found.half:.1f}"
    return mean.replace("-", _MINUS) + half


def _markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---" if heading in ("loss", "settings") else "---:" for heading in headings]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *lines))
