"""Output head and loss in chunks of tokens: only one chunk's logits exist at a time.

`loss_sum` computes the gradients in its forward, chunk by chunk while the logits exist: three matmuls for loss and
gradients. `per_token_loss` learns the cotangents of the losses only in the backward, where it recomputes the logits:
four matmuls.

Tokens are [B, P, S] here: B sequences of P pieces of S positions, and a chunk is C positions of every piece. This
preserves XLA's sharding: that of the batch always, that of the sequence because it is split into pieces if XLA
partitions it. Further dims: D model, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.cross_entropy import mosaic_chunk, triton_launch
from pallas_kernels.cross_entropy.request import CrossEntropyRequest, Options
from pallas_kernels.cross_entropy.xla_common import (
    accumulator_dtype,
    capped,
    log_sum_exp,
    logits_gradient,
    loss_shares,
    soft_cap_derivative,
)
from pallas_kernels.target import automatic_axes

CHUNK_BYTES = 788 * 2**20
"""Size of one chunk's logits in the dtype of `hidden`: 8 chunks for GPT-2 with 65,536 tokens."""
ROWS = 256
"""The number of tokens of a chunk is a multiple of this if possible: the rows of a matmul tile."""
BLOCKS = 2
"""Number of parts in which a chunk's logits are overwritten by their gradient; XLA writes in place from two on."""
GROUP = 8
"""Number of neighbouring logits that are reduced together on GPUs: 16 bytes of bfloat16."""
ACCUMULATOR_BYTES = 3 * 2**26
"""Largest float32 accumulator of a 16-bit weight's gradient; a larger one has the weight's dtype."""
MOST_ROUNDINGS = 12
"""Largest number of chunks with an accumulator in the weight's dtype.

Each chunk rounds the sum once, and the error grows with the square root of their number.
"""

Chunk = Callable[[jax.Array], jax.Array]
"""Slice a chunk [B, P, C, ...] out of an array [B, P, S, ...]."""


Index = int | jax.Array
Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True)
class _ChunkPlan:
    """Division of a call's tokens into chunks, and accumulation of their gradients: static, hashable."""

    options: Options
    sizes: tuple[tuple[int, int], ...]
    """(number of chunks, C), one after the other."""
    group: int
    """Number of neighbouring logits that are reduced together."""
    accumulator: DTypeLike
    """Dtype of the sum of the chunks' gradients of the weight."""
    capability: int | None
    """Compute capability (90 for 9.0) for the Triton kernel that computes the logits' gradient; None to use XLA."""
    exponentials: bool = False
    """True if our Hopper kernel computes a chunk's exponentials in place of its logits."""


def unsupported_reason(request: CrossEntropyRequest) -> str | None:
    """Return None, as this backend computes every cross-entropy call."""
    del request
    return None


def per_token_loss(request: CrossEntropyRequest) -> Float[Array, "*tokens"]:
    """Compute each token's loss [...] in float32; if the vocabulary is sharded, this device's summand of it."""
    plan, hidden, labels, _ = _cut(request)
    return _differentiable_losses(plan, hidden, request.weight, labels).reshape(request.labels.shape)


def loss_sum(request: CrossEntropyRequest) -> Float[Array, ""]:
    """Compute the sum of the tokens' losses in float32; if the vocabulary is sharded, this device's summand."""
    return chunked_loss_sum(request, None)


def chunked_loss_sum(request: CrossEntropyRequest, capability: int | None, *, exponentials: bool = False) -> jax.Array:
    """Compute the sum of the losses chunk by chunk, with the logits' gradients from XLA or from a GPU kernel.

    Args:
        request: the call.
        capability: compute capability (90 for 9.0) for the Triton kernel; None to use XLA.
        exponentials: True to use our Hopper kernel. If the logits exceed its range, the whole loss is computed once
            more by the other way.
    """
    plan, hidden, labels, token_weights = _cut(request, capability)
    plan = dataclasses.replace(plan, exponentials=exponentials)
    return _differentiable_sum(plan, hidden, request.weight, labels, token_weights)


def chunk_token_counts(request: CrossEntropyRequest) -> list[int]:
    """Return the distinct sizes, in tokens, of the chunks into which a call's tokens are divided."""
    plan, (batch, pieces, _) = _plan(request, None)
    return [batch * pieces * size for _, size in plan.sizes]


def _plan(request: CrossEntropyRequest, capability: int | None) -> tuple[_ChunkPlan, tuple[int, int, int]]:
    """Choose how a call's tokens are divided into chunks; return the plan and the shape (B, P, S) of the tokens."""
    labels = request.labels
    weight = request.weight
    # XLA may shard tokens and vocabulary over all mesh axes that no shard_map uses.
    devices = math.prod(automatic_axes().values())
    most = CHUNK_BYTES * devices // (weight.shape[1] * request.hidden.dtype.itemsize)
    length = labels.shape[-1] if labels.ndim else 1
    if most < 16 * (labels.size // max(length, 1)):
        length = labels.size  # sequences are concatenated if a chunk would have only a few positions of each
    batch = labels.size // max(length, 1)
    pieces = _count_pieces(length, -(-labels.size // max(most, 1))) if devices > 1 else 1
    sizes = _chunk_sizes(most // max(batch * pieces, 1), batch * pieces, length // pieces)

    accumulator = accumulator_dtype(request.hidden.dtype)
    roundings = sum(count for count, _ in sizes)
    large = weight.size * accumulator.itemsize > ACCUMULATOR_BYTES
    same = weight.dtype == request.hidden.dtype
    if large and same and weight.dtype.itemsize == 2 and roundings <= MOST_ROUNDINGS:
        accumulator = weight.dtype
    # A vocabulary that XLA partitions cannot always be reshaped into groups.
    grouped = request.target.platform == "cuda" and devices == 1 and weight.shape[1] % GROUP == 0
    plan = _ChunkPlan(request.options, sizes, GROUP if grouped else 1, accumulator, capability)
    return plan, (batch, pieces, length // pieces)


def _cut(
    request: CrossEntropyRequest, capability: int | None = None
) -> tuple[_ChunkPlan, jax.Array, jax.Array, jax.Array]:
    """Reshape a call's arrays for its chunks: return the plan, hidden [B, P, S, D], labels and weights [B, P, S]."""
    labels = request.labels
    token_weights = request.token_weights
    plan, shape = _plan(request, capability)
    if token_weights is None:
        token_weights = jnp.ones_like(labels, accumulator_dtype(request.hidden.dtype))
    hidden = request.hidden.reshape(*shape, request.hidden.shape[-1])
    return plan, hidden, labels.reshape(shape), token_weights.reshape(shape)


def _count_pieces(length: int, chunks: int) -> int:
    """Return the number of equal pieces to split a sequence into, each with at least BLOCKS positions per chunk."""
    for positions in range(chunks * BLOCKS, 2 * chunks * BLOCKS):
        if length % positions == 0:
            return length // positions
    return 1


def _chunk_sizes(most: int, pieces: int, length: int) -> tuple[tuple[int, int], ...]:
    """Divide a sequence into chunks of at most `most` positions and of nearly equal sizes: return (number, size) pairs.

    If possible, C is a multiple of ROWS tokens, else of BLOCKS positions. A number of 1 is avoided: XLA makes a loop
    only of several chunks.
    """
    if most >= length:
        return ((1, max(length, 1)),)
    steps = (ROWS // math.gcd(ROWS, pieces), BLOCKS, 1)
    step = next((step for step in steps if most >= step), 1)
    units, left = divmod(length, step)
    fewest = -(-units // max(most // step, 1))
    count = next((n for n in range(fewest, units) if 1 not in (units % n, n - units % n)), units)
    small, larger = divmod(units, count)
    found = ((larger, (small + 1) * step), (count - larger, small * step), (1, left))
    return tuple((number, size) for number, size in found if number and size)


def _for_each_chunk(plan: _ChunkPlan, visit: Callable[[Carry, Chunk, Index], Carry], carry: Carry) -> Carry:
    """Loop over the chunks of tokens with carry = visit(carry, chunk, start); return the last carry."""

    def step(start: Index, size: int, carry: Carry) -> Carry:
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=2)
        return visit(carry, cut, start)

    begin = 0
    for count, size in plan.sizes:
        # A single chunk among others runs in a loop that XLA cannot unroll. Otherwise XLA may compute its logits before
        # the other loop and keep them all the time, with a second array of the weight's size for its summand. The
        # price: the GPU waits for the host, which reads the number of steps.
        known = count > 1 or len(plan.sizes) == 1
        steps = count if known else jax.lax.optimization_barrier(jnp.int32(1))

        def visit_one(i, carry, begin=begin, size=size):
            return step(begin + i * size, size, carry)

        carry = jax.lax.fori_loop(0, steps, visit_one, carry)
        begin += count * size
    return carry


def _put(x: jax.Array, part: jax.Array, start: Index) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, 2)


def _chunk_loss(plan: _ChunkPlan, rows: jax.Array, matrix: jax.Array, labels: jax.Array) -> tuple:
    """Return a chunk's logits [B, P, C, V] before the soft cap, their log-sum-exp and the loss [B, P, C].

    The logits are rounded to the dtype of `hidden`: in float32 twice the bytes would pass through memory three times.
    """
    logits = jnp.matmul(rows, matrix)
    lse, chosen = log_sum_exp(logits, labels, plan.options, plan.group)
    return logits, lse, loss_shares(lse, chosen, labels, matrix.shape[1], plan.options)


def _logits_gradient(
    plan: _ChunkPlan, logits: jax.Array, lse: jax.Array, labels: jax.Array, d_loss: jax.Array
) -> jax.Array:
    """Return the gradient of a chunk's logits, [B, P, C, V] like them; XLA writes it over the logits."""
    blocks = BLOCKS if logits.shape[2] % BLOCKS == 0 else 1
    size = logits.shape[2] // blocks

    def visit(block: jax.Array, buffer: jax.Array) -> jax.Array:
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=block * size, slice_size=size, axis=2)
        part, part_lse, part_labels, part_d_loss = (cut(x) for x in (buffer, lse, labels, d_loss))
        x = capped(part, plan.options)
        exponentials = jnp.exp(x - part_lse[..., None])
        total = jnp.ones_like(part_lse)
        gradient = logits_gradient(exponentials, total, None, part_lse, part_labels, part_d_loss, plan.options)
        if plan.options.soft_cap is not None:
            gradient = gradient * soft_cap_derivative(part, plan.options.soft_cap)
        return _put(buffer, gradient.astype(buffer.dtype), block * size)

    return jax.lax.fori_loop(0, blocks, visit, logits)


def _add_gradients(
    gradients: tuple,
    rows: jax.Array,
    matrix: jax.Array,
    d_logits: jax.Array,
    start: Index,
    factor: jax.Array | None = None,
) -> tuple:
    """Write a chunk's gradient of the hidden states into d_hidden, and add its gradient of the weight to d_weight.

    XLA makes the addition part of the matmul. The gradient of the logits is d_logits, times factor [B, P, C] float32 if
    it is not None.
    """
    d_hidden, d_weight = gradients
    if factor is None:
        part = jnp.einsum("bpcv,dv->bpcd", d_logits, matrix)
    else:
        part = jnp.einsum("bpcv,dv->bpcd", d_logits, matrix, preferred_element_type=factor.dtype) * factor[..., None]
        rows = (rows * factor[..., None]).astype(rows.dtype)
    d_hidden = _put(d_hidden, part.astype(d_hidden.dtype), start)
    return d_hidden, d_weight + jnp.einsum("bpcd,bpcv->dv", rows, d_logits, preferred_element_type=d_weight.dtype)


def _no_gradients(plan: _ChunkPlan, hidden: jax.Array, weight: jax.Array) -> tuple:
    return jnp.zeros_like(hidden), jnp.zeros_like(weight, plan.accumulator)


def _losses(plan: _ChunkPlan, hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    return _losses_forward(plan, hidden, weight, labels)[0]


def _losses_forward(plan: _ChunkPlan, hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> tuple:
    matrix = weight.astype(hidden.dtype)

    def visit(carry: tuple, chunk: Chunk, start: Index) -> tuple:
        found = _chunk_loss(plan, chunk(hidden), matrix, chunk(labels))[1:]
        return tuple(_put(x, part, start) for x, part in zip(carry, found, strict=True))

    nothing = jnp.zeros_like(labels, accumulator_dtype(hidden.dtype))
    lse, loss = _for_each_chunk(plan, visit, (nothing, nothing))
    return loss, (hidden, weight, labels, lse)


def _losses_backward(plan: _ChunkPlan, residuals: tuple, d_loss: jax.Array) -> tuple:
    hidden, weight, labels, lse = residuals
    matrix = weight.astype(hidden.dtype)

    def visit(gradients: tuple, chunk: Chunk, start: Index) -> tuple:
        rows = chunk(hidden)
        logits = jnp.matmul(rows, matrix)
        d_logits = _logits_gradient(plan, logits, chunk(lse), chunk(labels), chunk(d_loss))
        return _add_gradients(gradients, rows, matrix, d_logits, start)

    nothing = _no_gradients(plan, hidden, weight)
    d_hidden, d_weight = _for_each_chunk(plan, visit, nothing)
    return d_hidden, d_weight.astype(weight.dtype), None


def _sum(
    plan: _ChunkPlan, hidden: jax.Array, weight: jax.Array, labels: jax.Array, token_weights: jax.Array
) -> jax.Array:
    return jnp.sum(_losses(plan, hidden, weight, labels) * token_weights)


def _sum_forward(
    plan: _ChunkPlan, hidden: jax.Array, weight: jax.Array, labels: jax.Array, token_weights: jax.Array
) -> tuple:
    arrays = (hidden, weight.astype(hidden.dtype), labels, token_weights)
    found = _losses_and_gradients(plan, weight, *arrays)
    if plan.exponentials:
        # A loop of zero or one steps updates the results in place; a conditional would copy them.
        def again(found):
            return _losses_and_gradients(dataclasses.replace(plan, exponentials=False), weight, *arrays)

        _, found = jax.lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (jnp.bool_(False), again(carry[1])),
            (_any_infinite(found[0]), found),
        )
    losses, d_hidden, d_weight = found
    return jnp.sum(losses * token_weights), (d_hidden, d_weight.astype(weight.dtype), losses, token_weights)


def _losses_and_gradients(
    plan: _ChunkPlan,
    weight: jax.Array,
    hidden: jax.Array,
    matrix: jax.Array,
    labels: jax.Array,
    token_weights: jax.Array,
) -> tuple:
    """Compute each token's loss, d_hidden and d_weight, chunk by chunk, in the forward.

    `matrix` is the weight in the dtype of `hidden`.
    """

    average = matrix.mean(axis=1, dtype=accumulator_dtype(matrix.dtype)) if plan.exponentials else None

    def visit(carry: tuple, chunk: Chunk, start: Index) -> tuple:
        losses, *gradients = carry
        rows = chunk(hidden)
        here = chunk(labels)
        d_loss = chunk(token_weights)
        factor = None
        if average is not None:
            loss, d_logits, factor = mosaic_chunk.loss_and_gradient(plan.options, rows, matrix, average, here, d_loss)
        elif plan.capability is None:
            logits, lse, loss = _chunk_loss(plan, rows, matrix, here)
            d_logits = _logits_gradient(plan, logits, lse, here, d_loss)
        else:
            logits = jnp.matmul(rows, matrix)
            loss, d_logits = triton_launch.loss_and_gradient(plan.options, logits, here, d_loss, plan.capability)
        return _put(losses, loss, start), *_add_gradients(tuple(gradients), rows, matrix, d_logits, start, factor)

    nothing = jnp.zeros_like(labels, accumulator_dtype(hidden.dtype)), *_no_gradients(plan, hidden, weight)
    return _for_each_chunk(plan, visit, nothing)


def _any_infinite(losses: jax.Array) -> jax.Array:
    return ~jnp.isfinite(losses).all()


def _sum_backward(plan: _ChunkPlan, residuals: tuple, d_sum: jax.Array) -> tuple:
    del plan
    d_hidden, d_weight, losses, token_weights = residuals
    d_token_weights = (losses * d_sum).astype(token_weights.dtype)
    return (d_hidden * d_sum).astype(d_hidden.dtype), (d_weight * d_sum).astype(d_weight.dtype), None, d_token_weights


_differentiable_losses = jax.custom_vjp(_losses, nondiff_argnums=(0,))
_differentiable_losses.defvjp(_losses_forward, _losses_backward)
_differentiable_sum = jax.custom_vjp(_sum, nondiff_argnums=(0,))
_differentiable_sum.defvjp(_sum_forward, _sum_backward)
