"""The command that compares losses on somebody's data."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import tyro

from shortlist.errors import ShortlistError
from shortlist.program import recipes
from shortlist.program.cli.output import print_table, say, show
from shortlist.program.cli.parsing import RecipeArguments, asks_for_help, option_names, parse_recipe
from shortlist.program.compare.candidates import CANDIDATES, find_candidates
from shortlist.program.losses import LOSSES
from shortlist.program.text import did_you_mean


@dataclass(frozen=True, kw_only=True)
class CompareArguments(RecipeArguments):
    set_by_command: ClassVar[frozenset[str]] = frozenset(
        {"seed", "model.head"}
        | {f"loss.{name}".replace("_", "-") for loss in LOSSES.values() for name in loss.__dataclass_fields__}
    ) - {"loss.k"}

    seed: tyro.conf.Suppress[int] = 0
    losses: tuple[str, ...] = tuple(CANDIDATES)
    """What to compare: names that shortlist compare --help lists, or any loss."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Train each loss once for each of these seeds."""
    trials: int = 8
    """Settings to try for each loss, on the validation images; 0 takes the defaults."""
    search_epochs: int | None = None
    """Length of a trial (default: that of the recipe)."""
    search: tuple[str, ...] = ()
    """More settings to search, or other ranges, such as optim.weight_decay=1e-5,1e-3."""
    storage: str = ""
    """Where the search is kept: a database such as sqlite:///study.db, or a file. Several processes may share it."""
    lost_after: float = 24.0
    """Hours without a finished epoch after which a trial of another machine counts as killed and is run again."""
    out: Path | None = None
    """Folder for compare.csv, compare.json and report.html (default: runs/compare/KEY)."""


_EXAMPLES = (
    "shortlist compare photos                                   photos/CLASS/IMAGE, all losses, three seeds",
    "shortlist compare vectors.npz --seeds 0 1 2 3 4 --trials 16",
    "shortlist compare photos --losses cross_entropy ldam focal --trials 0 --train.epochs 10",
    "shortlist compare cifar100_lt_cross_entropy_k5 --search-epochs 50",
)


def compare(arguments: list[str]) -> None:
    """Find the best loss for your data: shortlist compare DATA [--SETTING VALUE ...]"""
    if not arguments or asks_for_help(arguments[:1]):
        _list_candidates()
        return
    options = option_names(arguments)
    _refuse_settings_of_candidates(options)
    parsed, base = parse_recipe(CompareArguments, _with_recipe(arguments), "compare", _EXAMPLES)
    candidates = find_candidates(parsed.losses)
    if len(candidates) < 2:
        raise ShortlistError("--losses must name at least two losses to compare")

    from shortlist.program.compare import results
    from shortlist.program.compare.running import compare, default_out
    from shortlist.program.compare.search import Budget

    budget = Budget(
        trials=parsed.trials,
        epochs=base.train.epochs if parsed.search_epochs is None else parsed.search_epochs,
        search=parsed.search,
        fixed=options,
        storage=parsed.storage,
        lost_after=parsed.lost_after,
    )
    out = parsed.out or default_out(base, candidates, budget)
    standings = compare(base, candidates, budget, seeds=parsed.seeds, out=out, say=say)
    written = results.write_results(standings, out)
    print_table(results.table(standings))
    print()
    for text in (*results.notes(standings), *results.verdict(standings)):
        show(text)
    command = results.winner_command(standings)
    if command is None or standings.leader is None:
        raise ShortlistError("no loss has finished: see above")
    say(f"wrote {', '.join(map(str, written))}")
    say(f"the best one is trained already: {standings.leader.outcomes[0].folder}")
    print()
    show(command)


def _with_recipe(arguments: list[str]) -> list[str]:
    """The words with a recipe in the first place: a folder or a file is the data of one."""
    data, *words = arguments
    if data in recipes.RECIPES:
        return arguments
    path = Path(data)
    if path.is_dir():
        return ["folder", "--data.root", data, *words]
    if path.is_file():
        return ["embeddings", "--data.root", data, *words]
    hint = did_you_mean(data, recipes.RECIPES) or ": name a folder of images, a file of embeddings, or a recipe"
    raise ShortlistError(f"there is no folder, file or recipe {data!r}{hint}")


def _refuse_settings_of_candidates(options: list[str]) -> None:
    for name in options:
        if name.replace("_", "-") in CompareArguments.set_by_command:
            remedy = "--seeds names the seeds" if name == "seed" else "--losses names what is compared"
            raise ShortlistError(f"compare sets {name} itself: {remedy}, and --loss.k the number of suggestions")
        if name in ("search", "losses", "seeds") and options.count(name) > 1:
            raise ShortlistError(f"--{name} must be given once, followed by all its values")


def _list_candidates() -> None:
    print("usage: shortlist compare DATA [--SETTING VALUE ...]\n")
    print("Find the loss that is best for your data: settings are searched for each, with equal budgets on the")
    print("validation images; then each is trained with several seeds, and the differences are shown with their")
    print("95 % intervals. DATA is a folder of images, a file of embeddings, or a recipe. After a stop the same")
    print("command goes on, and several processes may run it at the same time.\n\nLosses that are compared:")
    width = max(map(len, CANDIDATES))
    for name, candidate in CANDIDATES.items():
        print(f"  {name:{width}}  {candidate.what}")
    print("\n--losses takes these and any other loss (shortlist train RECIPE --help lists them).")
    print("shortlist compare DATA --help lists all options and settings.\n\nExamples:")
    for example in _EXAMPLES:
        print(f"  {example}")
