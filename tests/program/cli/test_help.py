"""Help: for users first, in words that people use, and the same options in the completion of shells."""

import contextlib
import shutil
import subprocess
from dataclasses import fields

import pytest

from shortlist.program import recipes
from shortlist.program.cli.main import COMMANDS, main
from shortlist.program.losses import LOSSES

FOR_EXPERIMENTS = ("--data.name", "--data.imbalance", "--data.label-noise", "--data.noise-groups")


def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr("sys.argv", ["shortlist", *words])
    with contextlib.suppress(SystemExit):
        main()
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        *((name, "--help") for name in COMMANDS),
        ("train", "folder", "-h"),
        ("tune", "smoke", "-h"),
        ("compare", "smoke", "-h"),
    ],
)
def test_every_help_has_examples_and_no_types_of_python(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = help_of(capsys, monkeypatch, *words)
    assert "usage: shortlist" in shown
    assert "Examples:\n  shortlist" in shown or 'Examples:\n  eval "$(shortlist' in shown
    assert not any(jargon in shown for jargon in ("None", "[[", "...]]", "(default: )"))


@pytest.mark.parametrize("recipe", recipes.FOR_YOUR_DATA)
def test_settings_of_the_papers_experiments_are_not_in_the_way(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = help_of(capsys, monkeypatch, "train", recipe, "--help")
    everything = help_of(capsys, monkeypatch, "train", recipe, "--help-all")
    assert not any(option in short for option in FOR_EXPERIMENTS)
    assert all(option in everything for option in FOR_EXPERIMENTS)
    assert "--data.root" in short


def test_recipes_for_ones_own_data_come_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = help_of(capsys, monkeypatch, "train")
    assert shown.index("  folder ") < shown.index("  embeddings ") < shown.index("smoke") < shown.index("cifar100_")


@pytest.mark.parametrize("loss", LOSSES)
def test_the_help_of_a_loss_shows_its_own_settings_and_no_others(
    loss: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = help_of(capsys, monkeypatch, "train", "folder", "--loss.name", loss, "--help")
    listed = {line.split()[0].rstrip(",") for line in shown.splitlines() if line.startswith("  --loss.")}
    assert listed == {f"--loss.{field.name.replace('_', '-')}" for field in fields(LOSSES[loss])}


def test_a_setting_of_another_loss_is_answered_with_those_of_this_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["shortlist", "train", "folder", "--loss.name", "ldam", "--loss.epsilon", "1"])
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr().err
    assert all(fact in said for fact in ("ldam", "loss.epsilon", "loss.max_margin", "loss.scale"))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["tra"], {"train"}),
        (["train", "fold"], {"folder", "folder_lite", "folder_frozen"}),
        (["train", "folder", "--data.roo"], {"--data.root"}),
        (["train", "folder", "--loss.name", "foc"], {"focal"}),
        (["compare", "photos", "--losses", "mix"], {"mixture"}),
        (["completion", "f"], {"fish"}),
    ],
)
def test_bash_completes_commands_recipes_options_and_losses(
    typed: list[str], expected: set[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = help_of(capsys, monkeypatch, "completion", "bash")
    words = " ".join(["shortlist", *typed])
    ask = f'{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed)}; _shortlist; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_every_command(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = help_of(capsys, monkeypatch, "completion", shell)
    assert all(name in script for name in COMMANDS)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
