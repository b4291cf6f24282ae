"""Predicts the memory of a train step on each device by formulas: weights, optimizer state, activations and others.

Widths: D hidden, Q heads x head_dim, K kv_heads x head_dim, F feed-forward, V vocabulary. Between steps a device holds
float32 weights and the optimizer state. A step additionally needs:

- a working copy in the compute dtype: of all weights with ZeRO 1 and 2 (Rajbhandari et al. 2020), of embedding and
  head, and of the layer that computes; the reference model of preferences, unless it is the model without its adapters;
- gradients in float32 (in the compute dtype with ZeRO 1), and with gradient accumulation their sums;
- activations that `model.remat` saves, in the compute dtype, for each token and layer: 4D + 2Q + 2K + 3F values with
  `none` (2D + 2Q + 2K + 2F where scanned layers gather weights, and recompute elementwise results), 2D + 2Q + 2K + 2F
  with `save_dots`, D + Q with `save_attention`, D with `full`, Q or none on the device with those that offload
  (compare Korthikanti et al. 2022). An MLP without a gate has 2F and F in place of 3F and 2F; a mixture of experts with
  k experts for a token saves 4kD more, 6kD with an `expert` axis; sequence parallelism saves one gathered input, D;
- the activations and gradients of the one layer that is in its backward pass, and a chunk of logits;
- buffers: of experts that receive tokens, and of keys and values from the `context` axis.

A pipeline stores the activations of several microbatches: m with `gpipe`, 2p - 1 with `1f1b` and `zero_bubble`,
(v + 1)p - 1 pieces of 1/v with `interleaved`, but never more than there are.
"""

import math
from typing import NamedTuple

import numpy as np

from jaxstack.cost_model.layouts import Floats, LayoutTable
from jaxstack.cost_model.model_shape import ModelShape
from jaxstack.models.feed_forward_chunks import CHUNK_BYTES
from jaxstack.stored.packed_base import PackedModel

PARTS = ("weights", "optimizer", "working_copies", "gradients", "activations", "transient", "logits", "buffers")
"""Parts of the memory, in the order of tables."""
_COMPUTE = 2
"""Bytes of a value in the compute dtype of a GPU."""
_BACKWARD_SET = 1.7
"""Activations and their gradients that a layer's backward pass holds, relative to one layer's activations."""
_RECOMPUTED_SET = 0.8
"""The same where they are recomputed, because few of them are in memory together."""


class PackedSize(NamedTuple):
    """Size of the weights that stay packed; each device holds all of them."""

    values: int = 0
    """Number of weights."""
    bytes: float = 0.0
    """Bytes in device memory, where integers of up to 4 bits take half a byte, and those of up to 8 bits one."""

    @classmethod
    def of(cls, base: PackedModel | None) -> "PackedSize":
        """Return the size of the weights of a model that stay packed; 0 without a model."""
        values = 0
        size = 0.0
        for weight in () if base is None else base.weights.values():
            bits = weight.format.bits_of
            for name, array in weight.arrays.items():
                each = 8 * array.dtype.itemsize if name not in bits else 4 if bits[name] <= 4 else 8
                size += array.size * each / 8
            values += math.prod(weight.shape)
        return cls(values, size)


def memory_parts(
    shape: ModelShape,
    layouts: LayoutTable,
    *,
    tokens: int,
    optimizer_bytes: float,
    scanned: bool = True,
    prefetch: bool = False,
    trained: float = 1.0,
    adapters: float = 0.0,
    reference: bool = False,
    packed: PackedSize | None = None,
) -> dict[str, Floats]:
    """Return the predicted bytes on each device for each layout, by part: weights, gradients, activations and others.

    Args:
      shape: the model.
      layouts: the layouts.
      tokens: tokens of a global batch.
      optimizer_bytes: bytes of optimizer state for each trained parameter.
      scanned: `model.scan_layers`.
      prefetch: `parallel.prefetch`.
      trained: trained parameters over those of the model without adapters; below 1 with adapters or frozen groups.
      adapters: parameters of adapters over those of the model without them; `shape` leaves them out.
      reference: there is a second, frozen model of the same shape.
      packed: weights that stay packed, of which each device holds all; None: none.
    """
    packed = packed or PackedSize()
    stored = stored_parameters(shape, layouts, zero_from=1)
    gradients = trained * _gradients(shape, layouts)
    activations = saved_values_per_token(shape, layouts, scanned=scanned) * _COMPUTE * layers_of_stage(shape, layouts)
    activations = activations * microbatch_tokens_per_device(layouts, tokens) * in_flight(layouts)
    work = _working_set(shape, layouts, tokens)
    if not scanned:
        # Unrolled layers free their activations one by one, and gradients reuse that memory.
        hidden = np.minimum(np.where(layouts["pipeline"] == 1, gradients, 0), activations)
        activations = activations - hidden
    return {
        "weights": (1 + adapters - packed.values / shape.total) * 4 * stored + packed.bytes,
        "optimizer": trained * optimizer_bytes * stored,
        "working_copies": _working_copies(shape, layouts, prefetch) + reference * _COMPUTE * stored,
        "gradients": gradients,
        "activations": activations,
        "transient": work,
        "logits": np.minimum(
            microbatch_tokens_per_device(layouts, tokens) * shape.vocabulary * _COMPUTE / layouts["tensor"], CHUNK_BYTES
        ),
        "buffers": _buffers(shape, layouts, tokens),
    }


def weight_shards(layouts: LayoutTable) -> Floats:
    """Return the number of shards into which `fsdp` and `context` together split every matrix, for each layout."""
    return layouts["fsdp"] * layouts["context"]


def gathers_weights(layouts: LayoutTable) -> np.ndarray:
    """Return a mask [layouts]: True where each layer's weights are all-gathered before use."""
    return weight_shards(layouts) > 1


def stored_parameters(shape: ModelShape, layouts: LayoutTable, *, zero_from: int) -> Floats:
    """Return the number of parameters that each device stores between steps.

    Args:
      shape: the model.
      layouts: the layouts.
      zero_from: smallest ZeRO stage at which `data` splits them: 1 for weights and optimizer state, 2 for gradients.
    """
    replicas = np.where(layouts["zero"] >= zero_from, layouts["data"], 1)
    shards = layouts["tensor"] * layouts["pipeline"] * usable_shards(shape, weight_shards(layouts) * replicas)
    uneven = layers_of_stage(shape, layouts) * layouts["pipeline"] / shape.layers
    dense = shape.layer_parameters * uneven + shape.tables
    return dense / shards + shape.all_experts * uneven / shards / layouts["expert"]


def _gradients(shape: ModelShape, layouts: LayoutTable) -> Floats:
    """Return the bytes of gradients on each device, including the buffer that sums them over microbatches.

    Gradients are float32, except with ZeRO 1; the sums are stored in addition to the gradients of one microbatch.

    In a pipeline the gradients of embedding and head stay whole until the end of the step; where weights are gathered,
    so do those of one table.
    """
    local = stored_parameters(shape, layouts, zero_from=2)
    whole = shape.tables / layouts["tensor"]
    several = (layouts["microbatches"] > 1) & (layouts["pipeline"] == 1)
    one = np.where(layouts["zero"] == 1, 2, 4) * local
    tables = np.where(layouts["pipeline"] > 1, 4 * whole, np.where(gathers_weights(layouts), whole, 0))
    return one + np.where(several, 4 * local, 0) + tables


def usable_shards(shape: ModelShape, shards: Floats) -> Floats:
    """Return, for each layout, how many ways to split a matrix: `shards` if it divides a layer width, else 1."""
    widths = {shape.hidden, shape.feed_forward, shape.expert_width} - {0}
    return np.where(np.any([width % shards == 0 for width in widths], axis=0), shards, 1)


def layers_of_stage(shape: ModelShape, layouts: LayoutTable) -> Floats:
    """Return the number of layers of the largest pipeline stage."""
    pieces = layouts["pipeline"] * layouts["chunks"]
    return np.ceil(shape.layers / pieces) * layouts["chunks"]


def layers_of_slowest_stage(shape: ModelShape, layouts: LayoutTable) -> Floats:
    """Return the number of layers that a pipeline waits for: of the largest stage, or of the last one.

    The last stage also computes those for multi-token prediction, and has fewer others where they do not divide evenly.
    """
    pieces = layouts["pipeline"] * layouts["chunks"]
    others = shape.layers - shape.predictions
    largest = np.ceil(others / pieces) * layouts["chunks"]
    return np.maximum(largest, largest - (others % pieces > 0) + shape.predictions)


def in_flight(layouts: LayoutTable) -> Floats:
    """Return the number of microbatches whose activations a pipeline stage stores at a time."""
    stages = layouts["pipeline"]
    chunks = layouts["chunks"]
    count = layouts["microbatches"]
    found = np.where(layouts.schedule_in("gpipe"), count, 2 * stages - 1)
    found = np.where(layouts.schedule_in("interleaved"), ((chunks + 1) * stages - 1) / chunks, found)
    return np.where(stages > 1, np.minimum(found, count), 1.0)


def saved_values_per_token(shape: ModelShape, layouts: LayoutTable, *, scanned: bool) -> Floats:
    """Return the number of activation values per token and layer that one device saves for the backward pass."""
    d = shape.hidden
    q = shape.query
    k = shape.key
    f = shape.active_width
    inner = 2 if shape.gated else 1
    stream = np.where(layouts["sequence"] > 0, layouts["tensor"], 1)
    tensor = layouts["tensor"]
    whole = 4 * d / stream + (2 * q + 2 * k + (inner + 1) * f) / tensor
    dots = 2 * d / stream + (2 * q + 2 * k + inner * f) / tensor
    attention = (q + 2 * shape.heads) / tensor
    # Tokens sent to their experts and back; with `expert` also before and after the exchange.
    routed = np.where(layouts["expert"] > 1, 6, 4) * shape.routed * d * shape.mixtures / shape.layers
    # Sequence parallelism saves the gathered inputs of matmuls.
    more = routed + np.where(layouts["sequence"] > 0, d, 0)
    whole = whole + more
    dots = dots + more
    cases = {
        "none": np.where(gathers_weights(layouts) & scanned, dots, whole),
        "save_dots": dots,
        "save_attention": d / stream + attention,
        "full": d / stream,
        "offload": 0 * stream,
        "save_attention_offload": attention,
    }
    found = np.select([layouts.remat_in(name) for name in cases], list(cases.values()))
    # A deferred weight gradient needs the inputs of the matmuls and the gradients of their results.
    waiting = np.where(
        layouts.schedule_in("zero_bubble"), 2 * d / stream + (2 * q + 2 * k + (inner + 1) * f) / tensor, 0
    )
    return found + waiting


def microbatch_tokens_per_device(layouts: LayoutTable, tokens: int) -> Floats:
    """Return the number of tokens of a microbatch on each device."""
    rows = layouts["data"] * layouts["fsdp"] * layouts["expert"] * layouts["context"]
    return tokens / (rows * layouts["microbatches"])


def _working_set(shape: ModelShape, layouts: LayoutTable, tokens: int) -> Floats:
    """Return the bytes of activations and gradients of the one layer that is in its backward pass."""
    d = shape.hidden
    q = shape.query
    k = shape.key
    f = shape.active_width
    rows = microbatch_tokens_per_device(layouts, tokens)
    tensor = layouts["tensor"]
    stream = np.where(layouts["sequence"] > 0, tensor, 1)
    narrow = (4 * d / stream + (2 * q + 2 * k) / tensor) * rows * _COMPUTE
    wide = (3 if shape.gated else 2) * f / tensor * rows * _COMPUTE
    saved = layouts.remat_in("none", "save_dots")
    # A recomputed MLP processes the sequence in chunks.
    wide = np.where(saved, wide, np.minimum(wide, 3 * CHUNK_BYTES))
    return np.where(saved, _BACKWARD_SET, _RECOMPUTED_SET) * (narrow + wide)


def _working_copies(shape: ModelShape, layouts: LayoutTable, prefetch: bool) -> Floats:
    """Return the bytes of the compute-dtype copies of weights that a device holds at a time for the matmuls."""
    tensor = layouts["tensor"]
    experts = layouts["expert"]
    layers = layers_of_stage(shape, layouts)
    of_layers = (shape.layer_parameters + shape.all_experts / experts) / shape.layers * layers / tensor
    one = of_layers / layers * (2 if prefetch else 1)
    gathered = np.where(gathers_weights(layouts), one, np.where(layouts["zero"] > 0, of_layers, one))
    return _COMPUTE * (gathered + shape.tables / tensor)


def _buffers(shape: ModelShape, layouts: LayoutTable, tokens: int) -> Floats:
    """Return the bytes of buffers: for tokens routed to experts, keys and values from other devices, layers' inputs."""
    rows = microbatch_tokens_per_device(layouts, tokens)
    tensor = layouts["tensor"]
    copies = shape.routed * shape.hidden * (shape.exchange_factor * (layouts["expert"] > 1) + 1) * 2
    experts = copies * rows * _COMPUTE * (shape.mixtures > 0)
    keys = np.where(layouts["context"] > 1, 2 * shape.key * 2 * (_COMPUTE + 4) * rows / tensor, 0)
    return experts + keys + 2 * shape.layer_inputs * rows * _COMPUTE  # with their gradients
