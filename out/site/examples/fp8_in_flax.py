"""FP8 in existing NNX and Linen models: only `dot_general=fp8_dot_general` changes.

python docs/examples/fp8_in_flax.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from pallas_kernels import fp8_dot_general


class Network(nnx.Module):
    """An MLP of NNX's own layers."""

    def __init__(self, rngs: nnx.Rngs, dot_general: Any = jax.lax.dot_general):
        self.up = nnx.Linear(32, 128, rngs=rngs, dot_general=dot_general)
        self.down = nnx.Linear(128, 32, rngs=rngs, dot_general=dot_general)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


def train(model: nnx.Module, steps: int = 30) -> float:
    """Train a network to sort 32 numbers; return its last loss."""
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, (256, 32))
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - jnp.sort(x)) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    return float([step(model, optimizer, key) for key in jax.random.split(jax.random.key(0), steps)][-1])


def main() -> dict[str, float]:
    """Losses of the same network without and with FP8, and how far a Linen layer is from its plain product."""
    x = jax.random.normal(jax.random.key(2), (64, 32))
    layer = linen.Dense(16, dot_general=fp8_dot_general)
    weights = layer.init(jax.random.key(3), x)
    plain = linen.Dense(16).apply(weights, x)
    error = jnp.linalg.norm(layer.apply(weights, x) - plain) / jnp.linalg.norm(plain)
    found = {
        "nnx": train(Network(nnx.Rngs(0))),
        "nnx in FP8": train(Network(nnx.Rngs(0), fp8_dot_general)),
        "relative error of a Linen layer": float(error),
    }
    print(", ".join(f"{name}: {value:.4f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
