"""What process trained a run: versions, device, command and commit."""

import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from shortlist.program.runs.checks import is_text, is_whole
from shortlist.program.text import hide_passwords_of_word

_PACKAGES = ("shortlist", "torch", "torchvision", "timm", "torchmetrics", "lightning-fabric", "triton")


def environment(device_name: str, world_size: int) -> dict[str, Any]:
    """Everything besides the configuration that may influence the result."""
    versions = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions,
        "device": device_name,
        "world_size": world_size,
        "platform": platform.platform(),
        "command": [hide_passwords_of_word(word) for word in sys.argv],
        **_commit(),
    }


def _commit() -> dict[str, Any]:
    """The commit of the running source, if it is a checkout."""
    package = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", str(package)))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


PROCESS: dict[str, Callable[[Any], bool]] = {
    "commit": lambda value: value is None or is_text(value),
    "started": is_text,
    "device": is_text,
    "versions": lambda value: isinstance(value, dict) and all(map(is_text, value.values())),
    "world_size": is_whole,
    "start_sha256": is_text,
}
"""Checks of the entries of ``environment``."""


def are_processes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(process, dict) and all(check(process[name]) for name, check in PROCESS.items() if name in process)
        for process in value
    )
