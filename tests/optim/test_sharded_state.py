"""Every optimizer takes the same step on state in parts over all devices as on one device."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.optim.build import build_optimizer
from jaxstack.optim.optimizers import OPTIMIZERS
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
from jaxstack.state import init_state, state_shardings


class Two(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Param(jax.random.normal(rngs.params(), (16, 32)), logical_axes=("embed", "mlp"))
        self.stack = nnx.Param(jax.random.normal(rngs.params(), (3, 32, 16)), logical_axes=("layers", "mlp", "embed"))
        self.scale = nnx.Param(jnp.ones(16), logical_axes=("norm",))


@pytest.mark.longer
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_a_step_on_parts_is_the_step_on_the_whole(kind):
    module = ModuleArrays(Two)
    # Shampoo's roots of a factor without its full rank are those of rounding errors, unless they are bounded.
    settings = {"min_dim_size_to_factor": 8, "root_eps": 0.01}
    settings = {name: value for name, value in settings.items() if name in kind.model_fields}
    optimizer = build_optimizer(kind(**settings), lambda step: jnp.asarray(0.1), module.abstract_params)
    rules = make_rules(make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2)))
    shardings = state_shardings(module, optimizer, rules, zero=1)
    whole = init_state(module, optimizer, jax.random.key(0))
    parts = jax.device_put(init_state(module, optimizer, jax.random.key(0)), shardings)
    split = parts.params["stack"].sharding.shard_shape((3, 32, 16))
    assert np.prod(split) == 3 * 32 * 16 / 8
    random = np.random.default_rng(0)

    @jax.jit
    def step(params, state, gradients):
        extra = {"curvature": gradients, "renewed": True} if optimizer.sampled_gradient else {}
        updates, state = optimizer.update(gradients, state, params, **extra)
        return jax.tree.map(jnp.add, params, updates), state

    for _ in range(2):
        gradients = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), jnp.float32), whole.params)
        params, state = step(whole.params, whole.optimizer, gradients)
        whole = whole._replace(params=params, optimizer=state)
        params, state = step(parts.params, parts.optimizer, jax.device_put(gradients, shardings.params))
        parts = parts._replace(params=params, optimizer=state)
    chex.assert_trees_all_close(whole.params, parts.params, rtol=1e-4, atol=1e-5)
