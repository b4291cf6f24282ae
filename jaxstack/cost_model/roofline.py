"""The roofline of a training step: FLOPs, bytes and arithmetic intensity of each operator on one device.

The counts are those of a step with fused attention, whose scores never reach the memory, and without recomputation:
each operand of a call is read once, each result written once. Matmuls and attention add up to the model FLOPs that a
run reports. Communication is not counted.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from jaxstack.errors import ConfigError
from jaxstack.models import count_parameters
from jaxstack.models.attention.gated import GatedAttention
from jaxstack.models.config import ModelConfig
from jaxstack.models.layer import Layer
from jaxstack.models.mixers import mixer_module
from jaxstack.observe.throughput import dense_bf16_peak
from jaxstack.run_config import RunConfig


@dataclasses.dataclass(frozen=True)
class OperatorCost:
    """Cost of an operation of a model, or the sum over several of one kind: FLOPs, bytes and number of calls.

    Attributes:
      name: what it computes.
      kind: "matmul", "attention", "elementwise" or "gather".
      flops: floating-point operations of one call.
      bytes: bytes that one call reads from and writes to the device's memory, each operand once.
      calls: number of calls.
    """

    name: str
    kind: str
    flops: float
    bytes: float
    calls: int = 1

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte."""
        return self.flops / self.bytes

    def seconds(self, peak_flops: float, bandwidth: float) -> float:
        """Return the roofline time of all calls, in seconds: calls x max(flops / peak_flops, bytes / bandwidth).

        Roofline model: Williams et al. 2009.

        Args:
          peak_flops: FLOP/s of the device.
          bandwidth: bytes/s of its memory.
        """
        return self.calls * max(self.flops / peak_flops, self.bytes / bandwidth)


# Memory bandwidth in GB/s from NVIDIA's data sheets. The first pattern found in the name of the device wins.
BANDWIDTHS: tuple[tuple[str, float], ...] = (
    ("GB300|GB200|B300|B200", 8000.0),
    ("GH200", 4000.0),
    ("H200", 4800.0),
    ("H100 PCIE", 2000.0),
    ("H100 NVL", 3900.0),
    ("H100|H800", 3350.0),
    ("H20", 4000.0),
    ("A100.*40GB", 1555.0),
    ("A100.*PCIE", 1935.0),
    ("A100|A800", 2039.0),
    ("L40S|L40", 864.0),
    ("A40", 696.0),
    ("A30", 933.0),
    ("A10", 600.0),
    ("L4", 300.0),
)
_ADAM_BYTES = 34
"""Bytes per parameter and step: AdamW reads 16 and writes 12 in float32, a working copy takes 4 + 2."""
_PASSES = 3
"""A matmul of the forward pass has two of the same size in the backward pass."""


@dataclasses.dataclass(frozen=True)
class DevicePeak:
    """Peak rates of a device: dense bfloat16 FLOP/s, and bytes/s of its memory."""

    name: str
    flops: float
    bandwidth: float


def find_peak(kind: str) -> DevicePeak | None:
    """Return the peak rates of a device kind, such as "NVIDIA H200" or "h200"; None if they are not known."""
    tflops = dense_bf16_peak(kind) or dense_bf16_peak(kind.upper())
    found = (rate for name, rate in BANDWIDTHS if re.search(rf"\b({name})\b", kind.upper()))
    bandwidth = next(found, None)
    return DevicePeak(kind, tflops * 1e12, bandwidth * 1e9) if tflops and bandwidth else None


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of one device for one microbatch: sequences, their length, and the degrees that split the model.

    Attributes:
      rows: sequences of a microbatch on this device.
      length: tokens of a sequence.
      microbatches: number of microbatches.
      context: number of devices that share each sequence.
      tensor: number of devices that share each matrix.
      expert: number of devices that share the experts.
      optimizer_shards: number of devices that share the parameters and the optimizer's state.
      itemsize: bytes of an activation or a working copy of a weight.
    """

    rows: int
    length: int
    microbatches: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    optimizer_shards: int = 1
    itemsize: int = 2

    @property
    def tokens(self) -> float:
        """Number of tokens of a microbatch that this device computes."""
        return self.rows * self.length / self.context


def model_operators(model: ModelConfig, work: Workload) -> list[OperatorCost]:
    """Return the operators of a training step on one device: forward and backward pass, and the optimizer's update.

    Args:
      model: with `vocab_size` set.
      work: the part of the step that one device computes.
    """
    widths = collections.Counter(
        model.feed_forward_width(layer) for layer in model.layers() if layer.feed_forward in ("dense", "both")
    )
    mixtures = model.mixture_layers * work.microbatches
    return [
        *_attention_operators(model, work),
        *(op for width, layers in widths.items() for op in _dense_operators(model, work, width, layers)),
        *(_mixture_operators(model, work, mixtures) if mixtures else []),
        *(_per_layer_operators(model, work, width) if (width := model.hidden_size_per_layer_input) else []),
        *_elementwise_operators(model, work),
        *_end_operators(model, work),
    ]


def _matmul(name: str, work: Workload, inputs: float, outputs: float, calls: int, weights: float = 1) -> OperatorCost:
    """Return FLOPs and bytes of multiplying a microbatch's tokens by a weight matrix, forward and backward.

    Args:
      name: its name.
      work: the part of the step that one device computes.
      inputs: columns of the input.
      outputs: columns of the output.
      calls: number of calls.
      weights: number of matrices of this size that are read.
    """
    n = work.tokens
    size = work.itemsize
    traffic = size * (n * inputs + n * outputs + weights * inputs * outputs)
    return OperatorCost(name, "matmul", _PASSES * 2 * n * inputs * outputs, _PASSES * traffic, calls)


def _attention_operators(model: ModelConfig, work: Workload) -> list[OperatorCost]:
    mixing = [layer for layer in model.layers() if layer.mixer is not None]
    projections = collections.Counter(_projections(model, layer, work.tensor) for layer in mixing)
    found = []
    for (name, inner, outer), layers in projections.items():
        calls = layers * work.microbatches
        found.append(_matmul(name, work, model.hidden_size, inner, calls))
        found.append(_matmul("output projection", work, outer, model.hidden_size, calls))
    for layer in sorted(dict.fromkeys(mixing), key=lambda layer: layer.window or layer.chunk or math.inf):
        assert layer.mixer is not None
        flops = mixer_module(layer.mixer).flops_per_token(model, layer, work.length) / work.tensor
        heads, kv, h = _size_of_heads(model, layer, work.tensor)
        # Queries, keys, values and outputs; in the backward pass these and the gradients of all four.
        traffic = _PASSES * work.itemsize * work.tokens * 2 * (heads + kv) * h
        name = "attention" if layer.mixer.own_heads is None else f"recurrence ({layer.mixer.title})"
        name += f", window {layer.window}" if layer.window else ""
        name += f", chunks of {layer.chunk}" if layer.chunk else ""
        calls = mixing.count(layer) * work.microbatches
        found.append(OperatorCost(name, "attention", flops * work.tokens, traffic, calls))
    return found


def _projections(model: ModelConfig, layer: Layer, tensor: int) -> tuple[str, float, float]:
    """Return a name for the projections into a layer's mixer, how many columns they have, and those of its output."""
    heads, kv, h = _size_of_heads(model, layer, tensor)
    mixer = layer.mixer
    if mixer is None or mixer.own_heads is None:
        keys_and_values = 0 if layer.reuses is not None else 2 * kv
        gates = heads if isinstance(mixer, GatedAttention) else 0
        return "query, key, value projection", (heads + keys_and_values + gates) * h, heads * h
    columns = mixer_module(mixer).count(model, layer).matmul / model.hidden_size / tensor
    return f"input projections ({mixer.title})", columns - heads * h, heads * h


def _size_of_heads(model: ModelConfig, layer: Layer, tensor: int) -> tuple[float, float, int]:
    """Return the numbers of a layer's query and key heads on one device, and the width of its heads."""
    heads = model.heads(layer)
    return heads.num_heads / tensor, heads.num_kv_heads / min(tensor, heads.num_kv_heads), heads.head_dim


def _dense_operators(model: ModelConfig, work: Workload, width: int, layers: int) -> list[OperatorCost]:
    d = model.hidden_size
    f = width / work.tensor
    calls = layers * work.microbatches
    inner = 2 if model.mlp == "gated" else 1
    return [
        _matmul("feed-forward, gate and up" if inner == 2 else "feed-forward, up", work, d, inner * f, calls),
        _activation("activation", work, f, inner, calls),
        _matmul("feed-forward, down", work, f, d, calls),
    ]


def _activation(name: str, work: Workload, width: float, inner: int, calls: int) -> OperatorCost:
    """Return FLOPs and bytes of an activation function on a microbatch's tokens, forward and backward.

    It has about 5 FLOPs per value, and about twice that in the backward pass.
    """
    n = work.tokens
    traffic = work.itemsize * n * width * (inner + 1 + 2 * inner + 1)  # backward: inputs, their gradients, the output's
    return OperatorCost(name, "elementwise", 15 * n * width, traffic, calls)


def _mixture_operators(model: ModelConfig, work: Workload, calls: int) -> list[OperatorCost]:
    moe = model.moe
    assert moe is not None
    d = model.hidden_size
    f = model.expert_size / work.tensor
    inner = 2 if model.mlp == "gated" else 1
    chosen = moe.num_experts_per_tok
    here = moe.num_experts / work.expert
    routed = dataclasses.replace(work, rows=work.rows * chosen)
    found = [
        _matmul("router", work, d, moe.num_experts, calls),
        _matmul("experts, gate and up" if inner == 2 else "experts, up", routed, d, inner * f, calls, here),
        _activation("experts, activation", routed, f, inner, calls),
        _matmul("experts, down", routed, f, d, calls, here),
    ]
    if moe.n_shared_experts:
        shared = moe.n_shared_experts * f
        found += [
            _matmul("shared experts, gate and up", work, d, inner * shared, calls),
            _matmul("shared experts, down", work, shared, d, calls),
        ]
    return found


def _per_layer_operators(model: ModelConfig, work: Workload, width: int) -> list[OperatorCost]:
    d = model.hidden_size
    layers = model.num_layers
    calls = layers * work.microbatches
    return [
        _matmul("per-layer embeddings, of all layers", work, d, layers * width, work.microbatches),
        _matmul("per-layer embeddings, gate", work, d, width, calls),
        _matmul("per-layer embeddings, projection", work, width, d, calls),
    ]


def _elementwise_operators(model: ModelConfig, work: Workload) -> list[OperatorCost]:
    values = work.tokens * model.hidden_size
    size = work.itemsize
    layers = model.layers()
    sublayers = [(layer.mixer is not None) + (layer.feed_forward is not None) for layer in layers]
    norms = [n * (layer.pre_norms + layer.post_norms) for n, layer in zip(sublayers, layers, strict=True)]
    found = [
        # Read and write; backward: read the input and the gradient, write a gradient.
        OperatorCost("norm", "elementwise", 15 * values, 5 * size * values, sum(norms) * work.microbatches),
        OperatorCost(
            "residual connection", "elementwise", 2 * values, 5 * size * values, sum(sublayers) * work.microbatches
        ),
    ]
    if rotating := sum(layer.rotation is not None for layer in layers) * work.microbatches:
        heads = (model.num_heads + model.kv_heads) / work.tensor
        turned = work.tokens * heads * model.width_per_head
        found.append(OperatorCost("rotary positions", "elementwise", 6 * turned, 4 * size * turned, rotating))
    return found


def _end_operators(model: ModelConfig, work: Workload) -> list[OperatorCost]:
    """Return the operators outside of the layers: embedding, head with loss (per microbatch), optimizer (per step)."""
    d = model.hidden_size
    size = work.itemsize
    assert model.vocab_size is not None
    vocabulary = model.vocab_size / work.tensor
    n = work.tokens
    # The logits are computed in chunks and not kept.
    head = size * _PASSES * (n * d + vocabulary * d)
    parameters = count_parameters(model).total / work.optimizer_shards
    return [
        OperatorCost("embedding", "gather", n * d, (2 * size + 4 + 2 * size) * n * d, work.microbatches),
        OperatorCost("final norm", "elementwise", 15 * n * d, 5 * size * n * d, work.microbatches),
        OperatorCost("head and loss", "matmul", _PASSES * 2 * n * d * vocabulary, head, work.microbatches),
        OperatorCost("optimizer", "elementwise", 15 * parameters, _ADAM_BYTES * parameters),
    ]


def workload_of(config: RunConfig) -> Workload:
    """Return what one device computes for one microbatch of a run: sequences, their length, degrees of parallelism.

    Raises:
      ConfigError: a degree is -1, so that the number of devices is not known.
    """
    degrees = config.parallel.degrees
    if -1 in degrees.values():
        raise ConfigError("a degree of parallel is -1: give the number of devices with --devices.")
    batch = config.train.global_batch_size // config.train.gradient_accumulation
    sharing = degrees["data"] * degrees["fsdp"] * degrees["expert"]
    shards = degrees["fsdp"] * degrees["tensor"] * degrees["pipeline"]
    return Workload(
        rows=max(1, batch // sharing),
        length=config.train.sequence_length,
        microbatches=config.train.gradient_accumulation,
        context=degrees["context"],
        tensor=degrees["tensor"],
        expert=degrees["expert"],
        optimizer_shards=shards * (degrees["data"] if config.parallel.zero else 1),
    )


def describe_roofline(config: RunConfig, peak: DevicePeak) -> dict[str, Any]:
    """Describe where a run's operators lie on a device's roofline, as plain JSON for the plot in the run's report.

    With a pipeline the operators are those of all stages, on one device of each.
    """
    operators = model_operators(config.model, workload_of(config))
    return describe_operators(operators, peak)


def describe_operators(operators: Sequence[OperatorCost], peak: DevicePeak) -> dict[str, Any]:
    """Describe operators on the roofline of a device (intensity, time, what limits them), as plain JSON."""
    times = [one.seconds(peak.flops, peak.bandwidth) for one in operators]
    ridge = peak.flops / peak.bandwidth
    rows = [
        {
            "operator": one.name,
            "kind": one.kind,
            "calls": one.calls,
            "flops": one.flops * one.calls,
            "traffic_bytes": one.bytes * one.calls,
            "intensity": one.intensity,
            "limit": "arithmetic" if one.intensity >= ridge else "memory",
            "seconds": seconds,
            "share": seconds / sum(times),
        }
        for one, seconds in zip(operators, times, strict=True)
    ]
    return {
        "device": peak.name,
        "peak_flops": peak.flops,
        "bandwidth": peak.bandwidth,
        "ridge": ridge,
        "seconds": sum(times),
        "operators": rows,
    }
