"""Attention by our own Hopper kernels: every mask skips tiles, in the forward and in the backward."""

import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import cudnn
from pallas_kernels.attention.remat import name_outputs
from pallas_kernels.attention.request import Options, Request, Segments
from pallas_kernels.attention.tiles import Blocks, key_schedule, query_schedule
from pallas_kernels.attention.tilings import Tiling, choose_tiling, mask_kind
from pallas_kernels.target import multiprocessors

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
_LEAST_JAX = (0, 11)
_LARGEST_BLOCK = 128
# Tests set this to run the kernels on a CPU.
INTERPRET = False


def refuses(request: Request) -> str | None:
    """The first rule that the request breaks."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < _LEAST_JAX:
        return f"needs jax 0.11 or newer (Python 3.12 or newer), installed is {jax.__version__}"
    if importlib.util.find_spec("jax.experimental.pallas.mosaic_gpu") is None:
        return "this jax has no Mosaic GPU"
    if not INTERPRET and (request.target.platform != "cuda" or request.target.compute_capability != (9, 0)):
        return f"is written for Hopper (compute capability 9.0), lowered for {request.target}"
    if request.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {request.q.dtype}"
    if request.head_dim not in HEAD_DIMS:
        return f"the head dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {request.head_dim}"
    return _refuses_mask(request)


def _refuses_mask(request: Request) -> str | None:
    mask = request.options.mask
    shift = request.key_length - request.query_length
    if mask.layout is not None and (mask.layout.block_size % _LARGEST_BLOCK or shift % _LARGEST_BLOCK):
        return (
            f"no border of a layout's blocks may go through a tile: block size and S - T must be multiples of "
            f"{_LARGEST_BLOCK}, got {mask.layout.block_size} and {shift}"
        )
    return None


def yields(request: Request) -> str | None:
    """cuDNN is faster for some shapes, where it can compute them (docs/performance.md)."""
    mask = request.options.mask
    without_mask = mask.is_band and not mask.causal and mask.window is None
    if not (request.head_dim == 256 or (without_mask and request.head_dim == 128)) or cudnn.refuses(request):
        return None
    return f"cuDNN was measured faster at head dim {request.head_dim}{' without a mask' if without_mask else ''}"


def attend_deterministic(request: Request) -> tuple[jax.Array, jax.Array]:
    """`attend` with the backward in two kernels, whose gradients are bit-equal in every run."""
    return attend(request, dataclasses.replace(_tiling(request), fused_queries=0))


def attend(request: Request, tiling: Tiling | None = None) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] and lse [B, N, T], in blocks of `tiling` (default: what the tables say)."""
    tiling = tiling or _tiling(request)
    plan = _Plan(request.options, request.query_length, request.key_length, tiling, INTERPRET)
    return _differentiable(plan, request.q, request.k, request.v, request.segments)


def _tiling(request: Request) -> Tiling:
    kind = mask_kind(request.options.mask, request.segments is not None)
    return choose_tiling(request.head_dim, kind, request.key_length)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static part of one call."""

    options: Options
    length: int
    key_length: int
    tiling: Tiling
    interpret: bool

    def config(self, query_block: int, key_block: int, stages: int, warpgroups: int = 2) -> Any:
        from pallas_kernels.attention.mosaic_pieces import Config

        return Config(
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

    def blocks(self, config: Any) -> Blocks:
        return Blocks(self.length, self.key_length, config.query_block, config.key_block)


def _pad(x: jax.Array, block: int, dim: int = 1) -> jax.Array:
    missing = -x.shape[dim] % block
    widths = [(0, missing if index == dim else 0) for index in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x


def _pad_segments(segments: Segments | None, config: Any) -> Segments | None:
    """Segment numbers of whole blocks, with the global tokens in the lowest bit where the mask has some."""
    if segments is None:
        return None
    marks = segments.global_tokens(config.options.mask)
    if marks is not None:
        segments = Segments(*(2 * ids + mark for ids, mark in zip(segments, marks, strict=True)))
    return Segments(_pad(segments.query, config.query_block), _pad(segments.key, config.key_block))


def _attend(
    plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None
) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.attention.mosaic_forward import forward

    tiling = plan.tiling
    config = plan.config(
        64 * tiling.forward_warpgroups, tiling.forward_keys, tiling.forward_stages, tiling.forward_warpgroups
    )
    schedule = key_schedule(plan.options.mask, plan.blocks(config), segments)
    out, lse = forward(
        config,
        _pad(q, config.query_block),
        _pad(k, config.key_block),
        _pad(v, config.key_block),
        schedule,
        _pad_segments(segments, config),
    )
    return out[:, : plan.length], lse[..., : plan.length]


def _forward_rule(plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None) -> tuple:
    out, lse = name_outputs(*_attend(plan, q, k, v, segments))
    return (out, lse), (q, k, v, segments, out, lse)


def _backward_rule(plan: _Plan, saved: tuple, cotangents: tuple) -> tuple:
    from pallas_kernels.attention.mosaic_backward import (
        NO_KEY,
        Residuals,
        copies_of_query_gradient,
        key_value_gradient,
        query_gradient,
    )
    from pallas_kernels.attention.mosaic_pieces import LOG2E

    q, k, v, segments, out, lse = saved
    d_out, d_lse = cotangents
    delta = jnp.einsum("btnh,btnh->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32)) - d_lse
    lse = jnp.where(lse == -jnp.inf, NO_KEY, lse * LOG2E)

    def padded(config: Any) -> Residuals:
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

    def of_keys(queries: int, stages: int) -> tuple[Any, tuple]:
        config = plan.config(queries, 128, stages)
        schedule = query_schedule(mask, plan.blocks(config), segments)
        return config, (padded(config), schedule, _pad_segments(segments, config))

    tiling = plan.tiling
    if tiling.fused_queries:
        config, arrays = of_keys(tiling.fused_queries, tiling.fused_stages)
        copies = copies_of_query_gradient(config)
        sums = jax.new_ref(jnp.zeros((copies, *arrays[0].q.shape), jnp.float32))
        d_k, d_v = key_value_gradient(config, *arrays, d_q=sums)
        d_q = (sums[...].sum(axis=0) * plan.options.scale).astype(q.dtype)
    else:
        config = plan.config(128, tiling.query_keys, tiling.query_stages)
        schedule = key_schedule(mask, plan.blocks(config), segments)
        d_q = query_gradient(config, padded(config), schedule, _pad_segments(segments, config))
        config, arrays = of_keys(tiling.key_queries, tiling.key_stages)
        launches = (("d_k", "d_v"),) if tiling.key_value_together else (("d_k",), ("d_v",))
        d_k, d_v = (gradient for wanted in launches for gradient in key_value_gradient(config, *arrays, wanted=wanted))
    return d_q[:, : plan.length], d_k[:, : plan.key_length], d_v[:, : plan.key_length], None


_differentiable = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_differentiable.defvjp(_forward_rule, _backward_rule)
