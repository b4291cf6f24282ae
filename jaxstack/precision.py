"""Numeric precision: the dtypes of the computation, and FP8 matmuls of chosen dense layers with their scaling state.

Master weights, optimizer state, accumulated gradients, norms and the softmax are float32 in every case.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree
from pydantic import Field, model_validator

from jaxstack.config.base import Component, PathRule
from jaxstack.config.features import Feature
from jaxstack.parallel.rules import Names, restrict
from jaxstack.parallel.sharding_context import ShardingContext, current_context, placed
from jaxstack.parallel.weight_gather import WorkingCopy, dims_of, gather, gather_parameter, on_tensor_shards
from pallas_kernels import (
    NormalisedInput,
    QuantizedWeight,
    empty_fp8_state,
    fp8_dot_general,
    fp8_multiply,
    fp8_swiglu_mlp,
    updated_fp8_state,
)
from pallas_kernels.fp8.blockwise import BLOCK, quantize_weight
from pallas_kernels.fp8.formats import E4M3, Quantized, absolute_maximum, quantize

_PROJECTIONS = r"/(attention/((q|k|v|o|gate)_proj|in_proj_(q|k|v|z)|out_proj)|mlp/(gate|up|down)_proj)/kernel$"


class Fp8Rule(PathRule):
    """Rule whether matmuls run in FP8, by the path of the weight, e.g. decoder/layers/3/mlp/down_proj/kernel."""

    fp8: bool


class PrecisionConfig(Component):
    """Configuration of numeric precision: dtypes of computation, gradient sums and KV cache, and the FP8 recipe."""

    compute: Literal["bfloat16", "float32"] | None = Field(default=None)
    """Dtype of activations and of the weights' working copies; default: bfloat16 on a GPU, float32 on a CPU."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over devices: bfloat16 moves half the bytes, and rounds at every addition."""
    fp8: Literal["none", "delayed", "current", "blockwise"] = "none"
    """FP8 recipe of the layers' matmuls. none: no FP8. current, delayed: one scale per tensor, from its largest
    magnitude in this step or in the last steps. blockwise: one scale per block of 128 values."""
    fp8_gradients: Literal["e5m2", "e4m3"] = "e5m2"
    """Format of the output gradients in the backward matmuls: more range (e5m2) or more digits (e4m3). Blockwise
    scaling always uses e4m3."""
    fp8_history: int = Field(default=16, ge=1)
    """Number of past steps whose largest magnitudes delayed scaling uses."""
    kv_cache: Literal["none", "int8", "fp8", "int4", "k8v4", "bfp12"] = "none"
    """Format of the cache of keys and values in generation, evaluation and serving. none: the compute dtype; int8: one
    scale for each head and token, 8 bits a value in all; fp8: e4m3; int4: one scale for 32 values; k8v4: keys as in
    int8, values as in int4; bfp12: block floating point, keys in 4 bits with sorted channels, values in 8. Training
    does not use it."""
    fp8_rules: tuple[Fp8Rule, ...] = ()
    """Rules that precede the default. The default: the projections of attention and MLP run in FP8, except in the first
    and the last layer unless these are stacked with others; `{path: _proj, fp8: true}` includes these."""

    @model_validator(mode="after")
    def _check(self) -> "PrecisionConfig":
        if self.fp8_rules and self.fp8 == "none":
            raise ValueError("fp8_rules say which matmuls run in FP8, but fp8 is none; choose a recipe or drop them.")
        return self

    def compute_dtype(self, platform: str) -> str:
        """Return the name of the compute dtype, with the default of the platform (`cpu`, `gpu`, ...) filled in."""
        return self.compute or ("float32" if platform == "cpu" else "bfloat16")

    def path_rules(self, layers_without_fp8: Sequence[int] = ()) -> tuple[tuple[str, bool], ...]:
        """Return rules (weight path pattern, True for FP8) that choose the matmuls in FP8; the first match decides.

        Args:
          layers_without_fp8: layers that stay in the compute dtype unless `fp8_rules` name them.
        """
        own = ((rule.path, rule.fp8) for rule in self.fp8_rules)
        plain = ((f"^decoder/layers/{number}/", False) for number in layers_without_fp8)
        return (*own, *plain, (_PROJECTIONS, True), (".*", False))


def _has_recipe(name: str, precision: PrecisionConfig) -> bool:
    return precision.fp8 == name


FEATURES = (
    *(
        Feature(
            f"FP8 ({name})",
            "precision",
            functools.partial(_has_recipe, name),
            (f"precision.fp8={name}",),
        )
        for name in ("current", "delayed", "blockwise")
    ),
    Feature(
        "bfloat16 computation",
        "precision",
        lambda precision: precision.compute == "bfloat16",
        ("precision.compute=bfloat16",),
    ),
    Feature(
        "bfloat16 reduction",
        "precision",
        lambda precision: precision.reduce == "bfloat16",
        ("precision.reduce=bfloat16",),
    ),
)
"""Features of numeric precision, see `jaxstack.config.features`."""


def gather_quantized(
    parameter: nnx.Variable, dtype: jax.typing.DTypeLike, *, blockwise: bool
) -> jax.Array | QuantizedWeight:
    """All-gather a sharded weight as FP8 values for an FP8 matmul; a weight that is not sharded is left unquantized.

    With one scale per tensor, its largest magnitude is reduced over the devices first (a scalar). Scales of blocks are
    gathered with the bytes. A weight whose shards are not whole blocks is gathered in `dtype`.

    Args:
      parameter: a weight whose metadata has its `logical_axes` and `contracted`, the number of its summed dims.
      dtype: compute dtype, in which a weight is gathered that is not quantized.
      blockwise: scale blocks of 128 x 128 values instead of the whole tensor.
    """
    context = current_context()
    known = parameter.get_metadata()
    own = parameter.get_raw_value()
    is_working_copy = isinstance(own, WorkingCopy)
    own = own.copy if isinstance(own, WorkingCopy) else own
    names = known.get("logical_axes")
    shape = tuple(known.get("whole_shape", own.shape))
    if context is None or not dims_of(context.parameter_spec(names, shape), context.rules.weight_axes):
        # The FP8 matmul quantizes the stored values. Converting them to `dtype` first would write a copy for nothing.
        return gather_parameter(parameter, dtype if is_working_copy else None)
    carrier = gather_parameter(parameter, dtype)
    own = jax.lax.stop_gradient(own).astype(dtype)
    if blockwise:
        found = _gather_blocks(own, context, names, shape, known.get("contracted", 1))
    else:
        found = _gather_whole(own, context, names, shape)
    return carrier if found is None else QuantizedWeight(carrier, found)


def _gather_whole(own: jax.Array, context: ShardingContext, names: Names | None, shape: tuple[int, ...]) -> Quantized:
    """Quantize a weight with one scale, equal on every device, and all-gather the FP8 values."""
    rules = context.rules
    spec = context.parameter_spec(names, shape)
    if "fsdp" in rules.manual:
        ((axes, dim),) = dims_of(spec, rules.weight_axes)
        amax = jax.lax.pmax(absolute_maximum(own), axes)
        values, inverse_scale = quantize(own, E4M3, amax)

        def whole_shard(x: jax.Array) -> jax.Array:
            return gather(x, axes, dim, peer_copies=context.layout.peer_copies)

        return Quantized(on_tensor_shards(whole_shard, spec, rules)(values), inverse_scale)
    stored = restrict(spec, rules.free)
    whole = restrict(spec, set(rules.free) - set(rules.weight_axes))
    # Both constraints are needed, as for a plain all-gather: without them XLA moves the values before it rounds them.
    values, inverse_scale = quantize(jax.lax.with_sharding_constraint(own, placed(rules, stored)), E4M3)
    for layout in (stored, whole):
        values = jax.lax.with_sharding_constraint(values, placed(rules, layout))
    return Quantized(values, inverse_scale)


def _gather_blocks(
    own: jax.Array, context: ShardingContext, names: Names | None, shape: tuple[int, ...], contracted: int
) -> Quantized | None:
    """Quantize a weight's shard in blocks and all-gather values and scales; None if the shard is not whole blocks."""
    rules = context.rules
    ((axes, dim),) = dims_of(context.parameter_spec(names, shape), rules.weight_axes)
    if "fsdp" not in rules.manual or rules.xla_splits("tensor") or dim not in (0, contracted):
        return None
    matrix = own.reshape(math.prod(own.shape[:contracted]), -1)
    axis = 0 if dim < contracted else 1
    if matrix.shape[axis] % BLOCK:
        return None
    values, inverse_scale = (
        gather(x, axes, axis, peer_copies=context.layout.peer_copies) for x in quantize_weight(matrix)
    )
    return Quantized(values.reshape(shape), inverse_scale)


class ScalingState(nnx.Variable):
    """State of delayed FP8 scaling: past largest magnitudes of input, weight and gradient, float32 [..., 3, history].

    `history` is the number of steps, the newest first. The cotangent of the state is this step's magnitudes.

    The step combines the magnitudes over microbatches and devices by maximum and replaces the state
    (`update_scaling`); no optimizer sees it.
    """


@dataclasses.dataclass(frozen=True)
class Fp8Matmul:
    """A replacement for `dot_general` that computes in FP8, and can multiply one input by several weights."""

    recipe: str
    gradients: str = "e5m2"

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: jax.lax.DotDimensionNumbers,
        **options: Any,
    ) -> jax.Array:
        """Multiply as `jax.lax.dot_general` does; see `pallas_kernels.fp8_dot_general` for the options."""
        return fp8_dot_general(lhs, rhs, dimension_numbers, recipe=self.recipe, gradients=self.gradients, **options)

    def together(
        self,
        x: jax.Array | NormalisedInput,
        kernels: Sequence[jax.Array | QuantizedWeight],
        contracted: int,
        states: Sequence[jax.Array | None],
    ) -> tuple[jax.Array, ...]:
        """Multiply x [rows, in] by several kernels [in, out] in FP8, quantizing x once for all of them.

        `in` represents the last `contracted` dims of x, and the first ones of each kernel.
        """
        return fp8_multiply(
            x, kernels, contracted=contracted, recipe=self.recipe, gradients=self.gradients, states=states
        )

    def swiglu_mlp(
        self,
        x: jax.Array | NormalisedInput,
        kernels: Sequence[jax.Array | QuantizedWeight],
        states: Sequence[jax.Array | None],
    ) -> jax.Array:
        """Compute the MLP swiglu(x @ gate, x @ up) @ down in FP8, for x [rows, in] and kernels (gate, up, down)."""
        return fp8_swiglu_mlp(x, *kernels, recipe=self.recipe, gradients=self.gradients, states=states)

    def gather(self, parameter: nnx.Variable, dtype: jax.typing.DTypeLike) -> jax.Array | QuantizedWeight:
        """Return a stored weight as an operand of this matmul; a weight sharded over `fsdp` is all-gathered in FP8."""
        return gather_quantized(parameter, dtype, blockwise=self.recipe == "blockwise")


def use_fp8(
    module: nnx.Module, choose: Callable[[tuple[Any, ...]], Fp8Matmul | None], *, history: int = 16
) -> nnx.Module:
    """Replace the matmuls of chosen dense layers (layers with a `dot_general` attribute) by FP8 matmuls.

    Args:
      module: changed in place, and returned.
      choose: path of a dense layer (attribute names and indices) -> its matmul, or None to leave it as it is.
      history: number of past steps for delayed scaling; only `jaxstack.models.linear.Linear` can store its state.
    """
    dense: list[Any] = [(path, node) for path, node in nnx.iter_modules(module) if hasattr(node, "dot_general")]
    for path, layer in dense:
        matmul = choose(path)
        if matmul is None:
            continue
        layer.dot_general = matmul
        layer.kernel.set_metadata(matmul=matmul, contracted=getattr(layer, "contracted", 1))
        if matmul.recipe == "delayed":
            stacked = layer.kernel.get_metadata().get("logical_axes", ())[:1] == ("layers",)
            state = empty_fp8_state(history)
            state = jnp.broadcast_to(state, (layer.kernel.shape[0], *state.shape)) if stacked else state
            layer.scaling = ScalingState(state, logical_axes=("layers", None, None) if stacked else (None, None))
    return module


def update_scaling(state: PyTree, maxima: PyTree) -> PyTree:
    """Return the next states of delayed FP8 scaling, from the current ones and this step's largest magnitudes.

    Both are trees of one structure; the magnitudes are the cotangents of the states.
    """
    chex.assert_trees_all_equal_shapes(state, maxima)
    return jax.tree.map(updated_fp8_state, state, maxima)
