"""What a comparison is about, in words."""

from collections.abc import Sequence
from pathlib import Path

from shortlist.program.config import DataConfig
from shortlist.program.report.formats import percent_spread
from shortlist.program.report.gather import Comparison
from shortlist.program.report.markup import Html, element, joined
from shortlist.program.wording import counted

_PERCENT = "\N{NARROW NO-BREAK SPACE}%"
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def page_title(comparisons: list[Comparison]) -> str:
    """Which data, and what is compared."""
    if len(comparisons) > 1:
        return f"Runs on {_listed(list(dict.fromkeys(data_name(each.data) for each in comparisons)))}"
    what = subject(comparisons[0])
    return f"{what[0].upper()}{what[1:]} on {data_name(comparisons[0].data)}"


def data_name(data: DataConfig) -> str:
    """The data's own name, or that of its folder or file."""
    return Path(data.root).name or data.name if data.is_named_by_root else data.name


def subject(comparison: Comparison) -> str:
    """What is compared: losses, or set-ups where some share a loss."""
    setups = comparison.setups
    if len(setups) == 1:
        return setups[0].label
    losses = {setup.config.loss.name for setup in setups}
    return f"{_in_words(len(setups))} {'losses' if len(losses) == len(setups) else 'set-ups'}"


def data_facts(comparison: Comparison) -> str:
    """How large the data is and what was done to it."""
    data, sizes = comparison.data, comparison.train_images
    facts = []
    if sizes:
        classes = counted(len(sizes), "class", "classes")
        facts.append(f"{classes} of {_span(sizes)} training images, {sum(sizes):,} in all")
    facts += _test_images(comparison)
    if data.imbalance != 1:
        facts.append(f"{data.imbalance_kind} imbalance {data.imbalance:g}")
    if data.label_noise:
        facts.append(f"label noise {data.label_noise:g} within {data.noise_groups} groups")
    finished, unfinished = len(comparison.runs), sum(len(setup.unfinished) for setup in comparison.setups)
    facts.append(f"{counted(finished, 'finished run')}" + (f", {unfinished} unfinished" if unfinished else ""))
    if copies := sum(len(setup.copies) for setup in comparison.setups):
        facts.append(f"{counted(copies, 'run')} left out: settings and seed are those of another")
    return "; ".join(facts) + "."


def _test_images(comparison: Comparison) -> list[str]:
    """How many were looked at, and how many could not be read; nothing where no run has kept its suggestions."""
    could_be_read = [run.predictions.labels >= 0 for run in comparison.runs if run.predictions]
    if not could_be_read:
        return []
    tested = [int(each.sum()) for each in could_be_read]
    left_out = [int((~each).sum()) for each in could_be_read]
    text = f"{_span(tested)} test image{'' if max(tested) == 1 else 's'}"
    return [f"{text}, {_span(left_out)} more could not be read" if any(left_out) else text]


def _span(numbers: Sequence[int]) -> str:
    smallest, largest = min(numbers), max(numbers)
    return f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"


def outcome(comparison: Comparison) -> Html | None:
    """Which set-up leads, in one sentence; None where there is nothing to compare."""
    k = comparison.main_k
    scores = {setup.label: setup.test_metric(f"macro_top{k}") for setup in comparison.ranking}
    written = {label: percent_spread(score) for label, score in scores.items() if score}
    if k is None or len(written) < 2:
        return None
    best = next(iter(written.values()))
    # What looks the same in the table is not put in an order here.
    leaders = [label for label, text in written.items() if text == best]
    followers = [f"; next {label}, {text}{_PERCENT}" for label, text in written.items() if text != best]
    lead = element("strong", f"{_listed(leaders)}, {best}{_PERCENT}")
    return joined([f"Highest macro top-{k} accuracy: ", lead, *followers[:1], "."])


def _in_words(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else f"{number:,}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
