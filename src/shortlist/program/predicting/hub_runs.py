"""Runs on the Hugging Face hub: which files they have there, and how one is opened by its address, ``hf://OWNER/NAME``."""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.runs.folder import ADDED, BEST, RunFolder

_ADDRESS = re.compile(r"hf:/{1,2}([^/@]+/[^/@]+)(?:@([^@]+))?")  # of "//", a Path keeps one
CONFIG, RESULT, CARD, CALIBRATION, SCORES = (
    "config.json",
    "final.json",
    "README.md",
    "calibration.json",
    "scores.safetensors",
)
AS_THEY_ARE = (BEST, "classes.json", "preprocess.json", "correction.json", CALIBRATION)
FILES = (CONFIG, RESULT, ADDED, CARD, *AS_THEY_ARE, SCORES)
"""What a predictor needs, and the card."""
PICTURES = ("examples.zip", "pictures/*")
"""Small copies of training and test images."""
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class HubAddress:
    """A repository of models, and perhaps a revision of it."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"hf://{self.repository}" + (f"@{self.revision}" if self.revision else "")


class DownloadedRun(RunFolder):
    """A run in the cache of the hub's library."""

    address = ""

    def damaged(self, name: str, reason: object) -> ShortlistError:
        return ShortlistError(
            f"{self.path / name}, from {self.address}, is damaged: {reason}; delete {self.path} and give the command "
            "again. If it is damaged there too, its owner has to push it again"
        )


def hub_address(run: str | Path) -> HubAddress | None:
    """The address that stands in place of a run folder; None if it is a path.

    Example:
        >>> hub_address("hf://me/birds@v2")
        HubAddress(repository='me/birds', revision='v2')
        >>> hub_address("runs/birds")
    """
    text = str(run)
    if not text.startswith("hf:/"):
        return None
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise ShortlistError(
            f"an address on the hub must be like hf://OWNER/NAME or hf://OWNER/NAME@REVISION, got {text}"
        )
    return HubAddress(found[1], found[2])


def open_run(run: str | Path) -> RunFolder:
    """The run of a folder, or of an address on the hub, whose files are then downloaded to the library's cache."""
    address = hub_address(run)
    return RunFolder.existing(run) if address is None else _downloaded(address)


def _downloaded(address: HubAddress) -> RunFolder:
    check_package()
    import huggingface_hub

    from shortlist.program.models.hub import why_unreachable

    reason = why_unreachable()
    with explained(address, reason):
        path = huggingface_hub.snapshot_download(
            address.repository,
            revision=address.revision,
            allow_patterns=[*FILES, *PICTURES],
            local_files_only=reason != "",
        )
    run = DownloadedRun(path)
    run.address = str(address)
    if not run.has(CONFIG):
        raise ShortlistError(f"{address} is not a run: it has no {CONFIG}; `shortlist push` writes one")
    if not run.has(BEST):
        raise ShortlistError(f"{address} is not a run of shortlist: it has no {BEST}; `shortlist push` writes one")
    return run


@contextmanager
def explained(address: HubAddress, unreachable: str) -> Iterator[None]:
    """Turn errors of the hub's library into ones that name the remedy."""
    from huggingface_hub import errors

    try:
        yield
    except ShortlistError:
        raise
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        raise ShortlistError(
            f"the hub has no repository {address.repository} that you may read: correct the name; if it is private, "
            f"{_LOG_IN}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ShortlistError(f"{address.repository} has no revision {address.revision}: correct it") from error
    except errors.LocalEntryNotFoundError as error:
        raise ShortlistError(
            f"{address} is not in the cache and cannot be downloaded: {unreachable or 'the connection failed'}"
        ) from error
    except errors.HFValidationError as error:
        raise ShortlistError(f"{address} is no address of the hub: {error}") from error
    except errors.LocalTokenNotFoundError as error:
        raise ShortlistError(f"the hub does not know you: {_LOG_IN}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        remedy = f": {_LOG_IN}" if status in (401, 403) else ""
        raise ShortlistError(f"the hub refuses {address} ({str(error).splitlines()[0]}){remedy}") from error
    except OSError as error:
        raise ShortlistError(f"{address} cannot be read or written: {error}") from error


def check_package() -> None:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ShortlistError("runs on the hub need the package huggingface_hub: pip install 'shortlist[hub]'")
