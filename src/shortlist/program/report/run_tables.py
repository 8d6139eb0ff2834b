"""The tables of the page: results, settings, and the folders and machines of the runs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

from shortlist.ops.class_counts import FEW_BELOW, MANY_ABOVE
from shortlist.program.report.charts import key
from shortlist.program.report.gather import Comparison, Run, Setup
from shortlist.program.report.markup import Html, element, plain_table, scrolling
from shortlist.program.report.names import loss_settings, settings, shown, varied_settings
from shortlist.program.report.summary import ABSENT, Summary, percent, seconds, summarise
from shortlist.program.text import counted

SIZES = {"few": f"under {FEW_BELOW}", "medium": f"{FEW_BELOW} to {MANY_ABOVE}", "many": f"over {MANY_ABOVE}"}
"""The three groups of classes, by number of training images."""
_EQUALS = "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class _Column:
    group: str
    title: str
    of: Callable[["_Row"], Summary | None]
    text: Callable[[float], str] = percent
    best: Callable[[Iterable[float]], float] | None = max


@dataclass(frozen=True)
class _Row:
    """A set-up, with its scores as they are or corrected for the prior."""

    setup: Setup
    corrected: bool = False


def results_table(comparison: Comparison) -> Html:
    """A row a set-up, and one for its corrected scores: accuracy by K, by class size at the main K, training time."""
    columns = [
        _metric(f"{average} accuracy", f"top-{k}", f"{average}_top{k}")
        for average in ("micro", "macro")
        for k in comparison.ks
    ]
    if comparison.main_k is not None:
        columns += _by_size(comparison.main_k)
    columns += [
        _Column("training", "seconds", _train_seconds, seconds, min),
        _Column("training", "best epoch", _best_epoch, "{:.0f}".format, None),
    ]
    return _table("Results", comparison, columns)


def sizes_table(comparison: Comparison) -> Html:
    """Accuracy by class size at each common K."""
    return _table("Results by class size", comparison, [column for k in comparison.ks for column in _by_size(k)])


def _table(label: str, comparison: Comparison, columns: Sequence[_Column]) -> Html:
    # Drop columns without values: there may be no class of that size.
    columns = [column for column in columns if any(column.of(_Row(setup)) for setup in comparison.finished)]
    shown_rows = [row for setup in comparison.finished for row in _rows_of(setup)]
    best = [_best_text(column, shown_rows) for column in columns]
    varied = varied_settings([setup.config for setup in comparison.setups])
    rows = []
    for setup in comparison.setups:
        if not setup.finished:
            cells = [element("td", _progress(setup), colspan=max(1, len(columns)), class_="unfinished")]
            rows.append(element("tr", _row_heading(setup, varied), *cells))
        for row in _rows_of(setup) if setup.finished else []:
            heading = _corrected_heading(setup) if row.corrected else _row_heading(setup, varied)
            cells = [_cell(column, row, bold) for column, bold in zip(columns, best, strict=True)]
            rows.append(element("tr", heading, *cells, class_="corrected" if row.corrected else None))
    return scrolling(label, element("table", _head(columns), element("tbody", *rows), class_="results"))


def _head(columns: Sequence[_Column]) -> Html:
    groups = [(name, len(list(members))) for name, members in groupby(columns, lambda column: column.group)]
    return element(
        "thead",
        element(
            "tr",
            element("th", "loss", rowspan=2, scope="col"),
            *(element("th", name, colspan=count, scope="colgroup") for name, count in groups),
        ),
        element("tr", *(element("th", column.title, *_size_note(column.title), scope="col") for column in columns)),
    )


def _size_note(title: str) -> list[Html]:
    return [element("small", SIZES[title])] if title in SIZES else []


def _row_heading(setup: Setup, varied: Sequence[str]) -> Html:
    values = settings(setup.config)
    others = [f"{name} = {shown(values[name])}" for name in varied if name != "recipe" and not name.startswith("loss.")]
    notes = [loss_settings(setup.config.loss), ", ".join(others), _seeds(setup)]
    return element(
        "th",
        key(setup.label, setup.style),
        *(element("small", note.replace(" = ", _EQUALS)) for note in notes if note and note not in setup.label),
        scope="row",
    )


def _rows_of(setup: Setup) -> list[_Row]:
    return [_Row(setup), _Row(setup, corrected=True)] if setup.corrections else [_Row(setup)]


def _corrected_heading(setup: Setup) -> Html:
    """The strength of the correction, and what it rests on."""
    found = setup.corrections
    tau = summarise([correction.tau for correction in found])
    spread = f" ± {tau.deviation:.2g}" if tau and tau.count > 1 else ""
    # Seeds share the data, so the numbers of images and classes are those of each.
    first = found[0]
    basis = (
        f"chosen on {counted(first.images, 'validation image')} of {first.classes:,} of {first.num_classes:,} classes"
    )
    return element(
        "th",
        f"{setup.label}, corrected for class sizes",
        element("small", f"τ{_EQUALS}{tau.mean:.2g}{spread}, {basis}" if tau else basis),
        scope="row",
    )


def _seeds(setup: Setup) -> str:
    if not setup.finished:
        return ""
    unfinished = f", {len(setup.unfinished)} more unfinished" if setup.unfinished else ""
    return counted(len(setup.finished), "seed") + unfinished


def _progress(setup: Setup) -> str:
    done = ", ".join(str(len(run.epochs)) for run in setup.unfinished)
    return f"unfinished: {done} of {counted(setup.config.train.epochs, 'epoch')} done"


def _cell(column: _Column, row: _Row, best: str | None) -> Html:
    summary = column.of(row)
    if summary is None:
        return element("td", ABSENT)
    text = column.text(summary.mean)
    mean = element("data", text, value=repr(summary.mean))
    if summary.count > 1:
        deviation = element("data", column.text(summary.deviation), value=repr(summary.deviation))
        spread = [element("small", "± ", deviation)]
    else:
        spread = []
    return element("td", element("strong", mean) if text == best else mean, *spread)


def _best_text(column: _Column, rows: Sequence[_Row]) -> str | None:
    """The best value as written, so that values that look equal are both bold; None if there is nothing to compare."""
    means = [summary.mean for summary in map(column.of, rows) if summary]
    return column.text(column.best(means)) if column.best and len(means) > 1 else None


def _metric(group: str, title: str, name: str) -> _Column:
    return _Column(group, title, lambda row: row.setup.test_metric(name, corrected=row.corrected))


def _by_size(k: int) -> list[_Column]:
    return [_metric(f"macro top-{k} by training images", size, f"{size}_top{k}") for size in SIZES]


def _train_seconds(row: _Row) -> Summary | None:
    return _of_training(row, lambda final: final["train_seconds"])


def _best_epoch(row: _Row) -> Summary | None:
    """Counted from 1."""
    return _of_training(row, lambda final: final["best_epoch"] + 1)


def _of_training(row: _Row, value: Callable[[dict[str, Any]], float]) -> Summary | None:
    """None for corrected scores, which are of the same training."""
    return None if row.corrected else summarise([value(run.final) for run in row.setup.finished if run.final])


def settings_table(comparison: Comparison) -> Html:
    """All settings of all set-ups; those that differ come first and are marked."""
    configs = [setup.config for setup in comparison.setups]
    varied = varied_settings(configs)
    flat = [settings(config) for config in configs]
    rows = [
        element(
            "tr",
            element("th", element("code", name), scope="row"),
            *(element("td", shown(values[name]) if name in values else ABSENT) for values in flat),
            class_="varied" if name in varied else None,
        )
        for name in sorted(dict.fromkeys(chain(*flat)), key=lambda name: name not in varied)
    ]
    names = (element("th", key(setup.label, setup.style), scope="col") for setup in comparison.setups)
    head = element("tr", element("th", "setting", scope="col"), *names)
    return scrolling("Settings", element("table", element("thead", head), element("tbody", *rows)))


def origins_table(comparison: Comparison) -> Html:
    """Folder, seed, machine and versions of each run."""
    runs = [run for setup in comparison.setups for run in (*setup.finished, *setup.unfinished, *setup.copies)]
    copies = [run for setup in comparison.setups for run in setup.copies]
    columns = ("folder", "seed", "state", "started", "device", "torch", "commit")
    rows = ((str(run.folder.path), [str(run.config.seed), _state(run, copies), *_origin(run)]) for run in runs)
    return plain_table("Folders and machines", columns, rows)


def _state(run: Run, copies: list[Run]) -> str:
    return ("unfinished" if run.final is None else "finished") + (", left out" if run in copies else "")


def _origin(run: Run) -> list[str]:
    found = run.environment
    commits = run.folder.commits() if found else []
    versions = found.get("versions", {})
    started = str(found.get("started", ABSENT)).replace("T", " ")
    device = str(found.get("device", ABSENT))
    if found.get("world_size", 1) > 1:
        device = f"{device}, {found['world_size']} processes"
    return [started, device, versions.get("torch", ABSENT), ", ".join(commits) or ABSENT]
