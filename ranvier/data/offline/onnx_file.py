"""The weights in an ONNX file and the operations that use them: what a conversion of a model needs. Read by `onnx`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ranvier.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Graph:
    """tensors: fp32 weights by name; inputs: the name of an operation -> the names of its inputs, in order."""

    tensors: dict[str, npt.NDArray[np.float32]]
    inputs: dict[str, tuple[str, ...]]


def read_graph(data: bytes, where: str) -> Graph:
    """The graph of a model, with the fp32 weights in it. DataError if `data` is not an ONNX model or `onnx` is missing.

    data: the content of the file; where: its name, for errors.
    """
    try:
        import onnx
    except ImportError as error:
        raise DataError("is an ONNX file, and the package `onnx`, which reads it, is not installed",
                        code="onnx-package-missing", where=where,
                        remedy="Run pip install 'ranvier[hub]', or name a folder in Hugging Face's format.") from error
    try:
        graph = onnx.load_model_from_string(data).graph
        return Graph(
            tensors={tensor.name: _array(tensor) for tensor in graph.initializer
                     if tensor.data_type == onnx.TensorProto.FLOAT},
            inputs={node.name: tuple(node.input) for node in graph.node})
    except Exception as error:  # protobuf and onnx raise many kinds for damaged files
        raise DataError("is not an ONNX model, or is damaged", code="onnx-damaged", where=where,
                        value=f"{type(error).__name__}: {error}", remedy="Delete it, and fetch it again.") from error


def _array(tensor: Any) -> npt.NDArray[np.float32]:
    from onnx import external_data_helper, numpy_helper

    if external_data_helper.uses_external_data(tensor):
        raise ValueError(f"{tensor.name} is in another file")
    array: npt.NDArray[np.float32] = numpy_helper.to_array(tensor)
    return array
