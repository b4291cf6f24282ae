"""Causal variant of Linformer: each block's keys and values are projected to a few summaries.

Dims: B batch, T query length, S keys, N heads, K kv heads, H head_dim, M blocks, R summaries per block, G blocks per
group.
"""

import dataclasses
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import Field, PrivateAttr

from jaxstack.models.attention.base import AttentionKind, AttentionSpec, ScoreOptions
from jaxstack.models.attention.kv_cache import KeyCache, attend_to, empty_cache, extend, store
from jaxstack.models.layer import CacheSlots, SegmentIds
from jaxstack.parallel import shard
from pallas_kernels import flash_attention, sequence_order
from pallas_kernels.attention.scores import merge

_HIDDEN = -(2**31)
"""Segment id of summaries that a query must not see."""


class _Summaries(NamedTuple):
    """Summaries of all blocks: R projected keys and R projected values per block and head."""

    key: Float[Array, "B M R K H"]
    value: Float[Array, "B M R K H"]
    ids: Int[Array, "B M"]
    """Document that each block's summaries belong to."""


class BlockSums(NamedTuple):
    """Summaries of each block while decoding: projected keys and values, summed over its tokens so far."""

    key: Float[Array, "B K M R H"]
    value: Float[Array, "B K M R H"]


class ProjectedCache(NamedTuple):
    """Decoding cache of one layer: keys and values of the newest block, and summaries of all blocks."""

    block: KeyCache
    summaries: BlockSums


class ProjectedAttention(AttentionKind):
    """Causal softmax attention to the keys of the query's block and to a few projected keys of each earlier block.

    A summary is a learned weighted sum of a block's keys (or values), as in Linformer (Wang et al. 2020,
    arXiv:2006.04768) with one projection for all heads. Linformer projects the whole sequence, which is not causal:
    every summary contains later tokens. Here each block is projected on its own, with the same weights for all blocks,
    so that sequences may have any length. With packed documents, a block's summaries belong to the document of its
    last token, the only one that continues after it. Blocks are counted from the start of the row.

    With context parallelism each device computes the summaries of its own blocks, and an all-reduce joins them (Li et
    al. 2021, arXiv:2105.13120): the transfer does not depend on the block's size, and no keys are sent.
    """

    name: Literal["projected"] = "projected"
    block_size: int = Field(default=256, ge=1)
    """Number of tokens in a block; within it attention is causal and exact."""
    summaries: int = Field(default=16, ge=1)
    """Number of projected keys, and of projected values, per block."""
    _weight: jax.Array | None = PrivateAttr(default=None)

    def make_weight(self, heads: AttentionSpec, rngs: nnx.Rngs) -> nnx.Param:
        """Initialize the learned projections [2, block_size, R], scaled so that summaries vary as much as keys."""
        shape = (2, self.block_size, self.summaries)
        value = jax.random.normal(rngs.params(), shape, jnp.float32) * self.block_size**-0.5
        return nnx.Param(value, logical_axes=(None, "position", None))

    def with_weight(self, *weight: jax.Array) -> "ProjectedAttention":
        kind = self.model_copy()
        kind._weight = weight[0]
        return kind

    def count_weight(self, heads: AttentionSpec) -> int:
        return 2 * self.block_size * self.summaries

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        segment_ids: SegmentIds,
        heads: AttentionSpec,
    ) -> Float[Array, "B T N H"]:
        length = q.shape[1]
        group = min(self._largest_group, -(-length // self.block_size))
        q, k, v, ids = self._whole_groups(q, k, v, segment_ids, group)
        numbers = jnp.arange(q.shape[1] // self.block_size).reshape(-1, group)
        return self._attend(q, k, v, ids, self._summarise(k, v, ids), numbers, heads)[:, :length]

    def attend_over(
        self,
        axis_name: str,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        segment_ids: SegmentIds,
        heads: AttentionSpec,
    ) -> Float[Array, "B T N H"]:
        ids = jnp.zeros(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
        devices = jax.lax.axis_size(axis_name)
        blocks = q.shape[1] // self.block_size
        order = jnp.asarray(sequence_order(devices * blocks, devices))
        numbers = jax.lax.dynamic_slice_in_dim(order, jax.lax.axis_index(axis_name) * blocks, blocks)

        def join(x: jax.Array) -> jax.Array:
            every_block = jnp.zeros((x.shape[0], devices * blocks, *x.shape[2:]), x.dtype)
            return jax.lax.psum(every_block.at[:, numbers].set(x), axis_name)

        summaries = _Summaries(*(join(x) for x in self._summarise(k, v, ids)))
        # In zigzag order a device has two runs of consecutive blocks; the group size must divide each run.
        group = max(size for size in range(1, self._largest_group + 1) if blocks // 2 % size == 0)
        return self._attend(q, k, v, ids, summaries, numbers.reshape(-1, group), heads)

    def exchanges_heads(self, method: str | None) -> bool:
        return False

    def context_parallel_problem(self, method: str | None) -> str | None:
        if method is None:
            return None
        return f"attention.name projected sums its summaries over the devices; leave context_method ({method}) out."

    def length_problem(self, chunk: int) -> str | None:
        if chunk % self.block_size == 0:
            return None
        return f"attention.block_size ({self.block_size}) must divide the chunk of a device ({chunk})"

    def check(self, options: ScoreOptions) -> None:
        super().check(dataclasses.replace(options, attn_logit_softcapping=None))

    def make_cache(self, heads: AttentionSpec, batch: int, length: int, dtype: jax.typing.DTypeLike) -> ProjectedCache:
        shape = (batch, heads.num_kv_heads, -(-length // self.block_size), self.summaries, heads.head_dim)
        names = ("batch", "act_kv_heads", None, None, "act_head_dim")
        summaries = BlockSums(*(shard(jnp.zeros(shape, jnp.float32), *names) for _ in range(2)))
        return ProjectedCache(empty_cache(heads, batch, min(length, self.block_size), dtype), summaries)

    def store(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        cache: ProjectedCache,
        slots: CacheSlots,
        heads: AttentionSpec,
    ) -> ProjectedCache:
        return ProjectedCache(
            store(cache.block, k, v, slots.lengths_after), self._add_tokens(cache.summaries, k, v, slots)
        )

    def decode(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        cache: ProjectedCache,
        slots: CacheSlots,
        heads: AttentionSpec,
    ) -> tuple[Float[Array, "B T N H"], ProjectedCache]:
        block, near, positions = extend(cache.block, k, v, slots)
        summaries = self._add_tokens(cache.summaries, k, v, slots)
        blocks = jnp.arange(summaries.key.shape[2] * self.summaries) // self.summaries
        query_block = (slots.queries // self.block_size)[:, :, None]
        same_block = query_block == (positions // self.block_size)[:, None]
        causal = (positions >= 0)[:, None] & (positions[:, None] <= slots.queries[:, :, None])
        visible = jnp.concatenate([blocks < query_block, same_block & causal], axis=2)

        def join(summary: jax.Array, token: jax.Array) -> jax.Array:
            flat = summary.reshape(*summary.shape[:2], -1, summary.shape[-1])
            return jnp.concatenate([flat.astype(token.dtype), token], axis=2)

        seen = KeyCache(*(join(sums, cast(jax.Array, x)) for sums, x in zip(summaries, near, strict=True)))
        return attend_to(q, seen, visible, heads), ProjectedCache(block, summaries)

    def flops_per_token(self, heads: AttentionSpec, length: int) -> float:
        """Return forward and backward FLOPs per token of attention to keys and summaries, and of the projection."""
        near = min(self.block_size, length) / 2
        far = self.summaries * max(0.0, length / self.block_size - 1) / 2
        attention = 12.0 * (near + far) * heads.num_heads * heads.head_dim
        return attention + 12.0 * self.summaries * heads.num_kv_heads * heads.head_dim

    @property
    def _largest_group(self) -> int:
        """Largest number of blocks in a group: its summaries are at most half as many as the keys of a block."""
        return max(1, self.block_size // (2 * self.summaries))

    def _whole_groups(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, group: int
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Pad the arrays to whole groups of blocks; also return segment ids."""
        ids = jnp.zeros(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
        missing = -q.shape[1] % (group * self.block_size)
        q, k, v = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in (q, k, v))
        return q, k, v, jnp.pad(ids, ((0, 0), (0, missing)), mode="edge")

    def _summarise(self, k: jax.Array, v: jax.Array, ids: jax.Array) -> _Summaries:
        """Project the keys and values of each block to its summaries, using its last document's tokens only."""
        in_blocks = ids.reshape(ids.shape[0], -1, self.block_size)
        last = in_blocks[:, :, -1]
        counts = (in_blocks == last[:, :, None]).astype(k.dtype)

        def project(x: jax.Array, weight: jax.Array) -> jax.Array:
            x = x.reshape(*in_blocks.shape, *x.shape[2:]) * counts[..., None, None]
            return jnp.einsum("bmtkh,tr->bmrkh", x, weight.astype(x.dtype))

        assert self._weight is not None
        return _Summaries(project(k, self._weight[0]), project(v, self._weight[1]), last)

    def _attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        ids: Int[Array, "B T"],
        summaries: _Summaries,
        numbers: Int[Array, "groups G"],
        heads: AttentionSpec,
    ) -> Float[Array, "B T N H"]:
        """Compute attention of each block's queries to its own keys and to the summaries of earlier blocks.

        Neighbouring blocks form groups. All queries of a group read the summaries of earlier groups from one shared
        array; only summaries within the group are copied for each block. Memory thus grows linearly with the sequence.

        Args:
          numbers: index of each block of q in the whole sequence; the blocks of a group are consecutive.
        """
        near = self._attend_to_group(q, k, v, ids, summaries, numbers, heads)
        if summaries.ids.shape[1] == numbers.shape[1]:
            return near[0]
        far = self._attend_before_group(q, ids, summaries, numbers[:, 0], heads)
        return merge(near, far)[0].astype(q.dtype)

    def _attend_to_group(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        ids: Int[Array, "B T"],
        summaries: _Summaries,
        numbers: Int[Array, "groups G"],
        heads: AttentionSpec,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
        """Attend to the keys of a query's block and to the summaries of earlier blocks of its group.

        Blocks become rows of one batch. Summaries are placed before the keys of the block, so a causal mask fits.

        Returns:
          The output, and the log-sum-exp of its scores.
        """
        batch = q.shape[0]
        groups, size = numbers.shape
        earlier = jnp.tril(jnp.ones((size, size), bool), -1)

        def rows(x: jax.Array) -> jax.Array:
            return x.reshape(batch * groups * size, self.block_size, *x.shape[2:])

        def before(summary: jax.Array, own: jax.Array) -> jax.Array:
            flat = summary[:, numbers].reshape(batch, groups, 1, size * self.summaries, *summary.shape[3:])
            flat = jnp.broadcast_to(flat, (batch, groups, size, *flat.shape[3:]))
            return jnp.concatenate([flat.reshape(-1, *flat.shape[3:]), rows(own)], axis=1)

        visible = jnp.where(earlier, summaries.ids[:, numbers][:, :, None], _HIDDEN).reshape(-1, size)
        key_ids = jnp.concatenate([jnp.repeat(visible, self.summaries, axis=1), rows(ids)], axis=1)
        arrays = rows(q), before(summaries.key, k), before(summaries.value, v)
        out, lse = _attention(*arrays, heads, causal=True, segment_ids=(rows(ids), key_ids))
        lse = lse.reshape(batch, groups * size, -1, self.block_size)
        return out.reshape(q.shape), lse.swapaxes(1, 2).reshape(batch, -1, q.shape[1])

    def _attend_before_group(
        self,
        q: Float[Array, "B T N H"],
        ids: Int[Array, "B T"],
        summaries: _Summaries,
        first: Int[Array, " groups"],
        heads: AttentionSpec,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
        """Attend to the summaries of all blocks before a query's group, one group after the other.

        Args:
          first: number of each group's first block.

        Returns:
          The output, and the log-sum-exp of its scores: zeros and -inf for the first group.
        """
        key, value = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (summaries.key, summaries.value))

        def one_group(
            group: tuple[jax.Array, jax.Array, jax.Array],
        ) -> tuple[jax.Array, jax.Array]:
            queries, own, number = group
            earlier = jnp.arange(summaries.ids.shape[1]) < number
            key_ids = jnp.repeat(jnp.where(earlier, summaries.ids, _HIDDEN), self.summaries, axis=1)
            return _attention(queries, key, value, heads, causal=False, segment_ids=(own, key_ids))

        def split(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(x.shape[0], first.size, -1, *x.shape[2:]), 1, 0)

        out, lse = jax.lax.map(one_group, (split(q), split(ids), first))
        return jnp.moveaxis(out, 0, 1).reshape(q.shape), jnp.moveaxis(lse, 0, 2).reshape(*lse.shape[1:3], -1)

    def _add_tokens(self, summaries: BlockSums, k: jax.Array, v: jax.Array, slots: CacheSlots) -> BlockSums:
        """Add further tokens' keys and values [B, T, K, H] to the summaries of their blocks, except padding."""
        positions = slots.queries
        blocks = summaries.key.shape[2]
        to_block = jax.nn.one_hot(jnp.where(positions < 0, -1, positions // self.block_size), blocks)

        def add(which: int, sums: jax.Array, x: jax.Array) -> jax.Array:
            assert self._weight is not None
            weight = self._weight[which].astype(jnp.float32)[positions % self.block_size]
            return sums + jnp.einsum("btm,btr,btkh->bkmrh", to_block, weight, x.astype(jnp.float32))

        return BlockSums(add(0, summaries.key, k), add(1, summaries.value, v))


def _attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    heads: AttentionSpec,
    *,
    causal: bool,
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Compute `flash_attention` with the scale, soft cap and backend of a layer; also return the log-sum-exp."""
    found = flash_attention(
        q, k, v, causal=causal, segment_ids=segment_ids, scale=heads.scale, soft_cap=heads.soft_cap, return_lse=True,
        implementation=heads.implementation,
    )  # fmt: skip
    return cast(tuple[jax.Array, jax.Array], found)
