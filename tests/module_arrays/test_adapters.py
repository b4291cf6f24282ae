"""What becomes of adapters, a reward head and a teacher in the arrays of one model: trained, added, folded, read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.compress.during_training import Compression
from jaxstack.compress.formats.integer_grid import QatRule
from jaxstack.errors import ConfigError
from jaxstack.models import AdapterRule, ModelConfig, Transformer, add_adapters
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.module_arrays.pipeline_order import PipelineOrder
from jaxstack.module_arrays.views import with_views
from jaxstack.parameter_paths import flatten, get

CONFIG = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, vocab_size=64)
RULES = [AdapterRule(path="q_proj", rank=2), AdapterRule(path="down_proj", method="dora", rank=2)]
TOKENS = jnp.arange(6)[None]


def plain(rngs: nnx.Rngs) -> Transformer:
    return Transformer(CONFIG, rngs)


def adapted(rngs: nnx.Rngs) -> Transformer:
    return add_adapters(plain(rngs), RULES, rngs)


def with_everything(rngs: nnx.Rngs) -> Transformer:
    model = adapted(rngs)
    model.add_reward_head()
    model.attach("teacher", plain(rngs), "distillation")
    return model


def paths(tree: dict) -> set[str]:
    return set(map("/".join, flatten(tree)))


@pytest.fixture(scope="module")
def everything() -> tuple[ModuleArrays, dict, dict]:
    """The arrays of a model with all three, and values of which those of the adapters and the head are random."""
    arrays = with_views(with_everything)
    params, others = arrays.init(jax.random.key(0))
    random = np.random.default_rng(0)
    own, added = arrays.split_added(params)
    added = jax.tree.map(lambda x: x + 0.1 * random.normal(size=x.shape), added)
    return arrays, arrays.join(own, added), others


@pytest.mark.parametrize("frozen", [None, False], ids=["no group", "a group trains norms and the teacher"])
def test_adapters_and_the_head_are_trained_and_added(everything, frozen):
    arrays, params, _ = everything
    arrays.freeze(lambda path: frozen if "norm" in path or "teacher" in path else None)
    trained, others = map(paths, arrays.split_frozen(params))
    added = paths(arrays.split_added(params)[1])
    assert {"reward_head"} < added and all(path == "reward_head" or "/adapter/" in path for path in added)
    norms = {path for path in trained | others if "norm" in path and not path.startswith("teacher/")}
    assert norms and trained == (added if frozen is None else added | norms)
    teacher = paths(arrays.split_saved(params)[1])
    assert teacher == {path for path in others if path.startswith("teacher/")} != set()


def test_folded_parameters_are_those_of_the_model_alone_and_compute_the_same(everything):
    arrays, params, others = everything
    alone = with_views(plain)
    folded = jax.jit(arrays.fold)(params)
    assert paths(folded) == paths(alone.abstract_params)
    expected = arrays.merge(params, others)(TOKENS)
    without = alone.merge(arrays.split_added(arrays.split_saved(params)[0])[0], others)(TOKENS)
    np.testing.assert_allclose(alone.merge(folded, others)(TOKENS), expected, atol=1e-5)
    assert np.abs(without - expected).max() > 1e-3


def test_a_parameter_read_alone_is_that_of_the_folded_ones(everything):
    arrays, params, _ = everything
    read = functools.partial(get, params)
    for view in arrays.views:
        read = functools.partial(view.read, stored=read)
    for path, x in flatten(arrays.fold(params)).items():
        np.testing.assert_allclose(read("/".join(path)), x, rtol=1e-5, atol=1e-6)


def test_a_run_that_starts_from_other_weights_begins_at_their_outputs():
    """The magnitudes of DoRA are those of the weights that it starts from."""
    arrays = with_views(adapted)
    start, others = with_views(plain).init(jax.random.key(1))
    params = jax.jit(arrays.complete)(start, jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, arrays.split_added(params)[0], start)
    found = arrays.merge(params, others)(TOKENS)
    np.testing.assert_allclose(found, with_views(plain).merge(start, others)(TOKENS), atol=1e-5)


def test_what_is_added_leaves_weights_trained_in_compressed_form_unrounded():
    def reward_model(rngs: nnx.Rngs) -> Transformer:
        model = plain(rngs)
        model.add_reward_head()
        return model

    arrays = with_views(reward_model, [Compression([QatRule(path="mlp", bits=2, group_size=16)])])
    start, _ = with_views(plain).init(jax.random.key(1))
    params = arrays.complete(arrays.store(start), jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, params, {**start, "reward_head": np.zeros(16)})


def test_a_pipeline_refuses_adapters():
    with pytest.raises(ConfigError, match="adapters do not support a pipeline; use fsdp or tensor"):
        with_views(adapted, [PipelineOrder(2, 1)])
