"""A view of the arrays that is not shipped, in one file: weight normalisation, trained, stopped and evaluated."""

import copy
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.loop import LoopSettings
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.module_arrays.views import View, map_paths, with_views
from jaxstack.observe.config import ObserveConfig
from jaxstack.parallel import ParallelConfig, make_mesh
from jaxstack.parameter_paths import flatten
from jaxstack.run_config import TrainConfig
from jaxstack.trainer import Trainer


class WeightNorm(View):
    """Stores a kernel [in, out] as a direction v and a length g per output: w = g v / |v| (arXiv:1602.07868)."""

    def __init__(self, pattern: str):
        self.pattern = pattern

    def bind(self, arrays: ModuleArrays) -> "WeightNorm":
        bound = copy.copy(self)
        paths = map("/".join, flatten(arrays.abstract_params))
        bound.paths = frozenset(path for path in paths if re.search(self.pattern, path))
        return bound

    def stored_variables(self, path: Any, variable: Any) -> list[Any]:
        if "/".join(map(str, path)) not in self.paths:
            return [(path, variable)]
        length = variable.replace(jax.ShapeDtypeStruct(variable.shape[1:], variable.dtype), whole_shape=None)
        return [((*path, "g"), length), ((*path, "v"), variable)]

    def store(self, params: Dict) -> Dict:
        return map_paths(lambda path, w: {"g": jnp.linalg.norm(w, axis=0), "v": w}, params, self.paths)

    def load(self, params: Dict) -> Dict:
        def weight(path: str, stored: Dict) -> jax.Array:
            return stored["g"] * stored["v"] / jnp.linalg.norm(stored["v"], axis=0)

        return map_paths(weight, params, self.paths)

    def keep(self, old: Dict, new: Dict) -> Dict:
        """Keeps lengths positive."""
        return map_paths(lambda path, stored: {**stored, "g": jnp.maximum(stored["g"], 1e-3)}, new, self.paths)


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.down = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


def squared_error(model: Network, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), "y": np.ones((8, 2), np.float32)}


def make_trainer(steps: int) -> Trainer:
    return Trainer(
        with_views(Network, [WeightNorm("kernel")]),
        squared_error,
        lambda step: BATCH,
        optimizer=optax.sgd(0.1),
        mesh=make_mesh(ParallelConfig(data=2), jax.devices()[:2]),
        train=TrainConfig(steps=steps, global_batch_size=8),
        eval_data=[BATCH],
    )


def test_a_step_moves_direction_and_length_by_their_own_gradients():
    trainer = make_trainer(1)
    before = jax.device_get(trainer.state.params)

    def loss(params: Dict) -> jax.Array:
        up = params["up"]
        down = params["down"]

        def weight(w: Dict) -> jax.Array:
            return w["g"] * w["v"] / jnp.linalg.norm(w["v"], axis=0)

        hidden = jnp.tanh(BATCH["x"] @ weight(up["kernel"]) + up["bias"])
        return jnp.mean(jnp.square(hidden @ weight(down["kernel"]) + down["bias"] - BATCH["y"]))

    expected = jax.tree.map(lambda x, g: x - 0.1 * g, before, jax.grad(loss)(before))
    trainer.fit(None, LoopSettings(observe=ObserveConfig(progress=False, trackers=())))
    after = jax.device_get(trainer.state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), after, expected)
    # The loss of the dense module is that of the stored direction and length.
    evaluated = trainer.evaluate()
    assert evaluated is not None and evaluated["eval_loss"] == pytest.approx(float(loss(after)), rel=1e-5)
    assert trainer.trained_module.up.kernel.shape == (4, 8)


def test_a_stopped_run_goes_on_exactly(tmp_path):
    settings = LoopSettings(observe=ObserveConfig(progress=False, trackers=()))
    whole = make_trainer(4)
    whole.fit(None, settings)
    make_trainer(2).fit(tmp_path, settings)
    resumed = make_trainer(4)
    resumed.fit(tmp_path, settings)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, whole.state.params)


def test_two_views_of_one_parameter_are_refused():
    with pytest.raises(ConfigError, match="two views change the parameter up/kernel: WeightNorm and WeightNorm"):
        with_views(Network, [WeightNorm("up/kernel"), WeightNorm("kernel")])
    both = with_views(Network, [WeightNorm("up/kernel"), WeightNorm("down/kernel")])
    params, others = both.init(jax.random.key(0))
    assert params["up"]["kernel"].keys() == params["down"]["kernel"].keys() == {"g", "v"}
    plain = Network(nnx.Rngs(jax.random.key(0)))
    np.testing.assert_allclose(both.merge(params, others).down.kernel[...], plain.down.kernel[...], rtol=1e-5)
