"""From the words of a command line to dataclasses, and the help of each command.

tyro parses. Its help is edited here: it names types as Python does (``{None}|INT``), has no room for examples, and
shows all settings of a run alike, whoever they are for.
"""

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import tyro

from shortlist.errors import ShortlistError
from shortlist.program import recipes
from shortlist.program.cli.output import say
from shortlist.program.config import RunConfig
from shortlist.program.losses import LOSSES
from shortlist.program.text import hide_passwords_of_word

_HELP = ("-h", "--help", "--help-all")
# Settings that make the data of the paper's experiments; somebody with data of their own need not see them.
_FOR_EXPERIMENTS = frozenset(
    {"data.name", "data.imbalance", "data.imbalance-kind", "data.label-noise", "data.noise-groups"}
)


@dataclass(frozen=True, kw_only=True)
class RecipeArguments(RunConfig):
    """What follows ``shortlist train`` and similar commands: the settings of a run, and the command's own options."""

    set_by_command: ClassVar[frozenset[str]] = frozenset()
    """Settings that the command sets itself, so that its help does not list them."""
    recipe: tyro.conf.Suppress[str] = "custom"

    def __post_init__(self) -> None:
        """Check nothing: tyro would report an error under the name of this class. ``parse_recipe`` checks."""


def asks_for_help(arguments: Sequence[str]) -> bool:
    return any(word in _HELP for word in arguments)


def parse(kind: type[Any], arguments: list[str], command: str, examples: Sequence[str] = (), **options: Any) -> Any:
    """The arguments of a command.

    Args:
        kind: Dataclass of the arguments.
        arguments: Words of the command line after the command.
        command: Name of the command, for the help.
        examples: Command lines to show at the end of the help.
        **options: For ``tyro.cli``.
    """
    if asks_for_help(arguments):
        print(_help(kind, command, examples, hidden=(), **options))
        sys.exit(0)
    hidden = [hide_passwords_of_word(word) for word in arguments]
    if hidden != arguments:  # an error in these words is found here, where tyro can print no password
        tyro.cli(kind, args=hidden, prog=f"shortlist {command}", **options)
    return tyro.cli(kind, args=arguments, prog=f"shortlist {command}", **options)


def parse_recipe(
    kind: type[RecipeArguments], arguments: list[str], command: str, examples: Sequence[str] = ()
) -> tuple[Any, RunConfig]:
    """Parse the name of a recipe and the settings to change: all arguments, and the configuration."""
    name, *words = arguments
    recipe = recipes.build(name)
    try:
        loss = _value_of("loss.name", words) or recipe.loss.name
        start = recipes.with_loss(recipe, loss)
        if _value_of("model.weights", words):  # they replace those that the recipe would download
            start = dataclasses.replace(start, model=dataclasses.replace(start.model, pretrained=False))
        _refuse_settings_of_other_losses(words, start)
        words = _milestones_as_shares(words, start)
    except ShortlistError as error:
        _refuse(command, error)
    kind = _with_loss(kind, start)
    settings = [field.name for field in dataclasses.fields(RunConfig)]
    options: dict[str, Any] = {"default": kind(**{name: getattr(start, name) for name in settings})}
    program = f"{command} {name}"
    if asks_for_help(words):
        is_own_data = name in recipes.FOR_YOUR_DATA and "--help-all" not in words
        hidden = kind.set_by_command | (_FOR_EXPERIMENTS if is_own_data else frozenset())
        print(_help(kind, program, examples, hidden=hidden, **options))
        sys.exit(0)
    parsed = parse(kind, words, program, **options)
    try:
        return parsed, RunConfig(**{name: getattr(parsed, name) for name in settings})
    except ShortlistError as error:
        _refuse(command, error)


def option_names(arguments: Sequence[str]) -> list[str]:
    """Names of the options among the words, spelt as the fields: tyro does not say which values were typed."""
    return [word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")]


def flags_of(kind: type[Any], prefix: str = "") -> list[str]:
    """All options of a dataclass, for the completion of shells."""
    flags: list[str] = []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type) and isinstance(field.type, type):
            flags += flags_of(field.type, f"{prefix}{field.name}.")
        elif field.name != "recipe":  # the first word after the command
            flags.append(f"--{prefix}{field.name}".replace("_", "-"))
    return flags


def _refuse(command: str, error: ShortlistError) -> NoReturn:
    say(f"shortlist {command}: {error}")
    sys.exit(2)


def _refuse_settings_of_other_losses(words: Sequence[str], config: RunConfig) -> None:
    """Raise an error that lists the settings of the loss: tyro would only say that the option is unknown."""
    own = [field.name for field in dataclasses.fields(config.loss)]
    others = {field.name for loss in LOSSES.values() for field in dataclasses.fields(loss)}.difference(own)
    for name in option_names(words):
        section, _, setting = name.partition(".")
        if section == "loss" and setting in others:
            listed = ", ".join(f"loss.{known}" for known in own)
            raise ShortlistError(f"{config.loss.name} has no setting {name}, only {listed}")


def _with_loss(kind: type[RecipeArguments], config: RunConfig) -> type[RecipeArguments]:
    """The same arguments, with the settings of this loss alone."""
    loss = ("loss", type(config.loss), dataclasses.field(default=config.loss))
    made = dataclasses.make_dataclass(kind.__name__, [loss], bases=(kind,), frozen=True, kw_only=True)
    made.__doc__ = None
    return made


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """The value that was last typed for an option, as ``--loss.name x`` or ``--loss.name=x``."""
    found = None
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == f"--{option}":
            found = value if equals else next(iter(words[place + 1 : place + 2]), None)
    return found


def _milestones_as_shares(words: Sequence[str], recipe: RunConfig) -> list[str]:
    """Read milestones of 1 and more as epochs of the run: shares are below 1."""
    shares, inside, length = list[str](), False, recipe.train.epochs
    with contextlib.suppress(ValueError):  # tyro will say what is wrong with it
        length = int(_value_of("train.epochs", words) or length)
    for word in words:
        if word.startswith("--"):
            inside = word == "--optim.milestones"
        elif inside and re.fullmatch(r"\d+", word) and word != "0":
            if int(word) >= length:
                raise ShortlistError(f"optim.milestones must lie within the run of {length} epochs, got {word}")
            word = repr(int(word) / length)
        shares.append(word)
    return shares


def _help(kind: type[Any], command: str, examples: Sequence[str], hidden: Collection[str], **options: Any) -> str:
    printed = io.StringIO()  # not a terminal: tyro draws no boxes and uses no colours
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        tyro.cli(kind, args=["--help"], prog=f"shortlist {command}", **options)
    lines, is_hidden = [], False
    for line in _with_plain_types(printed.getvalue()).rstrip().splitlines():
        if option := re.match(r"  --?([\w.-]+)", line):
            is_hidden = option[1] in hidden
        elif not line.startswith("  "):
            is_hidden = False
        if not is_hidden:
            lines.append(line.rstrip())
    if issubclass(kind, RunConfig) and "loss.name" not in hidden:
        lines += [
            "",
            f"Losses: {', '.join(LOSSES)}.",
            f"shortlist {command} --loss.name LOSS --help shows its settings.",
        ]
    if not _FOR_EXPERIMENTS.isdisjoint(hidden):
        lines.append(f"shortlist {command} --help-all also shows the settings for the paper's experiments.")
    if examples:
        lines += ["", "Examples:", *(f"  {example}" for example in examples)]
    return "\n".join(lines)


def _with_plain_types(text: str) -> str:
    """The help of tyro with types as people write them.

    Example:
        >>> _with_plain_types("--ks [INT [INT ...]]  or {None}|INT (default: None)  or INT|{INT ...}")
        '--ks INT ...  or INT  or INT ...'
        >>> _with_plain_types("--of [{a,b} [{a,b} ...]]")
        '--of {a,b} ...'
    """
    text = re.sub(r"(\w+)\|\{(?:\1 \.\.\.|\[\1 \[\1 \.\.\.\]\])\}", r"\1 ...", text.replace("{None}|", ""))
    text = re.sub(r"\[+(\w+|\{[\w,]+\}) \[\S+\s+\.\.\.\]+", r"\1 ...", text)  # \s: it may be the end of a line
    return re.sub(r"\s\(default:\s*(None|'')?\)", "", text)
