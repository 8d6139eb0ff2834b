"""Where data is kept."""

import os
import sys
from pathlib import Path

from shortlist.program.config import DataConfig


def data_root(config: DataConfig) -> Path:
    """The folder (or file) that the configuration names, else ``$SHORTLIST_DATA``, else a cache folder of the user's.

    Example:
        >>> data_root(DataConfig(root="/data/birds")).as_posix()
        '/data/birds'
    """
    return Path(config.root or os.environ.get("SHORTLIST_DATA", "") or user_cache()).expanduser()


def user_cache() -> Path:
    """Where this operating system wants files that can be made again."""
    if sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "") or "~/.cache"
    return Path(base).expanduser() / "shortlist"
