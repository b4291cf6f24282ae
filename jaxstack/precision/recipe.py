"""Replaces the matmuls of chosen dense layers by FP8 matmuls, and keeps the state of delayed scaling."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from jaxstack.precision.gather import gather_quantized
from pallas_kernels import (
    NormalisedInput,
    QuantizedWeight,
    empty_fp8_state,
    fp8_dot_general,
    fp8_multiply,
    fp8_swiglu_mlp,
    updated_fp8_state,
)


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

        `in` stands for the last `contracted` dims of x, and the first ones of each kernel.
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
