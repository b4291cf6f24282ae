"""Inputs of a mixture's experts: the rows that the router sends to each, and sums over them.

Dims: B batch, T sequence, D model, E experts, k experts per token, R rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.compress.base import Statistic
from jaxstack.models.block import Block
from jaxstack.models.layer import Context
from jaxstack.models.moe.exchange import group_of_rows
from jaxstack.models.moe.router import RouterSums
from jaxstack.models.moe_layer import MoE
from jaxstack.models.norm import LayerInput, gradient_carrier
from pallas_kernels.grouped_gemm.xla import Tiles


def mixtures(block: nnx.Module) -> dict[str, MoE]:
    """Return the mixtures of experts of a Transformer layer by path, such as `mlp`."""
    return {"/".join(map(str, path)): node for path, node in nnx.iter_modules(block) if isinstance(node, MoE)}


class RoutedTokens(NamedTuple):
    """Inputs of a mixture of experts, and the experts that its router chooses for each token."""

    inputs: Float[Array, "B T D"]
    experts: Int[Array, "B T k"]


def route_tokens(block: Block, path: str, x: Float[Array, "B T D"], context: Context) -> RoutedTokens:
    """Return the inputs of the mixture at `path` of a layer, and its choice. The block is modified, so discard it.

    Experts that would drop a token for their capacity count as chosen.
    """
    *parents, name = path.split("/")
    parent: Any = block
    for key in parents:
        parent = getattr(parent, key)
    found: list[RoutedTokens] = []
    setattr(parent, name, _RecordedMixture(getattr(parent, name), found))
    block(x, context)
    return found[0]


class _RecordedMixture(MoE):
    """A mixture that also records its inputs and the experts that its router chooses.

    Args:
      found: receives them.
    """

    def __init__(self, mixture: MoE, found: list[RoutedTokens]):
        self.mixture = mixture
        self.record = found.append

    def __call__(self, x: LayerInput, **options: Any) -> tuple[Float[Array, "B T D"], RouterSums]:
        y, sums = self.mixture(x, **options)
        assert sums.experts is not None
        self.record(RoutedTokens(gradient_carrier(x), sums.experts))
        return y, sums


class ExpertRows(NamedTuple):
    """Input rows of a projection of experts, sorted by expert."""

    rows: Float[Array, "R in"]
    """The rows; those between the groups are 0."""
    sizes: Int[Array, " E"]
    """Rows of each expert."""
    alignment: int
    """The group of each expert starts at a multiple of it."""


def expert_rows(mixture: MoE, tokens: RoutedTokens) -> dict[str, ExpertRows]:
    """Return the input rows of each projection of a mixture's experts, by its name such as `down_proj`.

    The rows of `down_proj` have the router's weights, as they are multiplied by them before the product. The mixture is
    modified, so discard it.
    """
    found: dict[str, ExpertRows] = {}
    for name in ("up_proj", "gate_proj", "down_proj"):
        if (projection := getattr(mixture, name)) is not None:
            projection.product = _RecordedProduct(projection.product, found, name)
    mixture(tokens.inputs, decoding=True, experts=tokens.experts)
    return found


class _RecordedProduct:
    """A grouped matmul that also records its rows under a name."""

    def __init__(self, product: Any, found: dict[str, ExpertRows], name: str):
        self._product = product
        self._found = found
        self._name = name

    def __call__(
        self, x: jax.Array, weights: Any, *, group_sizes: jax.Array, alignment: int, **options: Any
    ) -> jax.Array:
        self._found[self._name] = ExpertRows(x, group_sizes, alignment)
        return self._product(x, weights, group_sizes=group_sizes, alignment=alignment, **options)


def expert_sums(rows: ExpertRows, wanted: Sequence[Statistic]) -> Mapping[Statistic, Float[Array, "E ..."]]:
    """Return for each expert the `wanted` sums over its rows x: of x x^T, of |x|, or of x^2; float32."""
    x = rows.rows.astype(jnp.float32)
    sums: dict[Statistic, jax.Array] = {}
    if "hessian" in wanted:
        with jax.default_matmul_precision("highest"):
            sums["hessian"] = Tiles(rows.alignment).matrices(x, x, rows.sizes)
    group = group_of_rows(rows.sizes, x.shape[0], rows.alignment)

    def by_expert(values: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, group, rows.sizes.shape[0])

    if "mean_abs" in wanted:
        sums["mean_abs"] = by_expert(jnp.abs(x))
    if "square_sum" in wanted:
        sums["square_sum"] = by_expert(jnp.square(x))
    return sums
