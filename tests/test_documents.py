"""The documents tell the truth: their code runs, their commands parse, their links and versions are right."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import tyro

import shortlist as sl
from shortlist.program.cli.main import COMMANDS
from shortlist.program.predicting.export import export_run
from tests.support.pictures import put_image
from tests.support.run_folders import untrained_run

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT)): path for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])}
PLACEHOLDERS = {"DATA": "photos", "RECIPE": "smoke", "RUN": "runs/mine", "NAME": "cifar100", "FOLDER": "data"}
every_page = pytest.mark.parametrize("page", PAGES)
# The pages of examples quote scripts that run as a whole: tests/examples.
every_page_that_runs = pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/examples")])


def fenced_blocks(text: str, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language, each with the number of lines above it."""
    return [
        (text.count("\n", 0, match.start(1)), match.group(1))
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    ]


def commands_of(text: str) -> list[str]:
    """The command lines of our program, from blocks and from the running text."""
    lines = [line for _, block in fenced_blocks(text, "") for line in block.splitlines()]
    inline = re.findall(r"`(shortlist [^`…]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    found = (re.search(r"(?:^|-m )shortlist (.+)", line) for line in [*lines, *inline])
    return [match.group(1) for match in found if match]


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Parsed(Exception):  # noqa: N818 (it is good news)
    """The command line was understood."""


@every_page_that_runs
def test_every_python_block_of_the_documents_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = fenced_blocks(PAGES[page].read_text(), "python")
    assert blocks or page != "README.md"
    monkeypatch.chdir(tmp_path)
    run = untrained_run(tmp_path / "runs/birds", [f"bird {number}" for number in range(6)])
    if any("model.onnx" in code for _, code in blocks):
        export_run(run, formats=["onnx"])
    for name in ("new_photo", "a", "b"):
        put_image(tmp_path / f"{name}.jpg")
    for lines_above, code in blocks:
        # Blank lines in front make a traceback point into the page.
        exec(compile("\n" * lines_above + code, PAGES[page], "exec"), {"__name__": "__main__"})


@every_page
def test_every_command_of_the_documents_is_understood(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = tyro.cli
    (tmp_path / "photos").mkdir()
    (tmp_path / "vectors.npz").touch()
    monkeypatch.chdir(tmp_path)

    def parse_and_stop(*given: object, **options: object) -> None:
        parse(*given, **options)  # type: ignore[call-overload]
        raise Parsed

    monkeypatch.setattr(tyro, "cli", parse_and_stop)
    for line in commands_of(PAGES[page].read_text()):
        name, *words = shlex.split(line, comments=True)
        words = [PLACEHOLDERS.get(word, word) for word in words if word != "..."]
        assert name in COMMANDS, line
        if not words or words[-1] == "--help":
            continue  # a list or a help page: nothing to parse
        with pytest.raises(Parsed):
            COMMANDS[name](words)


def test_every_option_that_the_documents_name_exists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    for name, command in COMMANDS.items():
        with pytest.raises(SystemExit):
            command(["smoke", "--help-all"] if name in ("train", "tune", "compare") else ["--help"])
    existing = set(re.findall(r"--[\w.-]+", capsys.readouterr().out))
    others = {"CHANGELOG.md", "CONTRIBUTING.md", "docs/promises.md"}  # name options of before, or of other programs
    for page in PAGES.keys() - others:
        ours = re.sub(r"^(torchrun|pip|tensorboard) .*$", "", PAGES[page].read_text(), flags=re.MULTILINE)
        named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", ours))
        assert named <= existing, page


@every_page
def test_every_link_of_the_documents_leads_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", PAGES[page].read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = PAGES[page].parent / name if name else PAGES[page]
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target.read_text()), link


def test_the_changelog_has_the_version() -> None:
    assert f"## [{sl.__version__}]" in PAGES["CHANGELOG.md"].read_text()


def test_pre_commit_runs_the_checkers_of_the_dev_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {name for name in project["optional-dependencies"]["dev"] if "==" in name}
    hooks = re.findall(r"additional_dependencies: \[(.+)\]", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks
    assert set(hooks) <= pinned
