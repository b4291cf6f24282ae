"""Export of a Transformer decoder to ONNX: one graph for prefill and decoding, with past keys and values as inputs.

A `Graph` is built node by node, with the weights as initializers. Inputs and outputs have the names that Hugging
Face's Optimum gives them, which other programs expect.

Dims: B batch, T new tokens, P past tokens, S = P + T, D model, N heads, K kv heads, G = N / K, H head_dim, F
feed-forward, V vocabulary.
"""

import importlib.util
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxstack.export import run_exported
from jaxstack.export.source import Source, dense_softmax_problem
from jaxstack.files import write_json
from jaxstack.models.config import ModelConfig
from jaxstack.models.norm import NORMS, RMSNorm, head_norm_name
from jaxstack.models.rope import Rotation

if TYPE_CHECKING:
    import onnx

OPSET = 17
"""Version of the operators: all of them are older, so that every current runtime has them."""
_IR_VERSION = 8
_EXTERNAL_BYTES = 15 * 10**8
"""Size of weights from which they are written to a separate file; a protobuf message can have 2 GB."""


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
        """Check the graph and write it to a file, with large weights in a separate file next to it."""
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


_POSITIONS_PER_RUN = 1024
"""The angle of a run of so many positions is reduced modulo 2 pi in float64, as in `jaxstack.models.rope`."""
_HIDDEN = float(np.finfo(np.float32).min)


def build_graph(model: ModelConfig, parameters: Mapping[str, np.ndarray], *, last_only: bool = False) -> Graph:
    """Build the ONNX graph of a Transformer with softmax attention and dense layers (no mixture of experts).

    Inputs: `input_ids` [B, T], `attention_mask` [B, S] (0 for padding), `position_ids` [B, T], all int64, and
    `past_key_values.{i}.key` and `.value`, float32 [B, K, P, H]. Outputs: `logits` [B, T, V], and
    `present.{i}.key` and `.value` [B, K, S, H]. With `last_only`, the logits are those after the last token, [B, 1, V].
    """
    return _Writer(model, parameters).write(last_only)


class _Writer:
    """Adds the layers of one Transformer to an ONNX graph."""

    def __init__(self, model: ModelConfig, parameters: Mapping[str, np.ndarray]):
        self.model = model
        self.parameters = parameters
        self.graph = Graph("jaxstack")
        self.heads = model.num_heads
        self.kv_heads = model.kv_heads
        self.width = model.width_per_head

    def write(self, last_only: bool) -> Graph:
        """Add all inputs, layers and outputs of the model to the graph, and return the graph."""
        graph = self.graph
        model = self.model
        ids = graph.input("input_ids", "INT64", ["batch", "length"])
        mask = graph.input("attention_mask", "INT64", ["batch", "total"])
        positions = graph.input("position_ids", "INT64", ["batch", "length"])
        cache = ["batch", self.kv_heads, "past", self.width]
        pasts = [
            [graph.input(f"past_key_values.{i}.{name}", "FLOAT", cache) for name in ("key", "value")]
            for i in range(model.num_layers)
        ]
        x = self._embed(ids, positions)
        biases = self._mask_biases(ids, mask)
        angles = {name: self._angles(positions, rotation) for name, rotation in model.rotations().items()}
        outputs: list[list[str]] = []
        for number, (layer, past) in enumerate(zip(model.layers(), pasts, strict=True)):
            turns = angles[layer.rotation] if layer.rotation else None
            x, present = self._layer(number, x, biases[layer.window], turns, past)
            outputs.append(present)
        if last_only:
            x = graph.add("Slice", x, graph.integers(-1), graph.integers(2**62), graph.integers(1))
        x = self._norm("final_norm", x, model.norm)
        shape = ["batch", 1 if last_only else "length", model.vocab_size or 0]
        graph.output(self._logits(x), "logits", "FLOAT", shape)
        cache[2] = "total"
        for i, present in enumerate(outputs):
            for name, value in zip(("key", "value"), present, strict=True):
                graph.output(value, f"present.{i}.{name}", "FLOAT", cache)
        return graph

    def _parameter(self, path: str) -> str:
        return self.graph.weight(path.replace("/", "."), self.parameters[path])

    def _embed(self, ids: str, positions: str) -> str:
        graph = self.graph
        model = self.model
        x = graph.add("Gather", self._parameter("embedding/table"), ids)
        if model.embedding_factor != 1:
            x = graph.add("Mul", x, graph.constant(model.embedding_factor))
        if model.positions == "learned":
            x = graph.add("Add", x, graph.add("Gather", self._parameter("position_embedding/table"), positions))
        return x

    def _logits(self, x: str) -> str:
        graph = self.graph
        cap = self.model.final_logit_softcapping
        if self.model.tie_word_embeddings:
            head = graph.add("Transpose", "embedding.table", perm=[1, 0])
        else:
            head = self._parameter("head")
        return self._soft_cap(graph.add("MatMul", x, head), cap)

    def _soft_cap(self, x: str, cap: float | None) -> str:
        if not cap:
            return x
        graph = self.graph
        return graph.add("Mul", graph.add("Tanh", graph.add("Div", x, graph.constant(cap))), graph.constant(cap))

    def _mask_biases(self, ids: str, mask: str) -> dict[int | None, str]:
        """Add an attention bias [B, 1, T, S] per window size to the graph: 0, or the least float for masked keys."""
        graph = self.graph
        zero = graph.constant(0, np.int64)
        one = graph.constant(1, np.int64)
        total = graph.add("Gather", graph.add("Shape", mask), one)
        past = graph.add("Sub", total, graph.add("Gather", graph.add("Shape", ids), one))
        keys = graph.add("Range", zero, total, one)
        queries = graph.add("Unsqueeze", graph.add("Range", past, total, one), graph.integers(1))
        padding = graph.add("Unsqueeze", graph.add("Cast", mask, to=9), graph.integers(1, 2))  # 9: bool
        causal = graph.add("LessOrEqual", keys, queries)
        biases = {}
        for window in set(self.model.windows()):
            visible = causal
            if window is not None:
                first = graph.add("Sub", queries, graph.constant(window, np.int64))
                visible = graph.add("And", visible, graph.add("Greater", keys, first))
            visible = graph.add("And", visible, padding)
            biases[window] = graph.add("Where", visible, graph.constant(0.0), graph.constant(_HIDDEN))
        return biases

    def _angles(self, positions: str, rotation: Rotation) -> tuple[str, str]:
        """Add the cosines and sines of rotary positions to the graph."""
        graph = self.graph
        frequencies = rotation.frequencies()
        run = graph.constant(_POSITIONS_PER_RUN, np.int64)
        runs = graph.add("Div", positions, run)
        offsets = graph.add("Sub", positions, graph.add("Mul", runs, run))
        run_angles = np.mod(frequencies * _POSITIONS_PER_RUN, 2 * math.pi)
        parts = []
        for number, radians in ((runs, run_angles), (offsets, frequencies)):
            column = graph.add("Unsqueeze", graph.add("Cast", number, to=1), graph.integers(1, 3))  # 1: float32
            parts.append(graph.add("Mul", column, graph.constant(radians)))
        angles = graph.add("Add", *parts)
        turns = graph.add("Cos", angles), graph.add("Sin", angles)
        if rotation.factor == 1:
            return turns
        cos, sin = (graph.add("Mul", turn, graph.constant(rotation.factor)) for turn in turns)
        return cos, sin

    def _norm(self, path: str, x: str, kind: str) -> str:
        graph = self.graph
        scale = self.parameters[f"{path}/scale"]
        name = path.replace("/", ".")
        if kind == "layer_norm":
            weights = (graph.weight(f"{name}.scale", scale), self._parameter(f"{path}/bias"))
            return graph.add("LayerNormalization", x, *weights, axis=-1, epsilon=self.model.norm_eps)
        return self._rms_norm(x, graph.weight(f"{name}.scale", scale + _offset(kind)))

    def _rms_norm(self, x: str, scale: str) -> str:
        graph = self.graph
        mean = graph.add("ReduceMean", graph.add("Pow", x, graph.constant(2.0)), axes=[-1], keepdims=1)
        root = graph.add("Sqrt", graph.add("Add", mean, graph.constant(self.model.norm_eps)))
        return graph.add("Mul", graph.add("Div", x, root), scale)

    def _layer(
        self, number: int, x: str, bias: str, angles: tuple[str, str] | None, past: list[str]
    ) -> tuple[str, list[str]]:
        """Add one Transformer layer to the graph; return the residual stream and the layer's keys and values."""
        model = self.model
        path = f"decoder/layers/{number}"
        update, present = self._attention(
            f"{path}/attention", self._norm(f"{path}/attention_norm", x, model.norm), bias, angles, past
        )
        if model.post_norms:
            update = self._norm(f"{path}/attention_post_norm", update, model.norm)
        x = self.graph.add("Add", x, update)
        update = self._mlp(f"{path}/mlp", self._norm(f"{path}/mlp_norm", x, model.norm))
        if model.post_norms:
            update = self._norm(f"{path}/mlp_post_norm", update, model.norm)
        return self.graph.add("Add", x, update), present

    def _linear(self, x: str, path: str, names: tuple[str, ...], inputs: int) -> str:
        """Add one matmul for several dense layers on the same input x, with their biases, to the graph."""
        name = f"{path}/{'_'.join(names)}".replace("/", ".")
        kernels = [self.parameters[f"{path}/{n}/kernel"].reshape(inputs, -1) for n in names]
        x = self.graph.add("MatMul", x, self.graph.weight(f"{name}.kernel", np.concatenate(kernels, axis=1)))
        if f"{path}/{names[0]}/bias" not in self.parameters:
            return x
        biases = [self.parameters[f"{path}/{n}/bias"].reshape(-1) for n in names]
        return self.graph.add("Add", x, self.graph.weight(f"{name}.bias", np.concatenate(biases)))

    def _attention(
        self, path: str, x: str, bias: str, angles: tuple[str, str] | None, past: list[str]
    ) -> tuple[str, list[str]]:
        graph = self.graph
        n = self.heads
        k = self.kv_heads
        h = self.width
        x = self._linear(x, path, ("q_proj", "k_proj", "v_proj"), self.model.hidden_size)
        x = graph.add("Reshape", x, graph.integers(0, 0, n + 2 * k, h))
        x = graph.add("Transpose", x, perm=[0, 2, 1, 3])
        rotated, value = graph.add_many("Split", 2, x, graph.integers(n + k, k), axis=1)
        if self.model.qk_norm:
            kind = head_norm_name(self.model.norm)
            scales = [np.tile(self.parameters[f"{path}/{p}_norm/scale"], (c, 1)) for p, c in (("q", n), ("k", k))]
            scale = np.concatenate(scales)[:, None] + _offset(kind)
            rotated = self._rms_norm(rotated, graph.weight(f"{path}/qk_norm".replace("/", "."), scale))
        if angles is not None:
            rotated = self._rotate(rotated, *angles)
        query, key = graph.add_many("Split", 2, rotated, graph.integers(n, k), axis=1)
        present = [graph.add("Concat", *pair, axis=2) for pair in zip(past, (key, value), strict=True)]
        out = self._attend(query, present[0], present[1], bias)
        out = graph.add("Transpose", out, perm=[0, 2, 1, 3])
        return self._output(path, graph.add("Reshape", out, graph.integers(0, 0, n * h))), present

    def _output(self, path: str, x: str) -> str:
        return self._linear(x, path, ("o_proj",), self.heads * self.width)

    def _rotate(self, x: str, cos: str, sin: str) -> str:
        """Add RoPE of x [B, N, T, H] to the graph: elements i and i + R/2 of a head's first R rotate as a pair."""
        graph = self.graph
        half = self.model.rotary_channels // 2
        sizes = [half, half, *([self.width - 2 * half] if 2 * half < self.width else [])]
        first, second, *rest = graph.add_many("Split", len(sizes), x, graph.integers(*sizes), axis=3)
        real = graph.add("Sub", graph.add("Mul", first, cos), graph.add("Mul", second, sin))
        imaginary = graph.add("Add", graph.add("Mul", second, cos), graph.add("Mul", first, sin))
        return graph.add("Concat", real, imaginary, *rest, axis=3)

    def _attend(self, query: str, key: str, value: str, bias: str) -> str:
        """Add softmax attention of queries [B, N, T, H] over keys and values [B, K, S, H]; return its output."""
        graph = self.graph
        n = self.heads
        k = self.kv_heads
        h = self.width
        grouped = n != k
        sizes: str | None = None
        query = graph.add("Mul", query, graph.constant(self.model.attention_scale))
        shape = graph.add("Shape", query)
        if grouped:  # the queries of one key head become rows of one matrix: [B, K, G T, H]
            query = graph.add("Reshape", query, graph.integers(0, k, -1, h))
        scores = graph.add("MatMul", query, graph.add("Transpose", key, perm=[0, 1, 3, 2]))
        if grouped:
            keys = graph.add("Slice", graph.add("Shape", key), graph.integers(2), graph.integers(3))
            rows = graph.add("Slice", shape, graph.integers(0), graph.integers(3))
            scores = graph.add("Reshape", scores, graph.add("Concat", rows, keys, axis=0))
            sizes = graph.add("Concat", graph.integers(0, k, -1), keys, axis=0)
        scores = self._soft_cap(scores, self.model.attn_logit_softcapping)
        weights = graph.add("Softmax", graph.add("Add", scores, bias), axis=-1)
        if sizes is not None:
            weights = graph.add("Reshape", weights, sizes)
        out = graph.add("MatMul", weights, value)
        return graph.add("Reshape", out, shape) if grouped else out

    def _mlp(self, path: str, x: str) -> str:
        model = self.model
        graph = self.graph
        size = model.feed_forward_size
        if model.mlp == "plain":
            x = self._activate(self._linear(x, path, ("up_proj",), model.hidden_size))
        else:
            both = self._linear(x, path, ("gate_proj", "up_proj"), model.hidden_size)
            gate, up = graph.add_many("Split", 2, both, graph.integers(size, size), axis=2)
            x = graph.add("Mul", self._activate(gate), up)
        return self._linear(x, path, ("down_proj",), size)

    def _activate(self, x: str) -> str:
        graph = self.graph
        name = self.model.hidden_act
        if name == "silu":
            return graph.add("Mul", x, graph.add("Sigmoid", x))
        if name in ("relu", "relu_squared"):
            x = graph.add("Relu", x)
            return graph.add("Mul", x, x) if name == "relu_squared" else x
        half = graph.constant(0.5)
        one = graph.constant(1.0)
        if name == "gelu":
            inner = graph.add("Erf", graph.add("Div", x, graph.constant(math.sqrt(2))))
        else:  # gelu_tanh
            cube = graph.add("Mul", graph.add("Mul", graph.add("Mul", x, x), x), graph.constant(0.044715))
            inner = graph.add("Mul", graph.add("Add", x, cube), graph.constant(math.sqrt(2 / math.pi)))
            inner = graph.add("Tanh", inner)
        return graph.add("Mul", graph.add("Mul", x, graph.add("Add", inner, one)), half)


def _offset(norm: str) -> np.float32:
    """Return the constant that an RMSNorm adds to its stored scale (0 or 1)."""
    kind = NORMS[norm]
    return np.float32(kind.offset if issubclass(kind, RMSNorm) else 0)


def missing() -> str | None:
    """Return an error message if the package onnx, which ONNX export needs, is not installed; else None."""
    return None if onnx_installed() else "the package onnx is missing; install it with pip install 'jaxstack[export]'."


def problem(source: Source) -> str | None:
    """Return the first feature of the model that ONNX export does not support, as text; None if none."""
    return dense_softmax_problem(source.model)


def write(source: Source, folder: Path) -> str:
    """Write an ONNX graph of the model, its tokenizer, and a program that generates text with ONNX Runtime."""
    build_graph(source.model, source.parameters).save(folder / "model.onnx")
    write_json(folder / run_exported.SETTINGS, {"format": "onnx", **source.generation()})
    source.tokenizer.save(folder)
    shutil.copyfile(run_exported.__file__, folder / "run.py")
    return 'python {folder}/run.py --prompt "def " (needs onnxruntime)'
