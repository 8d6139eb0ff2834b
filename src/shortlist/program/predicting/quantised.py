"""Networks in eight bits, by onnxruntime."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shortlist.program.predicting.check_inputs import CheckInputs

if TYPE_CHECKING:
    import onnx

_SCOPES = "pkg.torch.onnx.name_scopes"  # the modules that a node comes from, as torch notes them
_BACKBONE = "'network.backbone'"


def int8_model(model: "onnx.ModelProto", inputs: str, given: CheckInputs) -> "onnx.ModelProto":
    """The model with the weights and activations of its backbone in eight bits.

    Weights are rounded channel by channel. The range of an activation is that which it takes on the given images.
    Preprocessing, last layer and all that follows it stay as they are. So do convolutions within groups of channels:
    they hold few weights, and on EfficientNet-Lite0 their rounding alone cost about 7 points of top-1.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Images(CalibrationDataReader):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            self._left: Iterator[Any] = given.batches()

        def get_next(self) -> dict[str, Any] | None:
            array = next(self._left, None)
            return None if array is None else {inputs: array}

    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "int8.onnx"
        quantize_static(
            model,
            path,
            Images(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            reduce_range=True,  # older processors add two products in 16 bits, which eight bits would overflow
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            # What a convolution gives is rounded after its activation: before, its range is several times wider.
            extra_options={"OpTypesToExcludeOutputQuantization": ["Conv"]},
            nodes_to_quantize=[node.name for node in model.graph.node if _is_rounded(node)],
        )
        return onnx.load(path)


def _is_rounded(node: Any) -> bool:
    is_in_backbone = any(entry.key == _SCOPES and _BACKBONE in entry.value for entry in node.metadata_props)
    has_groups = any(attribute.name == "group" and attribute.i > 1 for attribute in node.attribute)
    return is_in_backbone and not has_groups


@contextmanager
def _quiet() -> Iterator[None]:
    """onnxruntime advises to merge layers first, which torch has done already."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
