"""Photos of which somebody said "none of these", in a local file that the owner asked for."""

import base64
import io
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import explained
from shortlist.program.serving.limits import RefusedError

LONGEST_SIDE = 1024
"""Of a recorded photo, in pixels."""
LARGEST = 2**30
"""Bytes of the file. What does not fit is refused."""
_QUALITY = 90


class Record:
    """A file with a JSON object on each line: the run, what was suggested, and the photos as JPEG files in base64.

    Neither the time, nor the chosen place or season, nor anything of a photo but its pixels is kept.

    Args:
        path: The file. New lines are added to it.
    """

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise ShortlistError(f"there is no folder {path.parent} for --record: make it first")
        if path.exists() and not path.is_file():
            raise ShortlistError(f"--record needs a regular file, and {path} is something else: choose another name")
        self._path, self._lock = path, threading.Lock()
        self._append(b"")  # fails now rather than at the first photo

    def add(self, run: str, suggested: Sequence[str], photos: Sequence[Image.Image]) -> None:
        """Add a line."""
        line = {"run": run, "suggested": [*suggested], "photos": [_jpeg(photo) for photo in photos]}
        self._append(json.dumps(line).encode() + b"\n")

    def _append(self, content: bytes) -> None:
        with self._lock, explained(self._path), os.fdopen(self._opened(), "ab") as file:
            if file.tell() + len(content) > LARGEST:
                raise RefusedError(507, "The record is full. Its owner may move the file away and start it anew.")
            file.write(content)

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)  # for its owner alone


def _jpeg(photo: Image.Image) -> str:
    pixels = Image.new(photo.mode, photo.size)
    pixels.paste(photo)  # a new image: of the old one nothing but pixels
    pixels.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    pixels.save(content, "JPEG", quality=_QUALITY)
    return base64.b64encode(content.getvalue()).decode()
