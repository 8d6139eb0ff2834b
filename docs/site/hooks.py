"""What MkDocs makes while it builds the site: pages from files outside docs/, links to such files, and two checks.

A warning here ends the build, like every other one: ``make docs`` is strict.
"""

import contextlib
import io
import logging
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocstrings import Inventory

from shortlist.program.cli.main import COMMANDS, print_help
from shortlist.program.losses import LOSSES

ROOT = Path(__file__).parents[2]
PAGE_OF = {"CHANGELOG.md": "docs/changelog.md", "CONTRIBUTING.md": "docs/contributing.md"}
"""Files of the repository that are pages of the site, as if they were in docs/."""
HELP_MARK = "<!-- The help of every command. -->"
HELP_COLUMNS = 100
"""As wide as a page of the site."""
WITH_RECIPES = ("train", "tune", "compare")
"""Commands that take a recipe, and have more help for one."""
TRAINED_WITH = ("train", "folder", "--loss.name")
LOADING_TAG = re.compile(
    r"""<(?:script|img|iframe|source|link(?=[^>]*\brel="?(?:stylesheet|preconnect|preload|icon)))\b[^>]*"""
    r"""\b(?:src|srcset|href)="?(?:https?:)?//[^>]*>"""
    r"""|<a[^>]*data-md-component="?source"?[^>]*>"""  # the theme's script asks GitHub for numbers of such a link
)

log = logging.getLogger("mkdocs.hooks.shortlist")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose files are outside docs/."""
    for name, shown in PAGE_OF.items():
        page = File.generated(config, shown.removeprefix("docs/"), content=(ROOT / name).read_text())
        page.edit_uri = f"../{name}"
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert the help of the commands, and lead links to files outside docs/ to their pages or to the repository."""
    shown = f"docs/{page.file.src_uri}"
    written = next((name for name, made in PAGE_OF.items() if made == shown), shown)

    def on_the_site(match: re.Match[str]) -> str:
        path, mark, anchor = match["link"].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(written), path))
        target = PAGE_OF.get(target, target)
        if target.startswith("docs/"):
            return f"]({posixpath.relpath(target, posixpath.dirname(shown))}{mark}{anchor})"
        if not (ROOT / target).exists():
            log.warning("%s links to %s, which does not exist", written, target)
        return f"]({config.repo_url}/blob/main/{target}{mark}{anchor})"

    markdown = re.sub(r"\]\((?P<link>(?!\w+:|#)[^)\s]+)\)", on_the_site, markdown)
    return markdown.replace(HELP_MARK, command_reference()) if HELP_MARK in markdown else markdown


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn about everything that a reader's browser would load from elsewhere. Links may lead there."""
    for tag in LOADING_TAG.findall(output):
        log.warning("%s loads something from elsewhere: %s", page.file.src_uri, tag)
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Warn about every public name that the reference lacks. What has no docstring is not shown, so it is lacking."""
    inventory = Inventory.parse_sphinx(io.BytesIO((Path(config.site_dir) / "objects.inv").read_bytes()))
    options = config.plugins["mkdocstrings"].config.handlers["python"]["options"]
    left_out = re.compile("|".join(pattern.removeprefix("!") for pattern in options["filters"]))
    for path in _public_paths(left_out):
        if path not in inventory:
            log.warning("%s is public, and not in docs/reference or without a docstring", path)


def command_reference() -> str:
    """The help of every command, and the settings of a recipe."""
    parts = [_fenced(_printed(print_help))]
    for name in COMMANDS:
        parts += [f"## {name}", _fenced(_help(name, "--help"))]
        if name in WITH_RECIPES:
            parts += [f"### {name}: options", _fenced(_sections(_help(name, "folder", "--help-all"))["options"])]
    parts += ["## Settings of a recipe", f"For {', '.join(WITH_RECIPES)}; with the defaults of the recipe `folder`."]
    for title, text in _sections(_help("train", "folder", "--help-all")).items():
        if title != "options":
            parts += [f"### {title.removesuffix(' options')}", _fenced(text)]
    parts += ["## Settings of each loss", "Those that not every loss has, with the loss's own defaults."]
    settings = {loss: _entries(_sections(_help(*TRAINED_WITH, loss, "--help-all"))["loss options"]) for loss in LOSSES}
    shared = set.intersection(*map(set, settings.values()))
    for loss, entries in settings.items():
        own = [text for name, text in entries.items() if name not in shared]
        parts += [f"### {loss}", _fenced("\n".join(own)) if own else "None."]
    return "\n\n".join(parts)


def _help(name: str, *arguments: str) -> str:
    return _printed(lambda: COMMANDS[name](list(arguments)))


def _printed(show: Callable[[], None]) -> str:
    """What a function prints for a narrow terminal without colours. Help ends with an exit."""
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS=str(HELP_COLUMNS), NO_COLOR="1")
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            show()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return printed.getvalue()


def _sections(text: str) -> dict[str, str]:
    """The titled lists of options of a help page, with what stands below each title."""
    found = re.finditer(r"^ (?P<title>[\w ]*options)\n -+\n(?P<text>.*?)(?=\n\n \w|\n\n\w|\Z)", text, re.M | re.S)
    return {match["title"]: match["text"] for match in found}


def _entries(text: str) -> dict[str, str]:
    """The options of a list, each with its explanation, by name. A description in front of them is left out."""
    return {match["name"]: match[0] for match in re.finditer(r"^  (?P<name>--\w\S*).*(?:\n   .*)*", text, re.M)}


def _fenced(text: str) -> str:
    return f"```text\n{text.strip(chr(10))}\n```"


def _public_paths(left_out: re.Pattern[str]) -> Iterator[str]:
    """The names of ``shortlist`` and ``shortlist.functional``, and the methods of classes.

    The docstring of a Module says how it is called, so its ``forward`` needs none.
    """
    package = griffe.load("shortlist", search_paths=[ROOT / "src"], resolve_aliases=True)
    for module in (package, package["functional"]):
        for name in map(str, module.exports or ()):
            if name == "functional":
                continue
            yield f"{module.path}.{name}"
            methods = (member.name for member in module[name].members.values() if member.is_function)
            yield from (
                f"{module.path}.{name}.{method}"
                for method in methods
                if method != "forward" and not left_out.search(method)
            )
