"""AWQ: scales inputs so that the weights of large activations are rounded more precisely, then rounds.

For a product W x and scales s of the inputs, (W diag(s)) (x / s) is the same; the division is folded into the layer
that computes x, so that it costs nothing. Rounding W diag(s) instead of W is more precise for inputs with large s (AWQ;
Lin et al. 2023, arXiv:2306.00978).

Weights are matrices W [out, in].
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxstack.compress.base import (
    AfterTraining,
    CalibrationBlock,
    InputStatistics,
    LayerStatistics,
    Statistic,
    Sublayer,
)
from jaxstack.compress.formats.integer_grid import RoundingMethod
from jaxstack.compress.matrix import MatrixLayout
from jaxstack.models.attention.latent import LatentAttention
from jaxstack.models.config import ModelConfig
from jaxstack.models.norm import NORMS
from pallas_kernels.weight_only.rounding_grid import Grid

POINTS = 20
"""Exponents between 0 and 1 that AWQ tries."""


@dataclasses.dataclass(frozen=True)
class Fold:
    """A norm or dense layer that can absorb the input scales of the dense layers that read its output.

    Attributes:
      source: the layer whose outputs are divided: a norm, or a dense layer.
      targets: the dense layers, or projections of experts, whose inputs are multiplied.
      readers: weights of other layers that read the same inputs, such as the router's, multiplied without rounding.
      sublayer: the sublayer whose output tells how good the scales are; None: the only target's own output.
    """

    source: str
    targets: tuple[str, ...]
    sublayer: Sublayer | None = None
    readers: tuple[str, ...] = ()


class Awq(RoundingMethod, AfterTraining):
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
                stacked = (path for path, layout in block.layouts.items() if layout.stack)
                experts = frozenset(path.removesuffix("/kernel") for path in stacked)
                new = apply_fold(weights, fold, self._best_scales(block, fold), block.config.norm, experts)
                weights.update(new)
                changed.update(new)
        return changed

    def _best_scales(self, block: CalibrationBlock, fold: Fold) -> Float[Array, "*experts in"]:
        """Return the candidate input scales with which rounding changes the layer's output least.

        The layers' own weights are compared, as an earlier fold into them changes no output. Where experts are the only
        target, each has its own scales.
        """
        found = block.statistics[f"{fold.targets[0]}/kernel"]
        kernels = [f"{path}/kernel" for path in fold.targets]
        matrices = [block.layouts[path].to_matrices(block.weights[path]) for path in kernels]
        if fold.sublayer is None and isinstance(found, tuple):
            return jnp.stack([self._scales_of_one(w, own) for w, own in zip(matrices[0], found, strict=True)])
        if fold.sublayer is None:
            assert isinstance(found, InputStatistics)
            return self._scales_of_one(matrices[0], found)
        rows = [w.reshape(-1, w.shape[-1]) for w in matrices]
        candidates = candidate_scales(_mean_magnitude(found), rows, self.group_size)
        change = _RoundScaled(self.grid, tuple((path, block.layouts[path]) for path in kernels))
        errors = block.output_errors(fold.sublayer, change, candidates)
        return candidates[jnp.argmin(errors)]

    def _scales_of_one(self, w: Float[Array, "out in"], statistics: InputStatistics) -> Float[Array, " in"]:
        """Return the candidate input scales with which rounding changes the output of one matrix least."""
        assert statistics.hessian is not None
        candidates = candidate_scales(_mean_magnitude(statistics), [w], self.group_size)
        return candidates[jnp.argmin(rounding_errors(w, candidates, statistics.hessian, self.grid))]


def _mean_magnitude(statistics: LayerStatistics) -> Float[Array, " in"]:
    """Return the mean magnitude of each input of a dense layer; for experts that over the inputs of all."""
    each = statistics if isinstance(statistics, tuple) else (statistics,)
    counts = jnp.asarray([one.count for one in each], jnp.float32)
    return _weighted_mean(counts, [cast(jax.Array, one.mean_abs) for one in each])


@jax.jit
def _weighted_mean(counts: Float[Array, " n"], values: Sequence[Float[Array, " in"]]) -> Float[Array, " in"]:
    return counts @ jnp.stack(values) / jnp.maximum(counts.sum(), 1.0)


@dataclasses.dataclass(frozen=True)
class _RoundScaled:
    """Function of candidate input scales that returns a layer's weights rounded with them, to measure the error."""

    grid: Grid
    kernels: tuple[tuple[str, MatrixLayout], ...]

    def __call__(self, weights: Mapping[str, jax.Array], candidate: Float[Array, " in"]) -> dict[str, jax.Array]:
        changed = {}
        for path, layout in self.kernels:
            changed[path] = layout.map(lambda w: round_scaled(w, candidate, self.grid), weights[path])
        return changed


def find_folds(config: ModelConfig, names: Mapping[str, object]) -> list[Fold]:
    """Return the norms and dense layers of a Transformer layer that can absorb input scales of the layers they feed.

    Queries, keys and values are left out where heads are normalized: there AWQ has been found to be worse than plain
    rounding. The output projection is left out where several query heads share the channels of one value head.

    Args:
      config: the model.
      names: the layer's weights by path.
    """
    folds: list[Fold] = []
    if config.pre_norms and not config.qk_norm and not isinstance(config.attention, LatentAttention):
        targets = tuple(f"attention/{name}_proj" for name in ("q", "k", "v"))
        folds.append(Fold("attention_norm", targets, "attention"))
    if config.kv_heads == config.num_heads and config.attention.name == "softmax":
        folds.append(Fold("attention/v_proj", ("attention/o_proj",)))
    parts = [part for part in ("mlp", "mlp/shared_experts") if f"{part}/up_proj/kernel" in names]
    first = [f"{part}/{name}" for part in parts for name in ("gate_proj", "up_proj")]
    readers = tuple(path for path in ("mlp/router", "mlp/shared_gate") if f"{path}/kernel" in names)
    if config.pre_norms and first:
        targets = tuple(path for path in first if f"{path}/kernel" in names)
        folds.append(Fold("mlp_norm", targets, "mlp", readers))
    for part in parts:
        # The gate's activation is not linear, the other factor is, unless it is clamped.
        clamped = config.moe is not None and config.moe.swiglu_limit is not None and "mlp/router" in readers
        if f"{part}/gate_proj/kernel" in names and not (part == "mlp" and clamped):
            folds.append(Fold(f"{part}/up_proj", (f"{part}/down_proj",)))
    return folds


@functools.partial(jax.jit, static_argnames=("fold", "norm", "experts"))
def apply_fold(
    weights: Mapping[str, jax.Array],
    fold: Fold,
    scales: Float[Array, "*experts in"],
    norm: str,
    experts: frozenset[str] = frozenset(),
) -> dict[str, jax.Array]:
    """Return new weights by path: those of `fold.targets` multiplied by input scales, those of `fold.source` divided.

    Args:
      weights: the layer's weights by path; kernels are [*in, *out].
      fold: what is divided, and what is multiplied.
      scales: factors of the targets' inputs; [experts, in] if each expert has its own.
      norm: `ModelConfig.norm`.
      experts: paths among them whose kernels are those of experts, [experts, in, out].
    """
    changed: dict[str, jax.Array] = {}
    for path in (*fold.targets, *fold.readers):
        kernel = weights[f"{path}/kernel"]
        changed[f"{path}/kernel"] = kernel * scales[..., None] if path in experts else scale_inputs(kernel, scales)
    name = f"{fold.source}/scale"
    if name in weights:
        offset = getattr(NORMS[norm], "offset", 0.0)
        changed[name] = (weights[name] + offset) / scales - offset
    else:
        name = f"{fold.source}/kernel"
        # Experts with their own scales divide their own outputs.
        divisor = scales[:, None] if fold.source in experts else scales
        changed[name] = (weights[name].reshape(*divisor.shape[:-2], -1, scales.shape[-1]) / divisor).reshape(
            weights[name].shape
        )
    bias = f"{fold.source}/bias"
    if bias in weights:
        changed[bias] = weights[bias] / scales.reshape(weights[bias].shape)
    return changed


def scale_inputs(kernel: Float[Array, "..."], scales: Float[Array, " in"]) -> Float[Array, "..."]:
    """Return a kernel [*in, *out] multiplied by a scale for each input: diag(scales) @ kernel."""
    return (kernel.reshape(len(scales), -1) * scales[:, None]).reshape(kernel.shape)


@functools.partial(jax.jit, static_argnames="group_size")
def candidate_scales(
    mean_abs: Float[Array, " in"], matrices: Sequence[Float[Array, "_ in"]], group_size: int | None
) -> Float[Array, "n in"]:
    """Return the input scales among which AWQ chooses, one candidate per row; the last row is all ones (no scaling).

    They are x^r / (w^(1-r) + 1e-4), divided by the root of the product of their extremes, for `POINTS` exponents r; x
    is the mean magnitude of an input, w that of its weights, relative to the largest one in their groups.

    Args:
      mean_abs: mean |x| of each input.
      matrices: weights of all layers that read the inputs.
      group_size: inputs that share a scale of the grid; None: all of a row.
    """
    w = jnp.abs(jnp.concatenate(matrices).astype(jnp.float32))
    groups = w.reshape(len(w), -1, group_size or w.shape[1])
    largest = jnp.max(groups, axis=-1, keepdims=True)
    w_mean = jnp.mean((groups / jnp.where(largest > 0, largest, 1.0)).reshape(w.shape), axis=0)
    ratios = jnp.linspace(0.0, 1.0, POINTS)[:, None]
    scales = jnp.maximum(mean_abs**ratios / (w_mean ** (1 - ratios) + 1e-4), 1e-4)
    scales = scales / jnp.sqrt(scales.max(axis=1, keepdims=True) * scales.min(axis=1, keepdims=True))
    return jnp.concatenate([scales, jnp.ones((1, w.shape[1]), jnp.float32)])


def round_scaled(w: Float[Array, "out in"], scales: Float[Array, " in"], grid: Grid) -> Float[Array, "out in"]:
    """Return round(w * scales) / scales: the weights rounded to the grid after scaling each input column."""
    return grid.round(w.astype(jnp.float32) * scales) / scales


@functools.partial(jax.jit, static_argnames="grid")
def rounding_errors(
    w: Float[Array, "out in"], candidates: Float[Array, "n in"], hessian: Float[Array, "in in"], grid: Grid
) -> Float[Array, " n"]:
    """Return for each candidate the squared error of W x, up to a common factor, from rounding W with its input scales.

    Args:
      w: weights.
      candidates: from `candidate_scales`.
      hessian: sum of x x^T up to a factor, float32.
      grid: the grid of the rounding.
    """

    def error(scales: jax.Array) -> jax.Array:
        change = round_scaled(w, scales, grid) - w
        return jnp.sum(change * jnp.matmul(change, hessian, precision=jax.lax.Precision.HIGHEST))

    return jax.lax.map(error, candidates)
