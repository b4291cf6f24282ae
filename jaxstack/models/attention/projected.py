"""Linformer's projection of keys and values along the length, in blocks, so that it is causal."""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field, PrivateAttr

from jaxstack.models.attention.base import AttentionKind, AttentionSpec, CacheSlots
from jaxstack.models.attention.key_cache import KeyCache, attend_to, empty_cache, extend, store
from jaxstack.parallel import shard
from pallas_kernels import flash_attention, sequence_order

if TYPE_CHECKING:
    from jaxstack.models.config import ModelConfig

_NOBODY = -(2**31)
"""Segment id of summaries that a query must not see."""


class _Summaries(NamedTuple):
    """Keys and values of all blocks, projected."""

    key: jax.Array  # [B, M, R, K, H], M blocks of R summaries
    value: jax.Array  # [B, M, R, K, H]
    ids: jax.Array  # [B, M] int32, the document that each block's summaries are of


class ProjectedCache(NamedTuple):
    """The tokens of the newest block, and the sums that the summaries of all blocks are so far."""

    block: KeyCache
    summaries: KeyCache
    """[B, K, M, R, H] float32 each."""


class ProjectedAttention(AttentionKind):
    """Softmax attention to the tokens of the query's block, causal, and to summaries of all blocks before it.

    A summary is a learned sum of the block's keys, or values, as in Linformer (Wang et al. 2020) with a projection that
    all heads share. There the projection is of the whole sequence, which is not causal: every summary holds later
    tokens. Here it is of a block at a time, the same for all blocks, so that it serves sequences of any length. With
    packed documents a block's summary is of the document that its last token belongs to, which is the only one that
    goes on. Blocks lie over the row.

    With context parallelism the summaries of each device's blocks are computed there and summed over all (Li et al.
    2021, arXiv:2105.13120): what is sent does not depend on the block's size, and no key is.
    """

    name: Literal["projected"] = "projected"
    block_size: int = Field(default=256, ge=1)
    """Tokens of a block, all of which its queries see as far as they are not later."""
    summaries: int = Field(default=16, ge=1)
    """Projected keys, and values, of a block."""
    _weight: Any = PrivateAttr(default=None)

    def make_weight(self, heads: AttentionSpec, rngs: nnx.Rngs) -> nnx.Param:
        """[2, block_size, summaries] for keys and values, started so that summaries vary as keys do."""
        shape = (2, self.block_size, self.summaries)
        value = jax.random.normal(rngs.params(), shape, jnp.float32) * self.block_size**-0.5
        return nnx.Param(value, logical_axes=(None, "position", None))

    def bound(self, *weight: jax.Array) -> Self:
        kind = self.model_copy()
        kind._weight = weight[0]
        return kind

    def count_weight(self) -> int:
        return 2 * self.block_size * self.summaries

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, heads: AttentionSpec
    ) -> jax.Array:
        q, k, v, ids, length = self._whole_blocks(q, k, v, segment_ids)
        numbers = jnp.arange(q.shape[1] // self.block_size)
        return self._attend(q, k, v, ids, self._summarise(k, v, ids), numbers, heads)[:, :length]

    def attend_over(
        self,
        axis_name: str,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None,
        heads: AttentionSpec,
    ) -> jax.Array:
        ids = jnp.zeros(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
        devices, blocks = jax.lax.axis_size(axis_name), q.shape[1] // self.block_size
        order = jnp.asarray(sequence_order(devices * blocks, devices))
        numbers = jax.lax.dynamic_slice_in_dim(order, jax.lax.axis_index(axis_name) * blocks, blocks)

        def join(x: jax.Array) -> jax.Array:
            everyone = jnp.zeros((x.shape[0], devices * blocks, *x.shape[2:]), x.dtype)
            return jax.lax.psum(everyone.at[:, numbers].set(x), axis_name)

        summaries = _Summaries(*(join(x) for x in self._summarise(k, v, ids)))
        return self._attend(q, k, v, ids, summaries, numbers, heads)

    def exchanges_heads(self, method: str | None) -> bool:
        return False

    def context_problem(self, method: str | None) -> str | None:
        if method is None:
            return None
        return f"attention.name projected sums its summaries over the devices; leave context_method ({method}) out."

    def length_problem(self, chunk: int) -> str | None:
        if chunk % self.block_size == 0:
            return None
        return f"attention.block_size ({self.block_size}) must divide the chunk of a device ({chunk})"

    def check(self, model: "ModelConfig") -> None:
        if "sliding_attention" in model.layer_types:
            super().check(model)

    def make_cache(self, heads: AttentionSpec, batch: int, length: int, dtype: Any) -> ProjectedCache:
        shape = (batch, heads.num_kv_heads, -(-length // self.block_size), self.summaries, heads.head_dim)
        names = ("batch", "act_kv_heads", None, None, "act_head_dim")
        summaries = KeyCache(*(shard(jnp.zeros(shape, jnp.float32), *names) for _ in range(2)))
        return ProjectedCache(empty_cache(heads, batch, min(length, self.block_size), dtype), summaries)

    def store(
        self, k: jax.Array, v: jax.Array, cache: ProjectedCache, slots: CacheSlots, heads: AttentionSpec
    ) -> ProjectedCache:
        return ProjectedCache(store(cache.block, k, v, slots.seen_after), self._summed(cache.summaries, k, v, slots))

    def decode(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: ProjectedCache, slots: CacheSlots, heads: AttentionSpec
    ) -> tuple[jax.Array, ProjectedCache]:
        block, near, positions = extend(cache.block, k, v, slots)
        summaries = self._summed(cache.summaries, k, v, slots)
        blocks = jnp.arange(summaries.key.shape[2] * self.summaries) // self.summaries
        of_query = (slots.queries // self.block_size)[:, :, None]
        same_block = of_query == (positions // self.block_size)[:, None]
        causal = (positions >= 0)[:, None] & (positions[:, None] <= slots.queries[:, :, None])
        visible = jnp.concatenate([blocks < of_query, same_block & causal], axis=2)

        def joined(summary: jax.Array, token: jax.Array) -> jax.Array:
            flat = summary.reshape(*summary.shape[:2], -1, summary.shape[-1])
            return jnp.concatenate([flat.astype(token.dtype), token], axis=2)

        seen = KeyCache(*(joined(*pair) for pair in zip(summaries, near, strict=True)))
        return attend_to(q, seen, visible, heads), ProjectedCache(block, summaries)

    def flops_per_token(self, heads: AttentionSpec, length: int) -> float:
        """Of the keys and summaries seen on average, and of the projection."""
        near = min(self.block_size, length) / 2
        far = self.summaries * max(0.0, length / self.block_size - 1) / 2
        attention = 12.0 * (near + far) * heads.num_heads * heads.head_dim
        return attention + 12.0 * self.summaries * heads.num_kv_heads * heads.head_dim

    def _whole_blocks(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, int]:
        """The arrays, filled up to whole blocks, and the length before."""
        length = q.shape[1]
        ids = jnp.zeros(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
        missing = -length % self.block_size
        q, k, v = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in (q, k, v))
        return q, k, v, jnp.pad(ids, ((0, 0), (0, missing)), mode="edge"), length

    def _summarise(self, k: jax.Array, v: jax.Array, ids: jax.Array) -> _Summaries:
        """Of each block of the arrays the summaries of its last document."""
        in_blocks = ids.reshape(ids.shape[0], -1, self.block_size)
        last = in_blocks[:, :, -1]
        counts = (in_blocks == last[:, :, None]).astype(k.dtype)

        def project(x: jax.Array, weight: jax.Array) -> jax.Array:
            x = x.reshape(*in_blocks.shape, *x.shape[2:]) * counts[..., None, None]
            return jnp.einsum("bmtkh,tr->bmrkh", x, weight.astype(x.dtype))

        return _Summaries(project(k, self._weight[0]), project(v, self._weight[1]), last)

    def _attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        ids: jax.Array,
        summaries: _Summaries,
        numbers: jax.Array,
        heads: AttentionSpec,
    ) -> jax.Array:
        """Each block, whose numbers in the sequence are given, to the summaries before it and to itself.

        Blocks are rows of one batch: a query's summaries stand before the keys of its block: the mask is causal.
        """
        batch, blocks = q.shape[0], numbers.size
        everyone = summaries.ids.shape[1]
        earlier = jnp.arange(everyone)[None] < numbers[:, None]

        def rows(x: jax.Array) -> jax.Array:
            return x.reshape(batch * blocks, self.block_size, *x.shape[2:])

        def before(summary: jax.Array, own: jax.Array) -> jax.Array:
            flat = summary.reshape(batch, 1, everyone * self.summaries, *summary.shape[3:])
            flat = jnp.broadcast_to(flat, (batch, blocks, *flat.shape[2:]))
            return jnp.concatenate([flat.reshape(batch * blocks, *flat.shape[2:]), rows(own)], axis=1)

        far = jnp.where(earlier[None], summaries.ids[:, None], _NOBODY).reshape(batch * blocks, everyone)
        key_ids = jnp.concatenate([jnp.repeat(far, self.summaries, axis=1), rows(ids)], axis=1)
        out: Any = flash_attention(
            rows(q),
            before(summaries.key, k),
            before(summaries.value, v),
            causal=True,
            segment_ids=(rows(ids), key_ids),
            scale=heads.scale,
            soft_cap=heads.soft_cap,
            implementation=heads.implementation,
        )
        return out.reshape(q.shape)

    def _summed(self, summaries: KeyCache, k: jax.Array, v: jax.Array, slots: CacheSlots) -> KeyCache:
        """The summaries of all blocks with what these tokens [B, T, K, H] add to them; padding adds nothing."""
        positions, blocks = slots.queries, summaries.key.shape[2]
        to_block = jax.nn.one_hot(jnp.where(positions < 0, -1, positions // self.block_size), blocks)

        def add(which: int, sums: jax.Array, x: jax.Array) -> jax.Array:
            weight = self._weight[which].astype(jnp.float32)[positions % self.block_size]
            return sums + jnp.einsum("btm,btr,btkh->bkmrh", to_block, weight, x.astype(jnp.float32))

        return KeyCache(add(0, summaries.key, k), add(1, summaries.value, v))
