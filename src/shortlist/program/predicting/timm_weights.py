"""The weights of a run under timm's own names, for ``timm.create_model(..., checkpoint_path=FILE)``."""

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.heads.cosine import CosineLinear, unit_rows
from shortlist.prior_correction import PriorCorrection
from shortlist.program.models.build import Classifier
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.model import load_correction, load_model
from shortlist.program.runs.records import read_preprocess

_CLOSE = 1e-3  # how near the two networks' scores must be, as a share of the largest


def timm_file(run: RunFolder, metadata: Mapping[str, Any]) -> bytes:
    """The content of a safetensors file. Every value of its metadata is JSON.

    The last layer is linear with a bias, which contains the correction for class sizes. A cosine layer divides by the
    length of the features, which no linear layer can do. Without a correction that does not matter to the order: the
    scores are then the run's, times this length.
    """
    import timm

    name, network = run.config.model.name, load_model(run).eval()
    if not timm.is_model(name):
        raise ShortlistError(f"timm has no network {name}, which {run.path} has: choose --format onnx or pt2")
    weight, bias = _linear_layer(network.head, load_correction(run), run)
    preprocess = read_preprocess(run)
    made = timm.create_model(name, num_classes=len(bias), in_chans=preprocess.channels).eval()
    last: Any = made.get_classifier()  # type: ignore[operator]
    place = next((name for name, module in made.named_modules() if module is last), "")
    found = {**network.backbone.state_dict(), f"{place}.weight": weight, f"{place}.bias": bias}
    shapes = ({name: tensor.shape for name, tensor in state.items()} for state in (found, made.state_dict()))
    if not isinstance(last, nn.Linear) or next(shapes) != next(shapes):
        raise _misfit(run)
    made.load_state_dict(found)
    _check_scores(made, network, load_correction(run), (preprocess.channels, preprocess.crop, preprocess.crop), run)
    return safetensors.torch.save(
        {name: tensor.contiguous().clone() for name, tensor in found.items()},
        {name: json.dumps(value) for name, value in metadata.items()},
    )


def _linear_layer(head: nn.Module, correction: PriorCorrection | None, run: RunFolder) -> tuple[Tensor, Tensor]:
    """Weights and bias that give the run's scores, or those of a cosine layer times the length of the features."""
    weight = head.get_parameter("weight").detach()
    if not isinstance(head, CosineLinear):
        bias = head.get_parameter("bias").detach()
        return weight, bias if correction is None else correction(bias)
    if correction is not None:
        raise ShortlistError(
            f"{run.path} has a cosine layer and a correction for class sizes. timm's networks end in a linear layer, "
            "which cannot divide by the length of the features before the correction: choose --format onnx or pt2, or "
            "train with --model.head linear"
        )
    scale = head(weight[:1])[0, 0]  # of a vector with itself the cosine is 1
    return scale * unit_rows(weight), torch.zeros(len(weight))


@torch.inference_mode()
def _check_scores(
    made: nn.Module, network: Classifier, correction: PriorCorrection | None, shape: tuple[int, ...], run: RunFolder
) -> None:
    inputs = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    features = network.backbone(inputs)
    wanted = network.head(features)
    if isinstance(network.head, CosineLinear):
        wanted = wanted * features.norm(dim=1, keepdim=True)
    found = made(inputs)
    if correction is not None:
        wanted, found = (scores.masked_fill(correction.left_out, 0) for scores in (correction(wanted), found))
    if not (found - wanted).abs().max() <= _CLOSE * wanted.abs().max():
        raise _misfit(run)


def _misfit(run: RunFolder) -> ShortlistError:
    return ShortlistError(
        f"timm's {run.config.model.name} has no single linear layer after the features that {run.path} was trained on: "
        "choose --format onnx or pt2"
    )
