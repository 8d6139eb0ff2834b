"""Files that hold a deployed model: ONNX and torch's own, made and opened."""

import importlib.util
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.export import Dim, ExportedProgram

from shortlist.errors import ShortlistError
from shortlist.program.predicting.deployed import DeployedModel

if TYPE_CHECKING:
    import onnx

Format = Literal["onnx", "pt2", "timm"]
Outputs = Mapping[str, np.ndarray[Any, Any]]
Opened = Callable[[np.ndarray[Any, Any]], Outputs]
"""A file in use: from pixels ``(N, C, H, W)`` or vectors ``(N, d)`` to its outputs by name."""

METADATA = "metadata.json"
"""Name of the metadata inside a ``.pt2`` file."""
_OPSET = 18  # the first whose Resize has antialiasing
_LARGEST_ONNX = 2**31 - 2**20  # bytes: protobuf has a limit of 2 GiB
_PACKAGES = ("onnx", "onnxruntime", "onnxscript")


def check_packages() -> None:
    """Raise an error unless ONNX files can be written and run."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise ShortlistError(
            f"ONNX files need the packages {', '.join(missing)}: pip install 'shortlist[export]', "
            "or choose --format pt2"
        )


def traced(model: DeployedModel) -> ExportedProgram:
    """The computation of a model, for any number of inputs and images of any size."""
    example = model.example()
    sizes = dict.fromkeys((0, 2, 3) if example.dim() == 4 else (0,), Dim.DYNAMIC)
    with torch.inference_mode(False), torch.no_grad():
        program = torch.export.export(model, (example,), dynamic_shapes=(sizes,))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it has paths of this machine
    return program


def pt2_file(program: ExportedProgram, metadata: Mapping[str, Any]) -> bytes:
    """The content of a file for ``torch.export.load``."""
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={METADATA: json.dumps(metadata)})
    return content.getvalue()


def onnx_model(program: ExportedProgram, inputs: str, outputs: Sequence[str]) -> "onnx.ModelProto":
    """The same computation in ONNX, with these names."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    if weights > _LARGEST_ONNX:
        raise ShortlistError(
            f"the network has {weights / 2**30:.1f} GiB of weights, and an ONNX file holds 2 GiB: choose --format pt2, "
            "or --precision float16"
        )
    found = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=_OPSET,
        verbose=False,
        input_names=[inputs],
        output_names=list(outputs),
    )
    assert found is not None
    proto: onnx.ModelProto = found.model_proto
    _name_sizes(proto)
    return proto


def onnx_file(model: "onnx.ModelProto", metadata: Mapping[str, Any]) -> bytes:
    """The content of an ONNX file. Every value of its metadata is JSON."""
    for node in model.graph.node:
        del node.metadata_props[:]  # where it comes from in the code; a third of a small file
    del model.metadata_props[:]
    for name, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = name, json.dumps(value)
    content: bytes = model.SerializeToString()
    return content


def opened(content: bytes, kind: Format) -> Opened:
    """A file as its users will run it, on the CPU."""
    if kind == "pt2":
        module = torch.export.load(io.BytesIO(content)).module()

        @torch.inference_mode()
        def with_torch(inputs: np.ndarray[Any, Any]) -> Outputs:
            return {name: value.numpy() for name, value in module(torch.from_numpy(inputs)).items()}

        return with_torch
    return open_onnx(content)[0]


def open_onnx(file: bytes | Path) -> tuple[Opened, dict[str, Any]]:
    """What an ONNX file computes, by onnxruntime on the CPU, and its metadata, of which every value is JSON."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors alone: it warns about every size that it cannot infer
    content = str(file) if isinstance(file, Path) else file
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (given, *_), names = session.get_inputs(), [output.name for output in session.get_outputs()]

    def with_onnxruntime(inputs: np.ndarray[Any, Any]) -> Outputs:
        return dict(zip(names, session.run(names, {given.name: inputs}), strict=True))

    told = session.get_modelmeta().custom_metadata_map
    return with_onnxruntime, {name: json.loads(value) for name, value in told.items()}


def _name_sizes(model: "onnx.ModelProto") -> None:
    """Call the sizes of the input what they are: torch has numbers for them."""
    sizes = [size.dim_param for size in model.graph.input[0].type.tensor_type.shape.dim]
    called = ["batch", "channels", "height", "width"] if len(sizes) == 4 else ["batch", "features"]
    names = {size: name for size, name in zip(sizes, called, strict=True) if size}
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in names:
                size.dim_param = names[size.dim_param]
