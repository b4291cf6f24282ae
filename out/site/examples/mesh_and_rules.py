"""Mesh and sharding rules with another module and training loop, on eight simulated devices.

python docs/examples/mesh_and_rules.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxstack.distributed.device_setup import start_devices
from jaxstack.parallel import AxisRules, ParallelConfig, logical_axis_rules, make_mesh, make_rules, shard


class FeedForward(nnx.Module):
    """Parameters carry logical axes, activations name theirs; no mesh axis stands in the model."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(64, 256, kernel_metadata={"logical_axes": ("embed", "mlp")}, rngs=rngs)
        self.down = nnx.Linear(256, 64, kernel_metadata={"logical_axes": ("mlp", "embed")}, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = shard(nnx.relu(self.up(x)), "batch", "act_mlp")
        return shard(self.down(hidden), "batch", "act_embed")


def place(state: nnx.State, rules: AxisRules) -> nnx.State:
    """Place the parameters by the rules; those without logical axes are sharded by their shape."""

    def put(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_raw_value()
        spec = rules.parameter_spec(variable.get_metadata().get("logical_axes"), value.shape)
        return variable.replace(jax.device_put(value, rules.sharding(spec)))

    return jax.tree.map(put, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def main(steps: int = 20) -> tuple[str, float, float]:
    """(layout of a kernel, first loss, last loss)."""
    start_devices(8)
    rules = make_rules(make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2)))
    graph, state = nnx.split(FeedForward(nnx.Rngs(0)))
    state = place(state, rules)
    optimizer = optax.adam(1e-2)
    moments = optimizer.init(state)

    @jax.jit
    def step(state, moments, x):
        def loss(state):
            with logical_axis_rules(rules):
                return jnp.mean((nnx.merge(graph, state)(x) - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        updates, moments = optimizer.update(gradients, moments, state)
        return optax.apply_updates(state, updates), moments, value

    rows = rules.sharding(rules.batch_spec((64, 64)))
    x = jax.device_put(jax.random.normal(jax.random.key(0), (64, 64)), rows)
    losses = []
    for _ in range(steps):
        state, moments, value = step(state, moments, x)
        losses.append(float(value))
    layout = str(state["up"]["kernel"].get_raw_value().sharding.spec)
    print(f"up's kernel lies as {layout}; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return layout, losses[0], losses[-1]


if __name__ == "__main__":
    main()
