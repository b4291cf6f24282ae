"""One call of the Hopper kernels, differentiable: lengths filled up to whole blocks, and which kernels compute what."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.mosaic_backward import (
    NO_KEY,
    Residuals,
    copies_of_query_gradient,
    key_value_gradient,
    query_gradient,
)
from pallas_kernels.attention.mosaic_config import KernelConfig
from pallas_kernels.attention.mosaic_forward import forward
from pallas_kernels.attention.mosaic_scores import LOG2E
from pallas_kernels.attention.remat import name_outputs
from pallas_kernels.attention.request import Options, Segments
from pallas_kernels.attention.scores import row_delta
from pallas_kernels.attention.tiles import Blocks, key_schedule, query_schedule
from pallas_kernels.attention.tilings import Tiling
from pallas_kernels.hopper.wgmma import ROWS
from pallas_kernels.target import multiprocessors


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of one call."""

    options: Options
    length: int
    key_length: int
    tiling: Tiling
    interpret: bool

    def config(self, query_block: int, key_block: int, stages: int, warpgroups: int = 2) -> KernelConfig:
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

    def blocks(self, config: KernelConfig) -> Blocks:
        return Blocks(self.length, self.key_length, config.query_block, config.key_block)


def _pad(x: jax.Array, block: int, dim: int = 1) -> jax.Array:
    missing = -x.shape[dim] % block
    widths = [(0, missing if index == dim else 0) for index in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x


def _pad_segments(segments: Segments | None, config: KernelConfig) -> Segments | None:
    """Segment numbers of whole blocks, with the global tokens in the lowest bit where the mask has some."""
    if segments is None:
        return None
    marks = segments.global_tokens(config.options.mask)
    if marks is not None:
        segments = Segments(*(2 * ids + mark for ids, mark in zip(segments, marks, strict=True)))
    return Segments(_pad(segments.query, config.query_block), _pad(segments.key, config.key_block))


@functools.partial(jax.jit, static_argnums=0)  # equal calls, one a layer, are traced and lowered once
def _attend(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] and lse [B, N, T]."""
    tiling = plan.tiling
    config = plan.config(
        64 * tiling.forward_warpgroups, tiling.forward_keys, tiling.forward_stages, tiling.forward_warpgroups
    )
    config = dataclasses.replace(config, turns=tiling.forward_turns)
    schedule = key_schedule(plan.options.mask, plan.blocks(config), segments)
    # Copies of one dim (log-sum-exp, segments) know no end of an array, others do. So a warpgroup's rows are all
    # queries, or all beyond them: those read zeros and store nothing.
    if segments is not None or plan.length % ROWS:
        q = _pad(q, config.query_block)
    out, lse = forward(
        config,
        q,
        _pad(k, config.key_block),
        _pad(v, config.key_block),
        schedule,
        _pad_segments(segments, config),
    )
    return out[:, : plan.length], lse[..., : plan.length]


def _forward_rule(plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None) -> tuple:
    out, lse = name_outputs(*_attend(plan, q, k, v, segments))
    return (out, lse), (q, k, v, segments, out, lse)


@functools.partial(jax.jit, static_argnums=0)
def _backward_rule(plan: Plan, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, segments, out, lse = saved
    d_out, d_lse = cotangents
    return *gradients(plan, q, k, v, segments, (d_out, lse, row_delta(out, d_out, d_lse))), None


def gradients(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None, rows: tuple
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dQ, dK and dV from `rows`: d_out, and lse and delta [B, N, T], which may be those of more keys than these."""
    d_out, lse, delta = rows
    lse = jnp.where(lse == -jnp.inf, NO_KEY, lse * LOG2E)

    def padded(config: KernelConfig) -> Residuals:
        rows = config.query_block
        return Residuals(
            _pad(q, rows),
            _pad(k, config.key_block),
            _pad(v, config.key_block),
            _pad(d_out.astype(q.dtype), rows),
            jnp.pad(lse, ((0, 0), (0, 0), (0, -plan.length % rows)), constant_values=NO_KEY),
            _pad(delta, rows, 2),
        )

    mask = plan.options.mask

    def of_keys(queries: int, stages: int) -> tuple[KernelConfig, tuple]:
        config = plan.config(queries, 128, stages)
        schedule = query_schedule(mask, plan.blocks(config), segments)
        return config, (padded(config), schedule, _pad_segments(segments, config))

    tiling = plan.tiling
    if tiling.fused_queries:
        config, arrays = of_keys(tiling.fused_queries, tiling.fused_stages)
        copies = copies_of_query_gradient(config)
        # Zeros that need the rows: XLA makes those of all calls at once, long before, if it can.
        zero, lse = lax.optimization_barrier((jnp.float32(0), arrays[0].lse))
        arrays = (arrays[0]._replace(lse=lse), *arrays[1:])
        sums = jax.new_ref(jnp.broadcast_to(zero, (copies, *arrays[0].q.shape)))
        d_k, d_v = key_value_gradient(config, *arrays, d_q=sums)
        d_q = (sums[...].sum(axis=0) * plan.options.scale).astype(q.dtype)
    else:
        config = plan.config(128, tiling.query_keys, tiling.query_stages)
        schedule = key_schedule(mask, plan.blocks(config), segments)
        d_q = query_gradient(config, padded(config), schedule, _pad_segments(segments, config))
        config, arrays = of_keys(tiling.key_queries, tiling.key_stages)
        launches = (("d_k", "d_v"),) if tiling.key_value_together else (("d_k",), ("d_v",))
        d_k, d_v = (gradient for wanted in launches for gradient in key_value_gradient(config, *arrays, wanted=wanted))
    return d_q[:, : plan.length], d_k[:, : plan.key_length], d_v[:, : plan.key_length]


attend = jax.custom_vjp(_attend, nondiff_argnums=(0,))
attend.defvjp(_forward_rule, _backward_rule)
