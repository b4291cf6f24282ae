"""SwiGLU (Shazeer, arXiv:2002.05202): the gated activation of Llama's feed-forward layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Values = Float[Array, "*shape"]


@jax.custom_vjp
def swiglu(gate: Values, up: Values) -> Values:
    """Compute silu(gate) * up elementwise, in float32, returned in the dtype of `gate`.

    Only the two inputs are saved for the backward.

    Args:
        gate, up: [..., F] of one shape and dtype.

    Raises:
        ValueError: the shapes or dtypes differ.
    """
    return _forward_rule(gate, up)[0]


def _forward_rule(gate: jax.Array, up: jax.Array) -> tuple:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate and up must have one shape and dtype; got {gate.dtype} {list(gate.shape)} and "
            f"{up.dtype} {list(up.shape)}"
        )
    dtype = jnp.promote_types(gate.dtype, jnp.float32)
    wide = gate.astype(dtype)
    return (wide * jax.nn.sigmoid(wide) * up.astype(dtype)).astype(gate.dtype), (gate, up)


def swiglu_gradients(gate: Values, up: Values, d_out: Values) -> tuple[Values, Values]:
    """Return the gradients of `gate` and `up` from `d_out`, the gradient of swiglu(gate, up); computed in float32."""
    dtype = jnp.promote_types(gate.dtype, jnp.float32)
    wide = gate.astype(dtype)
    d_out = d_out.astype(dtype)
    sigmoid = jax.nn.sigmoid(wide)
    silu = wide * sigmoid
    d_gate = d_out * up.astype(dtype) * (sigmoid + silu * (1.0 - sigmoid))
    return d_gate.astype(gate.dtype), (d_out * silu).astype(up.dtype)


swiglu.defvjp(_forward_rule, lambda inputs, d_out: swiglu_gradients(inputs[0], inputs[1], d_out))
