"""Builds ONNX graphs node by node, with model weights as initializers."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

OPSET = 17
"""Version of the operators: all of them are older, so that every current runtime has them."""
_IR_VERSION = 8
_EXTERNAL_BYTES = 15 * 10**8
"""Weights above this size, near the 2 GB that a protobuf message can have, are written to a file beside the graph."""


def onnx_installed() -> bool:
    """Return True if the Python package onnx, which writes ONNX files, is installed."""
    return importlib.util.find_spec("onnx") is not None


class Graph:
    """An ONNX graph under construction: its nodes, weights, inputs and outputs.

    Values are known by their names, which `add` returns.
    """

    def __init__(self, name: str):
        self.name = name
        self._nodes: list[Any] = []
        self._weights: dict[str, np.ndarray] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> str:
        """Declare an input of the graph; a string in its shape names a dim whose size is known only at run time."""
        self._inputs.append(_value(name, dtype, shape))
        return name

    def output(self, value: str, name: str, dtype: str, shape: Sequence[int | str]) -> None:
        """Declare a value of the graph as its output `name`."""
        from onnx import helper

        self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._outputs.append(_value(name, dtype, shape))

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator node with one output, and return the output's name."""
        return self.add_many(operator, 1, *inputs, **attributes)[0]

    def add_many(self, operator: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """Add an operator node with `count` outputs, and return their names."""
        from onnx import helper

        number = len(self._nodes)
        outputs = [f"{operator}_{number}" + (f"_{i}" if count > 1 else "") for i in range(count)]
        self._nodes.append(helper.make_node(operator, list(inputs), outputs, **attributes))
        return outputs

    def weight(self, name: str, array: np.ndarray) -> str:
        """Add a model weight as an initializer, and return its name in the graph."""
        self._weights[name] = np.ascontiguousarray(array)
        return name

    def constant(self, value: object, dtype: type[np.generic] = np.float32) -> str:
        """Add a small constant, stored once however often it is used; return its name in the graph."""
        array = np.asarray(value, dtype)
        name = f"constant_{array.dtype}_{'x'.join(map(str, array.shape))}_{array.tobytes().hex()[:64]}"
        while name in self._weights and not np.array_equal(self._weights[name], array):
            name += "_"
        return self.weight(name, array)

    def integers(self, *values: int) -> str:
        """Add a constant int64 vector, such as a shape or a list of axes; return its name in the graph."""
        return self.constant(values, np.int64)

    def save(self, path: Path) -> None:
        """Check the graph and write it to a file, with large weights in a separate file beside it."""
        import onnx
        from onnx import helper, numpy_helper

        weights = [numpy_helper.from_array(array, name) for name, array in self._weights.items()]
        graph = helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, weights)
        opset = helper.make_opsetid("", OPSET)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION, producer_name="jaxstack")
        external = sum(array.nbytes for array in self._weights.values()) > _EXTERNAL_BYTES
        onnx.save_model(model, str(path), save_as_external_data=external, location=f"{path.name}.data")
        onnx.checker.check_model(str(path))


def _value(name: str, dtype: str, shape: Sequence[int | str]) -> "onnx.ValueInfoProto":
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.DataType.Value(dtype), shape)
