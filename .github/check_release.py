"""Check that a tag, the packages built from it and the documents agree, and print the notes of the release.

python .github/check_release.py v0.1.0 dist > notes.md
"""

import email
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def check(tag: str, dist: Path) -> str:
    """The changelog's section for the tag. Exits with a message if something does not agree."""
    version = tag.removeprefix("v")
    built = sorted(path.name for path in dist.iterdir())
    expected = [f"shortlist-{version}-py3-none-any.whl", f"shortlist-{version}.tar.gz"]
    if built != expected:
        sys.exit(f"{tag} must build {expected}, got {built}: set __version__ in src/shortlist/__init__.py")
    if links := relative_links(description(dist / expected[0])):
        sys.exit(f"the description must not have relative links, got {links}: see fancy-pypi-readme in pyproject.toml")

    section = re.search(
        rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)\n(.+?)(?=^## \[|^\[)",
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    if not section:
        sys.exit(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD' with text")
    date, notes = section.groups()
    if links := relative_links(notes):
        sys.exit(f"the section of CHANGELOG.md must not have relative links, got {links}: the release shows it alone")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for line in (f"version: {version}", f"date-released: {date}"):
        if line not in citation.splitlines():
            sys.exit(f"CITATION.cff must have the line {line!r}, as the changelog does")
    return notes.strip()


def description(wheel: Path) -> str:
    """What the package index shows."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return str(email.message_from_bytes(archive.read(metadata)).get_payload())


def relative_links(markdown: str) -> list[str]:
    """Links and pictures that work in the repository alone."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    links = [*re.findall(r"\]\(\s*<?([^)\s>]+)", text), *re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, flags=re.MULTILINE)]
    links += re.findall(r"""(?:href|src)=["']?([^"'\s>]+)""", text)
    return [link for link in links if not re.match(r"https?:|mailto:|#", link)]


if __name__ == "__main__":
    print(check(sys.argv[1], Path(sys.argv[2])))
