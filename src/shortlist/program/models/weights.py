"""Weights of a backbone from a file: read without running any code in it, and matched name by name."""

import io
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.program.text import counted, some_of

_NESTED = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model")
"""Where training programs keep the weights in a checkpoint; averaged weights first, as they are the better ones."""
_DEEPEST = 3
_PREFIXES = ("module.", "model.", "backbone.", "_orig_mod.")
"""What wrappers of a network put before its names: parallel training, Lightning, shortlist, torch.compile."""


def read_weights(content: bytes, source: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file or a torch checkpoint, by name.

    Args:
        content: The file's.
        source: What to call it in an error.
    """
    if content[8:9] == b"{":  # a safetensors file: after its length, a header in JSON
        try:
            return safetensors.torch.load(content)
        except safetensors.SafetensorError as error:
            raise ShortlistError(f"{source} is damaged: {error}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks about the file are for its own developers
            loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's own message advises to run the code
        raise ShortlistError(
            f"{source} holds no weights that can be read without running code in the file, which shortlist never does: "
            "save the weights alone, model.state_dict(), with the program that made it"
        ) from None
    except Exception as error:  # a damaged file can fail in every way there is
        raise ShortlistError(f"{source} is not a file of weights, or it is damaged: {error}") from None
    return _state_dict(loaded, source)


def _state_dict(loaded: Any, source: str) -> dict[str, Tensor]:
    for _ in range(_DEEPEST):  # a stranger's file may contain itself
        if isinstance(loaded, Mapping):
            loaded = next((loaded[name] for name in _NESTED if isinstance(loaded.get(name), Mapping)), loaded)
    entries = loaded if isinstance(loaded, Mapping) else {}
    tensors = {name: value for name, value in entries.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if not tensors:
        found = some_of([str(name) for name in entries]) or type(loaded).__name__
        raise ShortlistError(f"{source} holds no weights by name, neither directly nor under {_NESTED}; got {found}")
    return tensors


def load_backbone(backbone: nn.Module, tensors: Mapping[str, Tensor], source: str, network: str) -> str:
    """Load the tensors into the backbone; the sentence that tells the user what was loaded and what was left out.

    A prefix of the file's names is dropped if more names match without it. The last layer of the file is left out: it
    belongs to other classes. Every tensor of the backbone must be in the file, in its shape. Only whole numbers, such
    as a count of batches, may be missing, because they come from no training that matters.

    Args:
        backbone: A network without its last layer.
        tensors: As ``read_weights`` gives them.
        source: What to call the file.
        network: What to call the network.
    """
    wanted: dict[str, Tensor] = backbone.state_dict()
    prefix = _prefix(tensors, wanted)
    found = {name: tensors[prefix + name] for name in wanted if prefix + name in tensors}
    last_layers = _last_layers(backbone)
    others = sorted(name for name in tensors if name.removeprefix(prefix) not in found)
    left_out = [name for name in others if name.removeprefix(prefix).startswith(last_layers)]
    unused = [name for name in others if name not in left_out]
    if missing := [name for name, tensor in wanted.items() if name not in found and tensor.is_floating_point()]:
        instead = f", and has others that {network} does not know: {some_of(unused, 3)}" if unused else ""
        raise ShortlistError(
            f"{source} does not fit {network}: it lacks {len(missing)} of {len(wanted)} tensors, "
            f"{some_of(missing, 3)}{instead}; choose its network with --model.name"
        )
    shapes = [
        f"{name} {tuple(tensor.shape)}, not {tuple(wanted[name].shape)}"
        for name, tensor in found.items()
        if tensor.shape != wanted[name].shape
    ]
    if shapes:
        raise ShortlistError(
            f"{source} does not fit {network}: {counted(len(shapes), 'tensor')} of another shape, "
            f"{some_of(shapes, 3)}; choose its network with --model.name and its image size with --data.image-size"
        )
    try:
        backbone.load_state_dict(wanted | found)
    except (RuntimeError, NotImplementedError) as error:  # such as sparse or quantised tensors
        raise ShortlistError(f"{source} cannot be loaded into {network}: {error}") from None
    told = f"starting from {source}: {counted(len(found), 'tensor')}"
    if left_out:
        told += f"; its last layer is left out, which is for other classes: {some_of(left_out, 3)}"
    if unused:
        told += f"; {len(unused)} not used, as {network} does not know them: {some_of(unused, 3)}"
    return told


def _prefix(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """The prefix, possibly of several wrappers, under which most of the wanted names are found."""
    prefixes = {""}
    for name in tensors:
        prefix = ""
        while step := next((known for known in _PREFIXES if name.startswith(known, len(prefix))), ""):
            prefix += step
            prefixes.add(prefix)
    by_length = sorted(prefixes, key=lambda prefix: (len(prefix), prefix))
    return max(by_length, key=lambda prefix: sum(prefix + name in tensors for name in wanted))


def _last_layers(backbone: nn.Module) -> tuple[str, ...]:
    """How the names of a last layer begin: as timm knows it for this network, and as shortlist calls it."""
    known = getattr(backbone, "pretrained_cfg", {}).get("classifier") or ()
    names = (known,) if isinstance(known, str) else tuple(known)
    return tuple(f"{name}." for name in (*names, "head"))
