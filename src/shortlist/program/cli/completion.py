"""Completion of commands, recipes and options in a shell."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import tyro

from shortlist.program import recipes
from shortlist.program.bench import Suite
from shortlist.program.cli import add_class, commands, compare, export, push, research, serve
from shortlist.program.cli.parsing import flags_of, parse
from shortlist.program.compare.candidates import CANDIDATES
from shortlist.program.config import DataName
from shortlist.program.losses import LOSSES

_ARGUMENTS: Mapping[str, type[Any]] = {
    "train": commands.TrainArguments,
    "tune": commands.TuneArguments,
    "compare": compare.CompareArguments,
    "evaluate": commands.EvaluateArguments,
    "calibrate": commands.CalibrateArguments,
    "predict": commands.PredictArguments,
    "serve": serve.ServeArguments,
    "add-class": add_class.AddClassArguments,
    "export": export.ExportArguments,
    "push": push.PushArguments,
    "report": commands.ReportArguments,
    "reproduce": research.ReproduceArguments,
    "bench": research.BenchArguments,
    "datasets": commands.DatasetsArguments,
    "demo": commands.DemoArguments,
}


@dataclass(frozen=True)
class CompletionArguments:
    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """Which shell the script is for."""


def completion(arguments: list[str]) -> None:
    """Print a completion script: shortlist completion bash|zsh|fish"""
    examples = (
        'eval "$(shortlist completion bash)"                                      in ~/.bashrc',
        'eval "$(shortlist completion zsh)"                                       in ~/.zshrc',
        "shortlist completion fish > ~/.config/fish/completions/shortlist.fish",
    )
    parsed = parse(CompletionArguments, arguments, "completion", examples)
    print(_fish() if parsed.shell == "fish" else _bash(parsed.shell))


def _words(command: str) -> list[str]:
    """What can follow a command, beside files."""
    kind = _ARGUMENTS[command]
    positional: Sequence[str] = {
        "train": [*recipes.RECIPES],
        "tune": [*recipes.RECIPES],
        "compare": [*recipes.RECIPES],
        "bench": get_args(Suite),
        "datasets": get_args(DataName),
    }.get(command, [])
    flags = flags_of(kind)
    if command in ("train", "tune"):  # of every loss
        flags += [f"--loss.{field.name}" for loss in LOSSES.values() for field in dataclasses.fields(loss)]
    own = {f"--{name}" for name in getattr(kind, "set_by_command", ())}
    return [*positional, *sorted({flag.replace("_", "-") for flag in flags} - own)]


def _bash(shell: str) -> str:
    cases = "\n".join(f'    {command}) words="{" ".join(_words(command))}" ;;' for command in _ARGUMENTS)
    prelude = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return f"""{prelude}_shortlist() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join([*_ARGUMENTS, "completion", "help"])} --version" -- "$current"))
    return
  fi
  if [ "${{COMP_WORDS[COMP_CWORD-1]}}" = "--loss.name" ]; then
    COMPREPLY=($(compgen -W "{" ".join(LOSSES)}" -- "$current"))
    return
  fi
  if [ "${{COMP_WORDS[COMP_CWORD-1]}}" = "--losses" ]; then
    COMPREPLY=($(compgen -W "{" ".join({**CANDIDATES, **LOSSES})}" -- "$current"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
    completion) words="bash zsh fish" ;;
    help) words="{" ".join(_ARGUMENTS)}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current") $(compgen -f -- "$current"))
}}
complete -o filenames -F _shortlist shortlist"""


def _fish() -> str:
    lines = [f"complete -c shortlist -n __fish_use_subcommand -a '{' '.join([*_ARGUMENTS, 'completion', 'help'])}'"]
    for command in _ARGUMENTS:
        lines.append(
            f"complete -c shortlist -n '__fish_seen_subcommand_from {command}' -a '{' '.join(_words(command))}'"
        )
    lines.append("complete -c shortlist -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'")
    return "\n".join(lines)
