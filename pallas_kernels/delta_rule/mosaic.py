"""The gated delta rule by Hopper kernels: chunks are solved all at a time, then a kernel passes through them in turn.

Dims: B batch, T tokens, n chunks of C tokens, K key heads, N value heads, D key width, V value width.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.mosaic_backward import record_states, reverse
from pallas_kernels.delta_rule.mosaic_forward import recur, solve_chunks
from pallas_kernels.delta_rule.mosaic_gradients import ChunkInputs, chunk_gradients
from pallas_kernels.delta_rule.mosaic_parts import CHUNK, SLICE, RecurrenceConfig
from pallas_kernels.delta_rule.request import DeltaRuleRequest
from pallas_kernels.hopper.replay import count_programs
from pallas_kernels.hopper.target import unsupported_target
from pallas_kernels.hopper.wgmma import TILE_ROWS
from pallas_kernels.sequence_parts import in_chunks
from pallas_kernels.target import multiprocessors

WIDTHS = (64, 128)
"""Widths of keys and values that the kernels compute."""
# Tests set this to run the kernels on a CPU.
INTERPRET = False


def unsupported_reason(request: DeltaRuleRequest) -> str | None:
    """Return the first reason why the Hopper kernels cannot compute this call, or None if they can."""
    reason = unsupported_target(request.target, INTERPRET)
    if reason is not None:
        return reason
    if request.log_decay.ndim == 4:
        return "takes one decay for each value head; got one for each key channel"
    if request.v.dtype != jnp.bfloat16:
        return f"takes bfloat16, got {request.v.dtype}"
    widths = request.k.shape[3], request.v.shape[3]
    if any(width not in WIDTHS for width in widths):
        return f"the widths of keys and values must be 64 or 128; got {widths[0]} and {widths[1]}"
    return None


def lower_priority_reason(request: DeltaRuleRequest) -> str | None:
    """Return why another backend is preferred (a chunk would be mostly empty), or None if this one is the fastest."""
    tokens = request.v.shape[1]
    return f"computes chunks of {CHUNK} tokens, got {tokens}" if tokens < CHUNK and not INTERPRET else None


@dataclass(frozen=True)
class _Plan:
    """Compile-time arguments of a call.

    Attributes:
        scale: factor of the queries.
        slices: slices of the values in a program.
        programs: programs that compute the same slices of the forward.
        interpret: True to interpret the kernels on a CPU.
    """

    scale: float
    slices: int
    programs: int
    interpret: bool

    @property
    def recurrence(self) -> RecurrenceConfig:
        """Description of the kernels that take one chunk after the other."""
        return RecurrenceConfig(self.scale, self.slices, interpret=self.interpret)

    @property
    def forward(self) -> RecurrenceConfig:
        """Description of the one of them that computes outputs."""
        return dataclasses.replace(self.recurrence, programs=self.programs)

    @property
    def parallel(self) -> dict[str, Any]:
        """Arguments of the kernels that take all chunks at a time."""
        programs = 2 if self.interpret else multiprocessors()
        return {"scale": self.scale, "programs": programs, "interpret": self.interpret}


def apply(request: DeltaRuleRequest) -> tuple[Float[Array, "B T N V"], Float[Array, "B N D V"]]:
    """Return the outputs [B, T, N, V] in the dtype of v, and the state [B, N, D, V] after the last token."""
    batch, tokens, heads, width = request.v.shape
    slices = width // SLICE
    if batch * heads * slices <= multiprocessors():
        slices = 1
    programs = count_programs(batch * heads * (width // SLICE // slices), -(-tokens // CHUNK))
    plan = _Plan(request.scale, slices, programs, INTERPRET)
    arrays = request.q, request.k, request.v, request.log_decay, request.beta, request.state, request.documents
    return cast(tuple[jax.Array, jax.Array], _apply(plan, *arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def _apply(plan: _Plan, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    q, k, v, log_decay, beta, state, documents = arrays
    tokens = v.shape[1]
    gates, first = _gates(log_decay, beta, documents)
    q, k, v = (_for_tma(x) for x in (q, k, v))
    chunks = solve_chunks(q, k, gates, first, with_beta=True, **plan.parallel)
    out, last = recur(plan.forward, chunks, v, gates, state.mT)
    return out[:, :tokens], last.mT


def _gates(
    log_decay: Float[Array, "B T N"], beta: Float[Array, "B T N"], documents: jax.Array | None
) -> tuple[Float[Array, "B N n 7 C"], Int[Array, "B n C"] | None]:
    """Return the gates of each chunk's tokens (`mosaic_parts.TOTAL`), and the first visible tokens or None."""
    log_decay, beta = (jnp.moveaxis(in_chunks(x, CHUNK), 3, 1) for x in (log_decay, beta))
    total = jnp.cumsum(log_decay, -1)
    grown = jnp.exp(total)
    rest = jnp.exp(total[..., -1:] - total)
    first = None
    if documents is not None:
        numbers = in_chunks(documents, CHUNK, "edge")
        first = (numbers[..., None, :] < numbers[..., :, None]).sum(-1, dtype=jnp.int32)
        last = numbers[..., -1:]
        before = jnp.concatenate((numbers[:, :1, :1], last[:, :-1]), 1)  # the document of the state
        grown = jnp.where((numbers == before)[:, None], grown, 0)
        rest = jnp.where((numbers == last)[:, None], rest, 0)
    return jnp.stack((total, total, beta, -beta * grown, -grown, grown, rest), 3), first


def _for_tma(x: jax.Array) -> jax.Array:
    """Pad the tokens [B, T, ...] to a chunk at least, and to a multiple of `TILE_ROWS`.

    Whole chunks are not needed: beyond the end of an array TMA reads zeros.
    """
    tokens = x.shape[1]
    missing = max(CHUNK - tokens, -tokens % TILE_ROWS)
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing > 0 else x


def _forward_rule(plan: _Plan, *arrays: Any) -> tuple:
    return _apply(plan, *arrays), arrays


@functools.partial(jax.jit, static_argnums=0)
def _backward_rule(plan: _Plan, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, log_decay, beta, state, documents = saved
    d_out, d_last = cotangents
    tokens = v.shape[1]
    gates, first = _gates(log_decay, beta, documents)
    config = plan.recurrence
    q, k, v, d_out = (_for_tma(x) for x in (q, k, v, d_out.astype(v.dtype)))
    # A power of two that makes the largest gradient about 1.
    largest = jnp.maximum(jnp.abs(d_out).max().astype(jnp.float32), jnp.abs(d_last).max())
    factor = jnp.exp2(-jnp.round(jnp.log2(jnp.clip(largest, 1e-30, 1e30))))
    chunks = solve_chunks(q, k, gates, first, **plan.parallel)
    states, new = record_states(config, chunks, v, gates, state.mT)
    # The tiles that it stores take the room of a stage.
    config = dataclasses.replace(config, stages=4 - config.slices)
    d_states, y, d_state = reverse(config, chunks, d_out, gates, factor[None], d_last.mT * factor)
    inputs = ChunkInputs(chunks.q, chunks.k, v, d_out, states, d_states, new, y, gates, factor[None])
    d_q, d_k, d_v, d_gates = chunk_gradients(inputs, first, **plan.parallel)
    d_total, d_beta = d_gates / factor
    d_log_decay = jnp.flip(jnp.cumsum(jnp.flip(d_total, -1), -1), -1)

    def of_tokens(x: jax.Array) -> jax.Array:
        """[B, N, n, C] -> [B, T, N]."""
        return jnp.moveaxis(x, 1, 3).reshape(x.shape[0], -1, x.shape[1])[:, :tokens]

    d_q, d_k, d_v = (x[:, :tokens] for x in (d_q, d_k, d_v))
    return d_q, d_k, d_v, of_tokens(d_log_decay), of_tokens(d_beta), d_state.mT / factor, None


_apply.defvjp(_forward_rule, _backward_rule)
