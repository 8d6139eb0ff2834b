"""Download one file: its checksum must match, and it appears whole or not at all."""

import hashlib
import http.client
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import written_whole

_BLOCK = 1 << 20
_TIMEOUT_SECONDS = 30

Progress = Callable[[int, int | None], None]
"""Called with the bytes received so far, and the total if the server states it."""


@dataclass(frozen=True)
class Download:
    """A file that a data set can be read from, as its source offers it."""

    url: str
    file: str
    """Its name in the data folder."""
    md5: str


def download(url: str, path: Path, md5: str, progress: Progress = lambda done, total: None) -> None:
    """Download ``url`` to ``path``, unless a file with this MD5 is already there."""
    if path.is_file() and _md5_of(path) == md5:
        return
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response, written_whole(path) as out:
            total = int(response.headers["Content-Length"]) if response.headers["Content-Length"] else None
            done = 0
            while block := response.read(_BLOCK):
                out.write(block)
                digest.update(block)
                done += len(block)
                progress(done, total)
            if digest.hexdigest() != md5:
                raise ShortlistError(
                    f"{url} must have the MD5 {md5}, got {digest.hexdigest()}: nothing was saved, try again"
                )
    except (OSError, http.client.HTTPException) as error:
        raise ShortlistError(f"{url} could not be fetched to {path}: {error}") from error


def _md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
