"""From a path to the `dot_general` of a dense layer, and the scaling state that goes with it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

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
    """Largest magnitudes of the last steps, float32 [..., 3, history]; what stands for its gradient are new ones.

    A step combines these over microbatches and devices by maximum and replaces the state (`renewed`); no optimizer
    sees it.
    """


@dataclasses.dataclass(frozen=True)
class Fp8Matmul:
    """A `dot_general` in FP8, which can also multiply one input with several weights."""

    recipe: str
    gradients: str = "e5m2"

    def __call__(self, lhs: jax.Array, rhs: Any, dimension_numbers: Any, **options: Any) -> jax.Array:
        """As `jax.lax.dot_general`; see `pallas_kernels.fp8_dot_general`."""
        return fp8_dot_general(lhs, rhs, dimension_numbers, recipe=self.recipe, gradients=self.gradients, **options)

    def together(
        self,
        x: jax.Array | NormalisedInput,
        kernels: Sequence[Any],
        contracted: int,
        states: Sequence[jax.Array | None],
    ) -> tuple[jax.Array, ...]:
        """x [rows, in] times each kernel [in, out], where `in` stands for so many dims; x is quantised once."""
        return fp8_multiply(
            x, kernels, contracted=contracted, recipe=self.recipe, gradients=self.gradients, states=states
        )

    def swiglu_mlp(
        self, x: jax.Array | NormalisedInput, kernels: Sequence[Any], states: Sequence[jax.Array | None]
    ) -> jax.Array:
        """swiglu(x @ gate, x @ up) @ down of x [rows, in] and these three kernels."""
        return fp8_swiglu_mlp(x, *kernels, recipe=self.recipe, gradients=self.gradients, states=states)

    def gather(self, parameter: nnx.Variable, dtype: Any) -> jax.Array | QuantizedWeight:
        """A stored weight as the computation wants it; where it is gathered over `fsdp`, as FP8 bytes."""
        return gather_quantized(parameter, dtype, blockwise=self.recipe == "blockwise")


def use_fp8(
    module: nnx.Module, choose: Callable[[tuple[Any, ...]], Fp8Matmul | None], *, history: int = 16
) -> nnx.Module:
    """Gives the dense layers of a module their `dot_general`; works on any layer with such an attribute.

    Args:
      module: changed in place, and returned.
      choose: path of a dense layer (attribute names and indices) -> its matmul, or None to leave it as it is.
      history: steps that delayed scaling looks back; only `jaxstack.models.linear.Linear` can keep its state.
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


def renewed(state: Any, maxima: Any) -> Any:
    """The next step's scaling states, from this step's and the maxima that came as their gradients; trees."""
    return jax.tree.map(updated_fp8_state, state, maxima)
