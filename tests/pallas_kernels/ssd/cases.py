"""Inputs of the state space layer in bfloat16, and errors of a backend against the recurrence in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ssd

NAMES = ("y", "last", "x", "dt", "a", "b", "c", "state")
"""The outputs, and the inputs whose gradients are compared."""


def make_inputs(batch, length, heads, channels, groups, width):
    """x, dt, a, b, c and a state of order one, and gradients of the outputs."""
    keys = jax.random.split(jax.random.key(0), 8)
    x, d_y = (jax.random.normal(key, (batch, length, heads, channels), jnp.bfloat16) for key in keys[:2])
    b, c = (jax.random.normal(key, (batch, length, groups, width), jnp.bfloat16) for key in keys[2:4])
    dt = jax.nn.softplus(jax.random.normal(keys[4], (batch, length, heads)) - 2)
    a = -jax.random.uniform(keys[5], (heads,), minval=0.3, maxval=2.0)
    state, d_last = (jax.random.normal(key, (batch, heads, channels, width)) for key in keys[6:])
    return (x, dt, a, b, c, state), (d_y, d_last)


def documents(lengths, batch):
    """Ids [batch, T] of documents of these lengths."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return jnp.asarray(np.broadcast_to(ids, (batch, len(ids))), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(implementation, inputs, cotangents, ids):
    """Outputs and gradients, in the order of `NAMES`."""

    def outputs(x, dt, a, b, c, state):
        return ssd(x, dt, a, b, c, state=state, segment_ids=ids, implementation=implementation)

    found, pull = jax.vjp(outputs, *inputs)
    d_y, d_last = cotangents
    return *found, *pull((d_y.astype(found[0].dtype), d_last))


def relative_errors(implementation, inputs, cotangents, ids):
    """Norm of the error of each output and gradient by the norm of the exact one."""
    found = value_and_gradients(implementation, inputs, cotangents, ids)
    x, dt, a, b, c, state = inputs
    wide = (x.astype(jnp.float32), dt, a, b.astype(jnp.float32), c.astype(jnp.float32), state)
    wanted = value_and_gradients("recurrent", wide, cotangents, ids)
    return {name: _relative(*pair) for name, pair in zip(NAMES, zip(found, wanted, strict=True), strict=True)}


def _relative(found, wanted):
    found, wanted = (np.asarray(z, np.float32).astype(np.float64) for z in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
