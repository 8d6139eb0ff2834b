"""Where data is kept, and how a file appears there: whole or not at all."""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shortlist.config import DataConfig


def data_root(config: DataConfig) -> Path:
    """The folder (or file) that the configuration names, else ``$SHORTLIST_DATA``, else a cache folder of the user's.

    Example:
        >>> data_root(DataConfig(root="/data/birds")).as_posix()
        '/data/birds'
    """
    return Path(config.root or os.environ.get("SHORTLIST_DATA", "") or user_cache()).expanduser()


def user_cache() -> Path:
    """Where this operating system wants files that can be made again."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "") or "~/.cache"
    return Path(base).expanduser() / "shortlist"


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name only when the block has ended well; two processes may write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
