"""Where the program keeps files that it can make or fetch again."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """``$SHORTLIST_DATA`` if it is set, else the user's cache folder."""
    return Path(os.environ.get("SHORTLIST_DATA", "") or user_cache()).expanduser()


def user_cache() -> Path:
    """Where this operating system keeps files that can be made again."""
    if sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "") or "~/.cache"
    return Path(base).expanduser() / "shortlist"
