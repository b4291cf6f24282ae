"""Recurrences over sequences that are sharded over a mesh axis: each part is a map of the state before it.

A part of the sequence takes the state S before it to M S + b. Devices gather the maps (M, b) of all parts, and each
composes those before its own parts, of which it has two in the zigzag layout. Nothing else is exchanged but the few
tokens before each part that a convolution reads.

Dims: B batch, T tokens of a device, s parts of a device with t tokens each, n parts of the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from pallas_kernels.attention.context_layout import chunk_order, chunks_per_device

Maps = TypeVar("Maps", bound=PyTree)


@dataclass(frozen=True)
class SequenceShards:
    """The parts of a sequence on the devices of a mesh axis; for use inside `jax.shard_map`.

    Attributes:
        axis_name: mesh axis that the sequence is sharded over.
        layout: "zigzag" or "contiguous", the order in which devices hold the sequence.
    """

    axis_name: str
    layout: str = "zigzag"

    @property
    def count(self) -> int:
        """Number of parts of a device."""
        return chunks_per_device(self.layout)

    def split(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "sB t ..."]:
        """Return this device's parts of each sequence as rows of a batch: all first parts, then all second ones."""
        parts = x.reshape(x.shape[0], self.count, -1, *x.shape[2:])
        return jnp.moveaxis(parts, 1, 0).reshape(-1, *parts.shape[2:])

    def join(self, x: Shaped[Array, "sB t ..."]) -> Shaped[Array, "B T ..."]:
        """Reverse `split`."""
        parts = jnp.moveaxis(x.reshape(self.count, -1, *x.shape[1:]), 0, 1)
        return parts.reshape(parts.shape[0], -1, *x.shape[2:])

    def before(self, x: Shaped[Array, "sB ..."]) -> Shaped[Array, "sB ..."]:
        """Return the value of the part before each one of this device's; zeros for the first part of the sequence."""
        parts = self._gather(x)
        return self._own(jnp.concatenate([jnp.zeros_like(parts[:1]), parts[:-1]]))

    def start_states(
        self,
        advance: Callable[[jax.Array, Maps], jax.Array],
        maps: Maps,
        first: Shaped[Array, "B ..."],
    ) -> Shaped[Array, "sB ..."]:
        """Return the states before this device's parts.

        Args:
            advance: returns the state [B, ...] after a part, given that before it and the part's map.
            maps: the maps of this device's parts, arrays [sB, ...].
            first: the state before the first part of the sequence.
        """

        def step(state: jax.Array, part: Maps) -> tuple[jax.Array, jax.Array]:
            return advance(state, part), state

        gathered = jax.tree.map(self._gather, maps)
        _, starts = lax.scan(step, first, gathered)
        return self._own(starts)

    def _gather(self, x: Shaped[Array, "sB ..."]) -> Shaped[Array, "n B ..."]:
        """Gather the values of all parts, in the order of the sequence."""
        own = x.reshape(self.count, -1, *x.shape[1:])
        order = np.argsort(chunk_order(lax.axis_size(self.axis_name), self.layout))
        return lax.all_gather(own, self.axis_name, axis=0, tiled=True)[order]

    def _own(self, parts: Shaped[Array, "n B ..."]) -> Shaped[Array, "sB ..."]:
        """Select this device's parts."""
        order = jnp.asarray(chunk_order(lax.axis_size(self.axis_name), self.layout)).reshape(-1, self.count)
        own = jnp.take(parts, order[lax.axis_index(self.axis_name)], axis=0)
        return own.reshape(-1, *own.shape[2:])


def continues(shards: SequenceShards, ids: Int[Array, "sB t"]) -> Bool[Array, " sB"]:
    """Return for each part of this device whether its first token is of the document of the token before it."""
    return shards.before(ids[:, -1]) == ids[:, 0]


def tokens_before(
    shards: SequenceShards, x: Shaped[Array, "sB t ..."], count: int, ids: Int[Array, "sB t"] | None
) -> Shaped[Array, "sB count ..."]:
    """Return the `count` tokens before each part, zeros for those of other documents than its first token.

    Args:
        shards: the parts.
        x: values of the tokens of this device's parts; a part has at least `count` of them.
        count: number of tokens.
        ids: segment ids of the tokens, or None.
    """
    tail = shards.before(x[:, -count:])
    if ids is None:
        return tail
    seen = shards.before(ids[:, -count:]) == ids[:, :1]
    return jnp.where(seen.reshape(*seen.shape, *(1,) * (x.ndim - 2)), tail, 0)


def own_documents(ids: Int[Array, "sB t"]) -> tuple[Int[Array, "sB t"], Bool[Array, "sB t"]]:
    """Return the number of each token's document in its part, from 0, and whether the token is padding.

    Padding has documents of its own, also at the beginning of a part, so that no state passes over it.
    """
    changes = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(changes, axis=1, dtype=jnp.int32), ids < 0
