"""The head and loss in chunks of tokens: logits exist for one chunk at a time, forward and backward.

A chunk takes every n-th position of the sequence from every sequence of the batch. So a batch dimension or a
sequence dimension that is sharded over devices stays where it is: each device works on its own part of every
chunk. The backward recomputes the logits and accumulates the weight's gradient in float32.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy.logits import capped_logits, logits_gradient, loss_of_logits
from pallas_kernels.cross_entropy.request import Options, Request

_CHUNK_BYTES = 2**29


def refuses(request: Request) -> str | None:
    """Nothing: this backend computes every call."""
    del request
    return None


def per_token_loss(request: Request) -> jax.Array:
    """Loss [...] in float32."""
    hidden, labels = request.hidden, request.labels
    shape = labels.shape
    length = shape[-1] if shape else 1
    hidden = hidden.reshape(-1, length, hidden.shape[-1])
    labels = labels.reshape(-1, length)
    chunks = _count_chunks(request, length)
    missing = -length % chunks
    if missing:
        hidden = jnp.pad(hidden, ((0, 0), (0, missing), (0, 0)))
        labels = jnp.pad(labels, ((0, 0), (0, missing)), constant_values=request.options.ignore_index)
    loss = _differentiable(request.options, chunks, hidden, request.weight, labels)
    return loss[:, :length].reshape(shape)


def _count_chunks(request: Request, length: int) -> int:
    """How many chunks keep one chunk's float32 logits within `_CHUNK_BYTES` on a device.

    Under jax.set_mesh the tokens and the vocabulary are taken to be spread over all devices of the mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = [size for name, size in mesh.shape.items() if name not in mesh.manual_axes]
    chunks = -(-request.logit_bytes // (_CHUNK_BYTES * math.prod(sizes)))
    return max(1, min(chunks, length))


def _chunk(x: jax.Array, chunks: int, index: jax.Array) -> jax.Array:
    """[B, T, ...] -> [B, T // chunks, ...]: positions index, index + chunks, index + 2 chunks, ..."""
    x = x.reshape(x.shape[0], x.shape[1] // chunks, chunks, *x.shape[2:])
    return jax.lax.dynamic_index_in_dim(x, index, 2, keepdims=False)


def _unchunk(x: jax.Array) -> jax.Array:
    """The inverse for stacked chunks: [chunks, B, T // chunks, ...] -> [B, T, ...]."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _loss(options: Options, chunks: int, hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    return _forward_rule(options, chunks, hidden, weight, labels)[0]


def _forward_rule(options: Options, chunks: int, hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> tuple:
    matrix = weight.astype(hidden.dtype)

    def visit(carry: None, index: jax.Array) -> tuple:
        logits = capped_logits(_chunk(hidden, chunks, index), matrix, options)
        loss, lse, *_ = loss_of_logits(logits, _chunk(labels, chunks, index), options)
        return carry, (loss, lse)

    _, (loss, lse) = jax.lax.scan(visit, None, jnp.arange(chunks))
    return _unchunk(loss), (hidden, weight, labels, lse)


def _backward_rule(options: Options, chunks: int, residuals: tuple, d_loss: jax.Array) -> tuple:
    hidden, weight, labels, lse = residuals
    matrix = weight.astype(hidden.dtype)

    def visit(d_weight: jax.Array, step: tuple) -> tuple:
        index, lse = step
        rows = _chunk(hidden, chunks, index)
        logits = capped_logits(rows, matrix, options)
        exponentials, total = jnp.exp(logits - lse[..., None]), jnp.ones_like(lse)
        gradient = logits_gradient(
            exponentials, total, logits, lse, _chunk(labels, chunks, index), _chunk(d_loss, chunks, index), options
        ).astype(hidden.dtype)
        d_rows = jnp.einsum("btv,dv->btd", gradient, matrix).astype(hidden.dtype)
        return d_weight + jnp.einsum("btd,btv->dv", rows, gradient, preferred_element_type=d_weight.dtype), d_rows

    start = jnp.zeros(weight.shape, lse.dtype)
    d_weight, d_hidden = jax.lax.scan(visit, start, (jnp.arange(chunks), lse))
    return _unchunk(d_hidden), d_weight.astype(weight.dtype), None


_differentiable = jax.custom_vjp(_loss, nondiff_argnums=(0, 1))
_differentiable.defvjp(_forward_rule, _backward_rule)
