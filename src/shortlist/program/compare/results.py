"""What people get of a comparison: a table, sentences, files, and the command that trains the winner."""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from shortlist.program import recipes
from shortlist.program.atomic_files import write_file
from shortlist.program.compare.intervals import Interval
from shortlist.program.compare.standings import Entry, Outcome, Standings, validation
from shortlist.program.config import to_dict
from shortlist.program.report.markup import Html, element, plain_table
from shortlist.program.report.names import loss_settings, settings, shown
from shortlist.program.report.page import write_report
from shortlist.program.report.summary import ABSENT, PLUS_MINUS
from shortlist.program.runs.folder import RunFolder
from shortlist.program.text import counted, spreadsheet_cell

_Of = Callable[[Outcome], float | None]


def write_results(standings: Standings, out: Path) -> list[Path]:
    """Write ``compare.csv``, ``compare.json`` and, if there are runs, ``report.html`` to a folder."""
    content = json.dumps(as_json(standings), indent=1, allow_nan=False) + "\n"
    written = [out / "compare.csv", out / "compare.json"]
    write_file(written[0], csv_text(standings).encode())
    write_file(written[1], content.encode(errors="backslashreplace"))
    runs = [RunFolder(outcome.folder) for entry in standings.entries for outcome in entry.outcomes]
    if runs:
        written.append(write_report(runs, out / "report.html", opening=section(standings)))
    return written


def table(standings: Standings) -> Table:
    """For the terminal."""
    shown_table = Table(box=None, pad_edge=False)
    for name in _columns(standings):
        heading = name.replace(", ", "\n").replace(" ", "\n")
        shown_table.add_column(heading, justify="left" if name in ("loss", "settings") else "right", no_wrap=True)
    for entry in standings.entries:
        shown_table.add_row(*_cells(standings, entry))
    return shown_table


def section(standings: Standings) -> Html:
    """For the page."""
    rows = [(name, cells) for name, *cells in (_cells(standings, entry) for entry in standings.entries)]
    command = winner_command(standings)
    return element(
        "section",
        element("h2", "Which loss for this data?", class_="part"),
        element("p", " ".join(verdict(standings)), class_="lead"),
        plain_table("Losses compared", _columns(standings), rows),
        *(element("p", note, class_="note") for note in notes(standings)),
        *([element("p", "The best one is trained by:"), element("pre", element("code", command))] if command else []),
    )


def verdict(standings: Standings) -> list[str]:
    """Which loss is best, and which the seeds cannot tell apart from it."""
    leader = standings.leader
    if leader is None:
        return ["No loss has finished."]
    best = f"Best on the validation images: {leader.candidate.label}."
    if len(standings.seeds) == 1:
        return [best, "One seed cannot tell losses apart: name more with --seeds."]
    others = [entry.candidate.label for entry in standings.undecided]
    if others:
        return [best, f"{counted(len(standings.seeds), 'seed')} cannot tell apart from it: {'; '.join(others)}."]
    return [best, "All others are behind it by more than chance explains."]


def notes(standings: Standings) -> list[str]:
    """How to read the table."""
    entries = standings.entries
    corrected = any(outcome.tau is not None for entry in entries for outcome in entry.outcomes)
    texts = [
        f"In percent, ordered by {standings.metric} on the validation images"
        f"{', after the correction for class sizes' if corrected else ''}. No choice was made on the test images.",
        "±: 95 % interval over seeds (Student's t). Differences are between runs of the same seed"
        f"{'; those of the test images are after the correction' if corrected else ''}.",
    ]
    dropped = [entry.candidate.label for entry in entries if entry.is_dropped]
    if dropped:
        texts.append(f"Dropped early, clearly behind on the validation images: {'; '.join(dropped)}.")
    return texts + [f"{entry.candidate.label} failed: {entry.failure}." for entry in entries if entry.failure]


def winner_command(standings: Standings) -> str | None:
    """The command that trains the best loss with the first seed."""
    leader = standings.leader
    if leader is None or leader.config is None:
        return None
    return recipes.command_line(replace(leader.config, seed=standings.seeds[0]))


def settings_text(entry: Entry) -> str:
    """The settings of the loss, and the others that were searched."""
    if entry.config is None:
        return ABSENT
    values = settings(entry.config)
    others = (name for name in entry.chosen.searched if not name.startswith("loss."))
    texts = [loss_settings(entry.config.loss, digits=3), *(f"{name} = {shown(values[name], 3)}" for name in others)]
    return ", ".join(text for text in texts if text)


def _numbers(standings: Standings, entry: Entry) -> dict[str, Interval | None]:
    """The columns of numbers, by their names in the table."""
    metric, k = standings.metric, standings.base.loss.largest_k
    macro, micro = f"macro_top{k}", f"micro_top{k}"

    def final(name: str) -> _Of:
        return lambda outcome: outcome.final(name) if outcome.corrected is not None else None

    def plain(name: str) -> _Of:
        return lambda outcome: outcome.plain(name)

    def used(outcome: Outcome) -> float | None:
        return outcome.final(metric)

    return {
        f"val {metric}": entry.mean(validation),
        "val, to the best": entry.difference(standings.leader, validation),
        f"test {macro}": entry.mean(plain(macro)),
        f"test {macro} corrected": entry.mean(final(macro)),
        f"test {micro}": entry.mean(plain(micro)),
        f"test {micro} corrected": entry.mean(final(micro)),
        f"test {metric}, to the best": entry.difference(standings.leader, used),
        f"test {metric}, to cross-entropy": entry.difference(standings.baseline, used),
    }


def _columns(standings: Standings) -> list[str]:
    return ["loss", "seeds", *_numbers(standings, standings.entries[0]), "tau", "settings"]


def _cells(standings: Standings, entry: Entry) -> list[str]:
    mark = " (dropped)" if entry.is_dropped else " (failed)" if entry.failure else ""
    tau = entry.mean(lambda outcome: outcome.tau)
    return [
        f"{entry.candidate.label}{mark}",
        str(len(entry.outcomes)),
        *(
            _written(number, signed=", to " in name) if number else ABSENT
            for name, number in _numbers(standings, entry).items()
        ),
        f"{tau.mean:.2f}" if tau else ABSENT,
        settings_text(entry),
    ]


def _written(number: Interval, *, signed: bool) -> str:
    mean = f"{100 * number.mean:+.2f}" if signed else f"{100 * number.mean:.2f}"
    return mean.replace("-", "\N{MINUS SIGN}") + ("" if number.half is None else f"{PLUS_MINUS}{100 * number.half:.2f}")


def csv_text(standings: Standings) -> str:
    """A line for each loss; shares, not percent."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = list(_numbers(standings, standings.entries[0]))
    headings = [name.replace(", ", "_").replace(" ", "_").replace("-", "_") for name in names]
    parts = [heading for name in headings for heading in (name, f"{name}_half_width")]
    writer.writerow(["loss", "state", "settings", "trials", "seeds", *parts, "tau"])
    for entry in standings.entries:
        numbers = _numbers(standings, entry).values()
        values = [value for number in numbers for value in ((number.mean, number.half) if number else ("", ""))]
        tau = entry.mean(lambda outcome: outcome.tau)
        row = [entry.candidate.name, _state(entry), settings_text(entry), len(entry.chosen.trials)]
        cells = [*row, len(entry.outcomes), *values, tau.mean if tau else ""]
        writer.writerow(["" if cell is None else spreadsheet_cell(cell) for cell in cells])
    return text.getvalue()


def as_json(standings: Standings) -> dict[str, Any]:
    """All that is known: every trial, every run, every number."""
    return {
        "metric": standings.metric,
        "seeds": list(standings.seeds),
        "verdict": verdict(standings),
        "command": winner_command(standings),
        "losses": [_entry_json(standings, entry) for entry in standings.entries],
    }


def _entry_json(standings: Standings, entry: Entry) -> dict[str, Any]:
    numbers = _numbers(standings, entry)
    return {
        "name": entry.candidate.name,
        "state": _state(entry),
        "failure": entry.failure,
        "config": entry.config and to_dict(entry.config),
        "searched": list(entry.chosen.searched),
        "trials": [
            {"settings": dict(trial.settings), "state": trial.state, "value": trial.value, "epochs": trial.epochs}
            for trial in entry.chosen.trials
        ],
        "runs": [
            {
                "seed": outcome.seed,
                "folder": str(outcome.folder),
                "val": outcome.val,
                "tau": outcome.tau,
                "test": dict(outcome.test),
                "test_corrected": outcome.corrected and dict(outcome.corrected),
            }
            for outcome in entry.outcomes
        ],
        "numbers": {
            name: {"mean": number.mean, "half_width": number.half, "seeds": number.count}
            for name, number in numbers.items()
            if number
        },
    }


def _state(entry: Entry) -> str:
    return "failed" if entry.failure else "dropped" if entry.is_dropped else "complete"
