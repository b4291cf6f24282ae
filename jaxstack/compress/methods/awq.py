"""AWQ: scales inputs so that the weights of large activations are rounded more precisely, then rounds."""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxstack.compress.input_scales import Fold, apply_fold, candidate_scales, find_folds, round_scaled, rounding_errors
from jaxstack.compress.methods.base import CalibrationBlock, Compressed, InputStatistics, Statistic
from jaxstack.compress.methods.rounding_base import RoundingMethod
from pallas_kernels.weight_only.packed import pack_nearest
from pallas_kernels.weight_only.rounding_grid import Grid


class Awq(RoundingMethod):
    """Scales a layer's inputs by the magnitude of their activations, then rounds to nearest (arXiv:2306.00978).

    A scale is folded into the norm or the dense layer before, where one such method compresses all layers that read the
    same inputs.
    """

    needs: ClassVar[frozenset[Statistic]] = frozenset({"hessian", "mean_abs"})
    method: Literal["awq"] = "awq"

    def rescaled_weights(self, block: CalibrationBlock) -> Mapping[str, jax.Array]:
        weights = dict(block.weights)
        changed = {}
        for fold in find_folds(block.config, weights):
            if all(block.methods.get(f"{path}/kernel") == self for path in fold.targets):
                new = apply_fold(weights, fold, self._best_scales(block, fold), block.config.norm)
                weights.update(new)
                changed.update(new)
        return changed

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        del statistics
        return pack_nearest(self.grid, w, round_inputs=self.rounds_inputs)

    def _best_scales(self, block: CalibrationBlock, fold: Fold) -> Float[Array, " in"]:
        """Return the candidate input scales with which rounding changes the layer's output least.

        The layers' own weights are compared, as an earlier fold into them changes no output.
        """
        found = block.statistics[f"{fold.targets[0]}/kernel"]
        assert found.mean_abs is not None and found.hessian is not None
        matrices = [_matrix(block.weights[f"{path}/kernel"], len(found.mean_abs)) for path in fold.targets]
        candidates = candidate_scales(found.mean_abs, matrices, self.group_size)
        if fold.sublayer is None:
            errors = rounding_errors(matrices[0], candidates, found.hessian, self.grid)
        else:
            errors = block.output_errors(fold.sublayer, _RoundScaled(self.grid, fold.targets), candidates)
        return candidates[jnp.argmin(errors)]


@dataclasses.dataclass(frozen=True)
class _RoundScaled:
    """Function of candidate input scales that returns a layer's weights rounded with them, to measure the error."""

    grid: Grid
    targets: tuple[str, ...]

    def __call__(self, weights: Mapping[str, jax.Array], candidate: Float[Array, " in"]) -> dict[str, jax.Array]:
        changed = {}
        for path in self.targets:
            kernel = weights[f"{path}/kernel"]
            rounded = round_scaled(_matrix(kernel, len(candidate)), candidate, self.grid)
            changed[f"{path}/kernel"] = rounded.T.reshape(kernel.shape)
        return changed


def _matrix(kernel: Float[Array, "..."], inputs: int) -> Float[Array, "out in"]:
    return kernel.reshape(inputs, math.prod(kernel.shape) // inputs).T
