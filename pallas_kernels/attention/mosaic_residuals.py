"""Types that the backward kernels of attention for Hopper share: their inputs, and the work of one program."""

from typing import NamedTuple

import jax

from pallas_kernels.attention.mosaic_config import Visits
from pallas_kernels.mosaic_api import Index, Ref

NO_KEY = 1e30
"""The log-sum-exp of a query without a visible key: every weight becomes exp2(score - 1e30) = 0."""

Weighed = tuple[jax.Array, jax.Array | None]
"""Softmax weights of a tile, and the capped scores if there is a soft cap."""


class Residuals(NamedTuple):
    """Inputs of the attention backward kernels: q, k, v, dO, log-sum-exp and delta.

    The last two are padded to whole blocks of queries; TMA reads the others as zero beyond their ends.

    Attributes:
        q: [B, T, N, H], at least one block of queries.
        k: [B, S, K, H], at least one block of keys.
        v: [B, S, K, H].
        d_out: [B, T, N, H].
        lse: Log-sum-exp in base 2, [B, N, T]; `NO_KEY` for queries without a visible key.
        delta: Row sums of out * d_out less the gradient of the log-sum-exp, [B, N, T].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array
    lse: jax.Array
    delta: jax.Array


class Inputs(NamedTuple):
    """Input arrays of the attention backward kernels, in global memory: the fields of `Residuals`."""

    q: Ref
    k: Ref
    v: Ref
    d_out: Ref
    lse: Ref
    delta: Ref


class Place(NamedTuple):
    """Work of one program: the block of queries (or keys) whose gradients it computes, and the tiles that it visits."""

    batch: Index
    head: Index
    first: Index
    visits: Visits
