"""Attention by our own Hopper kernels: every mask skips tiles in the forward and in both parts of the backward."""

import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.remat import name_outputs
from pallas_kernels.attention.request import Options, Request, Segments
from pallas_kernels.attention.tiles import Blocks, key_ranges, query_ranges

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
_LEAST_JAX = (0, 11)
# Tests set this to run the kernels on a CPU.
INTERPRET = False


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Block sizes of the three kernels. A computing warpgroup has 64 rows: of queries, or of keys in dK and dV.

    Attributes:
        forward_warpgroups, forward_keys, forward_stages: of the forward.
        query_keys, query_stages: of the dQ kernel, which has two computing warpgroups.
        key_queries, key_stages: of the dK and dV kernel, which has two computing warpgroups.
        key_value_together: whether one kernel computes both dK and dV; two do where the registers are too few.
    """

    forward_warpgroups: int = 2
    forward_keys: int = 128
    forward_stages: int = 2
    query_keys: int = 64
    query_stages: int = 2
    key_queries: int = 64
    key_stages: int = 2
    key_value_together: bool = True


TILINGS = {
    64: Tiling(forward_stages=4, query_keys=128, key_stages=3),
    80: Tiling(),
    96: Tiling(),
    128: Tiling(),
    192: Tiling(forward_keys=64, query_keys=64, key_value_together=False),
    256: Tiling(forward_keys=64, query_keys=32, key_queries=32, key_value_together=False),
}


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
    return None


def attend(request: Request) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] and lse [B, N, T]."""
    plan = _Plan(request.options, request.query_length, request.key_length, TILINGS[request.head_dim], INTERPRET)
    return _differentiable(plan, request.q, request.k, request.v, request.segments)


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
            self.interpret,
        )

    def blocks(self, config: Any) -> Blocks:
        return Blocks(self.length, self.key_length, config.query_block, config.key_block)


def _pad(x: jax.Array, block: int, dim: int = 1) -> jax.Array:
    missing = -x.shape[dim] % block
    widths = [(0, missing if index == dim else 0) for index in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x


def _pad_segments(segments: Segments | None, config: Any) -> Segments | None:
    if segments is None:
        return None
    return Segments(_pad(segments.query, config.query_block), _pad(segments.key, config.key_block))


def _attend(
    plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None
) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.attention.mosaic_forward import forward

    tiling = plan.tiling
    config = plan.config(
        64 * tiling.forward_warpgroups, tiling.forward_keys, tiling.forward_stages, tiling.forward_warpgroups
    )
    ranges = key_ranges(plan.options.mask, plan.blocks(config), segments)
    out, lse = forward(
        config,
        _pad(q, config.query_block),
        _pad(k, config.key_block),
        _pad(v, config.key_block),
        ranges,
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

    tiling, mask = plan.tiling, plan.options.mask
    config = plan.config(128, tiling.query_keys, tiling.query_stages)
    ranges = key_ranges(mask, plan.blocks(config), segments)
    d_q = query_gradient(config, padded(config), ranges, _pad_segments(segments, config))
    config = plan.config(tiling.key_queries, 128, tiling.key_stages)
    ranges = query_ranges(mask, plan.blocks(config), segments)
    launches = (("d_k", "d_v"),) if tiling.key_value_together else (("d_k",), ("d_v",))
    arrays = padded(config), ranges, _pad_segments(segments, config)
    d_k, d_v = (gradient for wanted in launches for gradient in key_value_gradient(config, *arrays, wanted))
    return d_q[:, : plan.length], d_k[:, : plan.key_length], d_v[:, : plan.key_length], None


_differentiable = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_differentiable.defvjp(_forward_rule, _backward_rule)
