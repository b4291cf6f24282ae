"""Differentiable call of the Hopper attention kernels: prepares their arguments and chooses the backward kernels."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.attention.balance import alternation_helps, choose_head_parts, choose_tail
from pallas_kernels.attention.mosaic_backward import copies_of_query_gradient, key_value_gradient
from pallas_kernels.attention.mosaic_config import KernelConfig
from pallas_kernels.attention.mosaic_forward import forward
from pallas_kernels.attention.mosaic_query_gradient import query_gradient
from pallas_kernels.attention.mosaic_residuals import NO_KEY, Residuals
from pallas_kernels.attention.mosaic_scores import LOG2E
from pallas_kernels.attention.mosaic_wide_backward import all_gradients
from pallas_kernels.attention.remat import name_outputs
from pallas_kernels.attention.request import Options, Segments
from pallas_kernels.attention.scores import row_delta, sink_gradient
from pallas_kernels.attention.tilings import Tiling
from pallas_kernels.attention.visible_tiles import key_schedule, query_schedule
from pallas_kernels.hopper.wgmma import ROWS, TILE_ROWS
from pallas_kernels.target import multiprocessors


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Compile-time arguments of one call of the Hopper attention kernels: options, lengths and block sizes.

    Attributes:
        options: Mask, scale and soft cap.
        length: T.
        key_length: S.
        tiling: Block sizes of all kernels.
        interpret: True to interpret the kernels on a CPU.
    """

    options: Options
    length: int
    key_length: int
    tiling: Tiling
    interpret: bool

    def config(self, query_block: int, key_block: int, stages: int, warpgroups: int = 2) -> KernelConfig:
        """Return the compile-time configuration of one of the call's kernels, given that kernel's block sizes."""
        return KernelConfig(
            self.options,
            self.length,
            self.key_length,
            query_block,
            key_block,
            stages,
            warpgroups,
            programs=2 if self.interpret else multiprocessors(),
            interpret=self.interpret,
        )

    def forward_config(self) -> KernelConfig:
        """Return the compile-time configuration of the forward kernel, with blocks dealt in turn."""
        tiling = self.tiling
        groups = tiling.forward_warpgroups
        return self.config(ROWS * groups, tiling.forward_keys, tiling.forward_stages, groups)


def _pad(x: jax.Array, block: int, dim: int = 1) -> jax.Array:
    missing = -x.shape[dim] % block
    widths = [(0, missing if index == dim else 0) for index in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x


def _for_tma(x: jax.Array, block: int) -> jax.Array:
    """Pad the second dim of x to at least one block, the least that TMA copies, and to a multiple of `TILE_ROWS`.

    Whole blocks are not needed: beyond the end of an array TMA reads zeros. So most arrays are returned unchanged.

    TMA copies with one dim (log-sum-exp, segment ids) do not stop at the end of an array: those are padded to whole
    blocks, which costs little.
    """
    return _pad(x, block if x.shape[1] < block else TILE_ROWS)


def _pad_segments(segments: Segments | None, config: KernelConfig) -> Segments | None:
    """Return segment ids padded to whole blocks; if the mask has global tokens, 2 * id + 1 for these, else 2 * id."""
    if segments is None:
        return None
    marks = segments.global_tokens(config.options.mask)
    if marks is not None:
        segments = Segments(*(2 * ids + mark for ids, mark in zip(segments, marks, strict=True)))
    return Segments(_pad(segments.query, config.query_block), _pad(segments.key, config.key_block))


@functools.partial(jax.jit, static_argnums=0)  # Equal calls, one a layer, are traced and lowered once.
def _attend(
    plan: AttentionPlan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Compute attention on inputs padded to whole blocks: return out [B, T, N, H] and the log-sum-exp [B, N, T]."""
    config = plan.forward_config()
    # With segments the work of a block is not known while tracing.
    alternates = segments is None and alternation_helps(config, q.shape[0] * q.shape[2])
    config = dataclasses.replace(config, alternates=alternates)
    schedule = key_schedule(plan.options.mask, config.blocks, segments, descending=True)
    out, lse = forward(
        config,
        _for_tma(q, ROWS),
        _for_tma(k, config.key_block),
        _for_tma(v, config.key_block),
        schedule,
        _pad_segments(segments, config),
        sinks,
    )
    return out[:, : plan.length], lse[..., : plan.length]


def _forward_rule(plan: AttentionPlan, *inputs: Any) -> tuple:
    out, lse = name_outputs(*_attend(plan, *inputs))
    return (out, lse), (*inputs, out, lse)


@functools.partial(jax.jit, static_argnums=0)
def _backward_rule(plan: AttentionPlan, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, segments, sinks, out, lse = saved
    d_out, d_lse = cotangents
    delta = row_delta(out, d_out, d_lse)
    d_sinks = None if sinks is None else sink_gradient(sinks, lse, delta)
    return *gradients(plan, q, k, v, segments, (d_out, lse, delta)), None, d_sinks


def gradients(
    plan: AttentionPlan,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segments: Segments | None,
    rows: tuple[jax.Array, ...],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Compute dQ, dK and dV of attention by one fused kernel, or by separate ones if the plan's tiling says so.

    Args:
        plan: What is fixed while tracing.
        q: [B, T, N, H].
        k: [B, S, K, H].
        v: [B, S, K, H].
        segments: Segment numbers of queries and keys, or None.
        rows: d_out [B, T, N, H], lse [B, N, T] and delta [B, N, T] (row sums of out * d_out less the gradient of lse).
            lse and delta may be those of more keys than these.
    """
    d_out, lse, delta = rows
    lse = jnp.where(lse == -jnp.inf, NO_KEY, lse * LOG2E)

    def padded(config: KernelConfig) -> Residuals:
        rows = config.query_block
        return Residuals(
            _for_tma(q, rows),
            _for_tma(k, config.key_block),
            _for_tma(v, config.key_block),
            _for_tma(d_out.astype(q.dtype), rows),
            jnp.pad(lse, ((0, 0), (0, 0), (0, -plan.length % rows)), constant_values=NO_KEY),
            _pad(delta, rows, 2),
        )

    mask = plan.options.mask

    def key_arguments(queries: int, stages: int, keys: int = 128) -> tuple[KernelConfig, tuple]:
        config = plan.config(queries, keys, stages)
        schedule = query_schedule(mask, config.blocks, segments, descending=True)
        return config, (padded(config), schedule, _pad_segments(segments, config))

    tiling = plan.tiling
    if tiling.fused_queries:
        config, arrays = key_arguments(tiling.fused_queries, tiling.fused_stages, tiling.fused_keys)
        if segments is None:
            config = dataclasses.replace(config, head_parts=choose_head_parts(config, q.shape[2], k.shape))
            if tiling.fused_keys > ROWS:
                config = dataclasses.replace(config, tail=choose_tail(config, k.shape))
        copies = copies_of_query_gradient(config)
        # The zeros depend on the rows: otherwise XLA makes those of all calls at once, long before they are needed.
        zero, lse = lax.optimization_barrier((jnp.float32(0), arrays[0].lse))
        arrays = (arrays[0]._replace(lse=lse), *arrays[1:])
        sums = jax.new_ref(jnp.broadcast_to(zero, (copies, *arrays[0].q.shape)))
        kernel = key_value_gradient if tiling.fused_keys > ROWS else all_gradients
        d_k, d_v, *tails = kernel(config, *arrays, d_q=sums)
        if config.tail is not None:
            # Without the barrier, XLA of jax 0.11 fuses the kernel and the updates of its results, with a cycle.
            d_k, d_v, *tails = lax.optimization_barrier((d_k, d_v, *tails))
            d_k, d_v = (_with_tail(config, whole, parts) for whole, parts in zip((d_k, d_v), tails, strict=True))
        if config.head_parts > 1:
            d_k, d_v = (parts.sum(axis=0).astype(k.dtype) for parts in (d_k, d_v))
        d_q = (sums[...].sum(axis=0) * plan.options.scale).astype(q.dtype)
    else:
        config = plan.config(128, tiling.query_keys, tiling.query_stages)
        schedule = key_schedule(mask, config.blocks, segments)
        d_q = query_gradient(config, padded(config), schedule, _pad_segments(segments, config))
        config, arrays = key_arguments(tiling.key_queries, tiling.key_stages)
        launches = (("d_k", "d_v"),) if tiling.key_value_together else (("d_k",), ("d_v",))
        d_k, d_v = (gradient for wanted in launches for gradient in key_value_gradient(config, *arrays, wanted=wanted))
    return d_q[:, : plan.length], d_k[:, : plan.key_length], d_v[:, : plan.key_length]


def _with_tail(config: KernelConfig, whole: jax.Array, parts: jax.Array) -> jax.Array:
    """Return dK or dV [B, S, K, H], with the sums of `parts` for the last keys of the last batch entry."""
    first = -(-config.key_length // config.key_block) * config.key_block - parts.shape[1]
    tail = parts.sum(axis=0)[: whole.shape[1] - first].astype(whole.dtype)
    return lax.dynamic_update_slice(whole, tail[None], (whole.shape[0] - 1, first, 0, 0))


attend = jax.custom_vjp(_attend, nondiff_argnums=(0,))
attend.defvjp(_forward_rule, _backward_rule)
