"""The search before the comparison: the same number of trials for every candidate, on the validation images alone."""

import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.compare.candidates import Candidate
from shortlist.program.config import RunConfig, changed
from shortlist.program.losses import Range
from shortlist.program.runs.folder import BEST, RunFolder, file_digest
from shortlist.program.runs.model import load_best
from shortlist.program.training.build import Parts
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.correction import fit_correction
from shortlist.program.training.evaluate import split_scores
from shortlist.program.training.step import uncompiled
from shortlist.program.tuning.findings import Findings, TrialRecord, best_first
from shortlist.program.tuning.space import Axis, Settings
from shortlist.program.tuning.study import run_study, study_name

FOLDER = Path("runs", "compare")
_FIRST_SEARCH_SEED = 1000


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What is spent on the search for the settings of each candidate."""

    trials: int
    """0 takes the settings that a candidate has."""
    epochs: int
    """Length of a trial."""
    search: Sequence[str] = ()
    """More settings to search, or other ranges, such as ``optim.weight_decay=1e-5,1e-3``."""
    fixed: Collection[str] = ()
    """Settings that keep the value they have."""
    storage: str = ""
    lost_after: float = 24.0


@dataclass(frozen=True)
class Chosen:
    """A candidate with the settings that the search chose."""

    candidate: Candidate
    config: RunConfig | None
    """None if every trial failed."""
    searched: tuple[str, ...] = ()
    """Names of the settings that were searched."""
    trials: tuple[TrialRecord, ...] = ()


def search_all(
    base: RunConfig,
    candidates: Sequence[Candidate],
    budget: Budget,
    *,
    seeds: Sequence[int],
    out: Path,
    say: Callable[[str], None],
    known: Mapping[str, Sequence[TrialRecord]] | None = None,
    pause: Callable[[], None] = lambda: time.sleep(5),
    callbacks: Sequence[Callback] = (),
) -> list[Chosen]:
    """Choose the settings of every candidate; wait for trials that other processes are running.

    Args:
        base: The recipe, with the user's settings.
        candidates: What is compared.
        budget: Of each candidate.
        seeds: Those of the comparison. The search has another one.
        out: Folder for the lists of trials.
        say: Called with messages.
        known: Trials of an earlier search, by the name of the candidate. One that tried all settings is not repeated.
        pause: Called before looking again at what other processes are running.
        callbacks: Of every training.
    """
    all_axes = [candidate.axes(base, budget.search, budget.fixed) for candidate in candidates]
    for text in budget.search:
        setting = text.partition("=")[0].replace("-", "_")
        if not any(setting in axes for axes in all_axes):
            raise ShortlistError(f"none of the losses has the setting {setting} that --search names")
    seed = next(seed for seed in itertools.count(_FIRST_SEARCH_SEED) if seed not in seeds)
    tell = _without_repetition(say)  # a study is looked at again while other processes work on it
    chosen: dict[str, Chosen] = {}
    left = list(zip(candidates, all_axes, strict=True))
    while True:
        pending = []
        for candidate, axes in left:
            config = candidate.config(base)
            if budget.trials == 0 or not axes:
                chosen[candidate.name] = Chosen(candidate, config)
                continue
            short = changed(config, {"seed": seed, "train.epochs": budget.epochs})
            points = search_points(short, axes, budget.trials)
            earlier = (known or {}).get(candidate.name, ())
            as_long = [trial for trial in earlier if trial.state == "pruned" or trial.epochs == budget.epochs]
            tried = _trials_of(points, as_long)
            if tried is None:
                found = _search(candidate, short, axes, points, budget, out, tell, callbacks)
                tried = _trials_of(points, found.trials)
            if tried is None:
                pending.append((candidate, axes))
                continue
            best = best_first(tried)[:1]
            settled = changed(config, best[0].settings) if best else None
            chosen[candidate.name] = Chosen(candidate, settled, tuple(axes), tuple(tried))
        if not pending:
            return [chosen[candidate.name] for candidate in candidates]
        if len(pending) == len(left):
            pause()
        left = pending


def _trials_of(points: Sequence[Settings], trials: Sequence[TrialRecord]) -> list[TrialRecord] | None:
    """The trials of these settings; None while one of them is missing or still running."""
    over = [trial for trial in trials if trial.state not in ("running", "waiting")]
    tried = [trial for trial in over if any(_is_same(trial.settings, point) for point in points)]
    return tried if len(tried) >= len(points) else None


def _is_same(settings: Settings, others: Settings) -> bool:
    """True if they differ in rounding at most: powers are not the same to the last bit on every machine."""
    return settings.keys() == others.keys() and all(
        math.isclose(value, others[name], rel_tol=1e-9) for name, value in settings.items()
    )


def _without_repetition(say: Callable[[str], None]) -> Callable[[str], None]:
    told: set[str] = set()

    def tell(message: str) -> None:
        if message not in told:
            told.add(message)
            say(message)

    return tell


def _search(
    candidate: Candidate,
    config: RunConfig,
    axes: Mapping[str, Axis],
    points: Sequence[Settings],
    budget: Budget,
    out: Path,
    say: Callable[[str], None],
    callbacks: Sequence[Callback],
) -> Findings:
    return run_study(
        study_name(config, axes, "compare", config.seed),
        config,
        axes,
        folder=FOLDER,
        points=points,
        judge=corrected_value,
        storage=budget.storage,
        prune=True,
        csv_path=out / f"search_{candidate.name}.csv",
        lost_after=budget.lost_after,
        say=lambda message: say(f"{candidate.name}: {message}"),
        callbacks=callbacks,
    )


def corrected_value(run: RunFolder, parts: Callable[[], Parts], values: Sequence[float]) -> float:
    """What a trial is worth: the metric of its best weights on the validation images, corrected as the run would be."""
    trained = parts()
    load_best(trained.network, run, trained.problem.input_shape)
    with uncompiled(trained.config):
        digest, device = file_digest(run.path / BEST), trained.fabric.device
        problem, config = trained.problem, trained.config
        found = split_scores(
            trained.model,
            problem.val,
            len(problem.classes),
            device=device,
            batch_size=config.train.eval_batch_size,
        )
        fitted = fit_correction(found, problem, config, best_sha256=digest)
    value = fitted[1].val[trained.config.select_metric] if fitted else None
    return max(values) if value is None else value


def search_points(config: RunConfig, axes: Mapping[str, Axis], trials: int) -> list[Settings]:
    """The settings to try: those that the candidate has, then points spread evenly over the ranges.

    They are fixed before the search. So neither a killed process nor the number of processes changes what is tried, and
    more trials add to those of a shorter search.

    Example:
        >>> axes = {"optim.lr": Range(0.01, 1.0, log=True)}
        >>> [round(point["optim.lr"], 2) for point in search_points(RunConfig(), axes, 5)]
        [0.1, 0.02, 0.3, 0.05, 0.88]
    """
    points = [{name: _nearest(axis, _value(config, name)) for name, axis in axes.items()}]
    for number in range(1, trials):
        shares = _spread(number, len(axes))
        points.append({name: _at(axis, share) for (name, axis), share in zip(axes.items(), shares, strict=True)})
    return [point for place, point in enumerate(points) if point not in points[:place]]


def _spread(number: int, dimensions: int) -> list[float]:
    """A point of a sequence that fills the unit cube evenly from its start (Roberts 2018); number 0 is the centre.

    In one dimension its steps are the golden ratio.
    """
    ratio = 2.0
    for _ in range(60):  # converges to the root of ratio^(dimensions + 1) = ratio + 1
        ratio = (1 + ratio) ** (1 / (dimensions + 1))
    return [(0.5 + number / ratio ** (place + 1)) % 1 for place in range(dimensions)]


def _value(config: RunConfig, setting: str) -> float:
    section, _, name = setting.partition(".")
    return float(getattr(getattr(config, section), name))


def _nearest(axis: Axis, value: float) -> float:
    """The value itself, unless the user asked for others."""
    if isinstance(axis, Range):
        return min(max(value, axis.low), axis.high)
    return min(axis, key=lambda listed: abs(listed - value))


def _at(axis: Axis, share: float) -> float:
    if not isinstance(axis, Range):
        return axis[min(int(share * len(axis)), len(axis) - 1)]
    if axis.log:
        return float(min(axis.low * (axis.high / axis.low) ** share, axis.high))
    return axis.low + share * (axis.high - axis.low)
