"""The hub from which timm downloads weights: whether it can be reached is found out in seconds."""

import threading

from shortlist.errors import ShortlistError

_PATIENCE_SECONDS = 5.0


def refuse_unreachable_hub(network: str) -> None:
    """Raise an error if the weights of a timm network would have to be downloaded, and the hub does not answer.

    Without this, the hub's own library tries for about a minute. Weights in its cache need no hub.
    """
    import timm

    known = timm.get_pretrained_cfg(network)
    place = getattr(known, "hf_hub_id", None)
    if place and not _is_cached(place) and (reason := why_unreachable()):
        raise ShortlistError(reason)


def _is_cached(place: str) -> bool:
    """True if anything of this place is in the cache: which files are needed only timm knows."""
    import huggingface_hub

    repository, _, revision = place.partition("@")
    try:
        huggingface_hub.snapshot_download(repository, revision=revision or None, local_files_only=True)
    except Exception:  # whatever the reason, it has to be downloaded
        return False
    return True


def why_unreachable() -> str:
    """Why the hub does not answer; empty if it does, with whatever status."""
    import huggingface_hub.constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined] # public by its documentation

    hub = huggingface_hub.constants.ENDPOINT
    failures: list[str] = []

    def ask() -> None:
        try:  # with the library's own session, which knows the user's proxies and certificates
            get_session().head(hub, timeout=_PATIENCE_SECONDS)
        except Exception as error:  # of a library that has changed its own
            failures.append(f"{hub} cannot be reached ({error})")

    asking = threading.Thread(target=ask, daemon=True)  # the look-up of a host name has no timeout of its own
    asking.start()
    asking.join(_PATIENCE_SECONDS)
    if asking.is_alive():
        return f"{hub} has not answered within {_PATIENCE_SECONDS:.0f} seconds"
    return failures[0] if failures else ""
