"""Quantization-aware training with learned scales, which is also called learned step size quantization (LSQ).

The train state stores a float32 scale for each group of inputs with the weight, and both are trained (Esser et al.
2020, arXiv:1902.08153).
"""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxstack.compress.base import Stored, straight_through, training_feature
from jaxstack.compress.formats.integer_grid import IntegerGrid, Rtn, TrainedIntegers
from jaxstack.compress.matrix import MatrixLayout
from jaxstack.config.features import Feature
from pallas_kernels.weight_only.packed import PackedWeight, pack_integers
from pallas_kernels.weight_only.rounding_grid import Grid


class LsqRule(TrainedIntegers):
    """Trains with weights rounded to symmetric integers, and trains the scale of each group of inputs too.

    The scales start where the squared error of rounding is smallest, so that training starts exactly at the values of a
    model that GPTQ has rounded to the same grid. `jaxstack compress` with the method `rtn` and `scales: fitted` packs
    the trained weights exactly.
    """

    features: ClassVar[tuple[Feature, ...]] = (training_feature("learned step sizes (LSQ)", "lsq", "group_size: 8"),)
    method: Literal["lsq"] = "lsq"

    @property
    def format(self) -> IntegerGrid:
        return IntegerGrid(self.grid, fitted=True)

    @property
    def title(self) -> str:
        group = "one learned scale an output" if self.group_size is None else f"learned scales of {self.group_size}"
        return f"quantized to int{self.bits} ({group})"

    @property
    def after_training(self) -> Rtn:
        return Rtn(path=self.path, bits=self.bits, group_size=self.group_size, scales="fitted")

    def stored_parts(self, layout: MatrixLayout) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
        outputs, inputs = layout.size
        stack = layout.stack_shape
        stacked, of_outputs, of_inputs = layout.matrix_axes
        return {
            "weight": ((*stack, outputs, inputs), (*stacked, of_outputs, of_inputs)),
            "scale": ((*stack, outputs, self.grid.groups(inputs)), (*stacked, of_outputs, None)),
        }

    def store(self, w: jax.Array, layout: MatrixLayout) -> Stored:
        matrices = layout.to_matrices(w)
        return {"weight": matrices, "scale": self.grid.fitted_scales(matrices)}

    def use(self, stored: Stored, layout: MatrixLayout, choice: Int[Array, "*stack"] | None) -> jax.Array:
        del choice
        return self.export(stored, layout)

    def export(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        return layout.from_matrices(round_with_scales(stored["weight"], stored["scale"], self.grid))

    def master(self, stored: Stored, layout: MatrixLayout) -> jax.Array:
        """Return the rounded weight, because a dense weight has no place for the scales."""
        return self.export(stored, layout)

    def keep(self, old: Stored, new: Stored) -> Stored:
        """Limit what an optimizer step changes: it at most halves a scale, so that scales stay positive."""
        return {**new, "scale": jnp.maximum(new["scale"], old["scale"] / 2)}

    def pack(self, stored: Stored) -> PackedWeight:
        scales = stored["scale"].astype(jnp.bfloat16)
        q = self.grid.quantize(stored["weight"], scales.astype(jnp.float32))
        return pack_integers(self.grid, q, scales)

    def kept(self, stored: Stored, layout: MatrixLayout) -> Int[Array, ""]:
        return super().kept(stored["weight"], layout)


def round_with_scales(
    w: Float[Array, "*stack out in"], scales: Float[Array, "*stack out groups"], grid: Grid
) -> Float[Array, "*stack out in"]:
    """Round weights to an integer grid with given scales; differentiable in both (LSQ, arXiv:1902.08153).

    The gradient passes the rounding of weights to integers and of scales to bfloat16 unchanged. It does not pass
    clipping: that of a clipped weight is 0. Where a scale is 0, as in the rows that pad a pipeline's stages, so are the
    weights.
    """
    scales = straight_through(scales, scales.astype(jnp.bfloat16).astype(jnp.float32))[..., None]
    steps = jnp.clip(w.reshape(*scales.shape[:-1], -1) / jnp.where(scales == 0, 1, scales), *grid.limits)
    return (straight_through(steps, jnp.round(steps)) * scales).reshape(w.shape)
