"""Compressed weights in a pipeline: the stages' stacks are compressed as layers are, and train as on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.compress.base import DuringTraining
from jaxstack.compress.during_training import Compression, compress_in_training
from jaxstack.compress.formats.block_float import BlockFloat
from jaxstack.compress.formats.float8 import Fp8
from jaxstack.compress.formats.integer_grid import QatRule
from jaxstack.compress.formats.sparse import MaskRule
from jaxstack.compress.solvers.bct import Bct
from jaxstack.compress.solvers.cluster import ClusterRule
from jaxstack.compress.solvers.lsq import LsqRule
from jaxstack.compress.solvers.maestro import LowRankRule
from jaxstack.errors import ConfigError
from jaxstack.loop import LoopSettings
from jaxstack.models import ModelConfig, Transformer
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.module_arrays.pipeline_order import PipelineOrder
from jaxstack.module_arrays.views import with_views
from jaxstack.observe.config import ObserveConfig
from jaxstack.parameter_paths import flatten
from jaxstack.run.build import make_trainer
from jaxstack.state import TrainState
from jaxstack.trainer import Trainer
from tests.small_runs import batch_at, metrics_of_steps, small_config

RULES: list[DuringTraining] = [
    LowRankRule(path="up_proj", penalty=0.1, threshold=0.05),
    QatRule(path="attention/(q|k)_proj", bits=3, group_size=4),
    LsqRule(path="gate_proj", group_size=None),
    MaskRule(path="attention/(v|o)_proj"),
]
NEAREST: list[DuringTraining] = [
    Fp8(path="attention"),
    BlockFloat(path="up_proj", block_size=4),
    Bct(path="down_proj", tile_size=4),
]


def make(rngs: nnx.Rngs, **changed: Any) -> Transformer:
    sizes = {"hidden_size": 8, "num_layers": 3, "num_heads": 2, "intermediate_size": 12, "vocab_size": 16}
    return Transformer(ModelConfig(**sizes, **changed), rngs)


def random_parameters(module: ModuleArrays) -> Dict:
    """Parameters of which a third is zero."""
    random = np.random.default_rng(0)

    def draw(shape):
        return random.normal(size=shape) * (random.random(shape) < 0.7)

    return jax.tree.map(lambda x: jnp.asarray(draw(x.shape), x.dtype), module.abstract_params)


def everything(module: ModuleArrays, to_plain: Any, stored: Dict, key: jax.Array) -> Any:
    """What a module makes of stored parameters, for a loss that is linear in the weights, in the model's order."""
    shapes = module.plain.abstract_params
    used_shapes = module.plain.used.abstract_params
    slopes = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), used_shapes)

    def loss(stored: Dict) -> tuple[jax.Array, Dict]:
        used, penalty = module.use(stored, key)
        used = to_plain(used, used_shapes)
        sums = jax.tree.map(lambda w, slope: jnp.sum(w * slope), used, slopes)
        return jnp.sum(jnp.stack(jax.tree.leaves(sums))) + (0 if penalty is None else penalty), used

    (total, used), gradients = jax.value_and_grad(loss, has_aux=True)(stored)
    new = jax.tree.map(lambda w, g: w - 0.1 * g, stored, gradients)
    kept = to_plain(module.keep(stored, new), shapes)
    return total, used, to_plain(gradients, shapes), kept, to_plain(module.load(stored), used_shapes)


@pytest.mark.parametrize(
    ("rules", "changed"),
    [
        pytest.param(RULES, {"scan_layers": False}, marks=pytest.mark.longer),
        pytest.param(RULES, {"scan_layers": True}, marks=pytest.mark.exhaustive),
        pytest.param([ClusterRule(path="mlp", bits=2)], {"scan_layers": True}, marks=pytest.mark.exhaustive),
        pytest.param(NEAREST, {"scan_layers": True}, marks=pytest.mark.longer),
    ],
    ids=["unrolled", "scanned", "clusters", "nearest"],
)
def test_stacks_of_stages_are_compressed_as_the_layers_are(rules: list[DuringTraining], changed: dict[str, bool]):
    """Three layers on two stages, one of whose four rows is empty; ranks are drawn for the same matrices."""
    plain = compress_in_training(functools.partial(make, **changed), rules)
    staged = with_views(plain, [PipelineOrder(2, 1)])
    assert staged.view(Compression) is not None and not staged.stores_plain
    assert flatten(staged.plain.abstract_params).keys() == flatten(plain.abstract_params).keys()

    @jax.jit
    def both(params: Dict, key: jax.Array) -> Any:
        stored = staged.from_plain(params, staged.abstract_params)
        return everything(plain, lambda x, _: x, params, key), everything(staged, staged.to_plain, stored, key)

    params = random_parameters(plain)
    draws = set()
    for seed in range(8):
        wanted, found = both(params, jax.random.key(seed))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
        draws.add(float(wanted[0]))
    compression = plain.view(Compression)
    assert compression is not None
    layout = next(iter(compression.chosen.values()))[1].layout
    assert len(draws) > 3 or not compression.rules[0].number_of_choices(layout)


@pytest.mark.quick
def test_layers_that_a_pipeline_stores_together_have_one_rule():
    plain = compress_in_training(
        functools.partial(make, scan_layers=False), [QatRule(path="layers/1/mlp", group_size=4)]
    )
    with pytest.raises(ConfigError, match=r"layers/1/mlp.* a pipeline stores both together; .*parallel.pipeline to 1"):
        with_views(plain, [PipelineOrder(2, 1)])


MASKED = "{path: attention/(v|o)_proj, method: mask}"
QUANTIZED = (
    "{path: attention/(q|k)_proj, method: qat, bits: 3, group_size: 8}, {path: embedding, method: qat, group_size: 16}"
)
OTHERS = "{path: up_proj, method: low_rank}, {path: gate_proj, method: cluster}, {path: down_proj, method: cluster}"


def trainer_with(rules: str, *overrides: str) -> Trainer:
    shape = ("model.num_layers=3", "model.num_heads=4", "train.global_batch_size=8", "optimizer.eps=1e-4")
    # AfterTraining mask asks a run for a pruned model to start from; here the state is pruned instead.
    given = (f"compression.rules=[{rules}]", "run.init_from=pruned")
    config = small_config(*shape, *given, *overrides)
    size = int(np.prod(list(config.parallel.degrees.values())))
    return make_trainer(config, lambda step: batch_at(step, 8), jax.devices()[:size])


@functools.cache
def pruned_start(rules: str, *overrides: str) -> TrainState:
    state = jax.device_get(trainer_with(rules, *overrides).state)

    def prune(path, x):
        return np.where(np.abs(x) < 0.01, 0, x) if "v_proj" in path or "o_proj" in path else x

    params = jax.tree_util.tree_map_with_path(lambda path, x: prune(jax.tree_util.keystr(path), x), state.params)
    return state._replace(params=params)


def load(trainer: Trainer, start: TrainState) -> Trainer:
    shardings = jax.tree.map(lambda x: x.sharding, trainer.abstract_stored_state)
    trainer.stored_state = jax.device_put(start._replace(key=jax.random.clone(start.key)), shardings)
    return trainer


def assert_close_parameters(found: Dict, wanted: Dict) -> None:
    """Compare by norm: single weights may be rounded to another value, and then take another step."""
    errors = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), found, wanted)
    assert max(jax.tree.leaves(errors)) < 0.01, errors


def assert_trains_as_one_device(rules: str, shape: tuple[str, ...], *layout: str) -> None:
    start = pruned_start(rules, *shape)
    found = []
    for overrides in ((), layout):
        trainer = load(trainer_with(rules, *shape, *overrides), start)
        found.append((metrics_of_steps(trainer, 3), jax.device_get(trainer.stored_state.params)))
    (wanted, params), (metrics, pipelined) = found

    def values(found, name):
        return [m[name] for m in found]

    np.testing.assert_allclose(values(metrics, "loss"), values(wanted, "loss"), rtol=1e-5)
    np.testing.assert_allclose(metrics[0]["grad_norm"], wanted[0]["grad_norm"], rtol=1e-5)
    # After the first step a weight between two integers may be rounded to the other one.
    np.testing.assert_allclose(values(metrics, "grad_norm"), values(wanted, "grad_norm"), rtol=1e-3)
    assert_close_parameters(pipelined, params)
    zeros = 0
    for path, begin in flatten(start.params).items():
        if "v_proj" in path or "o_proj" in path:
            np.testing.assert_array_equal(flatten(pipelined)[path] == 0, begin == 0)
            zeros += np.sum(begin == 0)
    assert (
        100 < zeros < 0.9 * sum(x.size for path, x in flatten(start.params).items() if {"v_proj", "o_proj"} & {*path})
    )


LAYOUTS = {
    "gpipe": ("parallel.pipeline=2", "parallel.pipeline_schedule=gpipe", "parallel.data=2", "parallel.fsdp=2"),
    "interleaved": ("parallel.pipeline=2", "parallel.pipeline_schedule=interleaved", "parallel.tensor=2"),
    "zero_bubble": ("parallel.pipeline=3", "parallel.pipeline_schedule=zero_bubble", "parallel.data=2"),
}


@pytest.mark.exhaustive
def test_two_stages_train_as_one_device():
    assert_trains_as_one_device(f"{MASKED}, {QUANTIZED}", (), "parallel.pipeline=2")


@pytest.mark.exhaustive
@pytest.mark.parametrize("scan", ["true", "false"])
@pytest.mark.parametrize("schedule", LAYOUTS)
def test_every_method_trains_as_on_one_device(schedule: str, scan: str):
    shape = ("model.num_layers=5", f"model.scan_layers={scan}")
    assert_trains_as_one_device(f"{MASKED}, {QUANTIZED}, {OTHERS}", shape, *LAYOUTS[schedule])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("first", "then"), [(LAYOUTS["zero_bubble"], ()), ((), LAYOUTS["interleaved"])], ids=["to one device", "to stages"]
)
def test_a_run_goes_on_under_another_layout(tmp_path, first: tuple[str, ...], then: tuple[str, ...]):
    rules = f"{MASKED}, {QUANTIZED}, {OTHERS}"
    shape = ("model.num_layers=5", "schedule.name=constant")
    start = pruned_start(rules, *shape)
    settings = LoopSettings(
        checkpoint=CheckpointConfig(every_steps=2),
        observe=ObserveConfig(progress=False, log_every=1, trackers=("jsonl",)),
        say=lambda text: None,
    )
    whole = load(trainer_with(rules, *shape, "train.steps=4"), start)
    wanted = whole.fit(None)["loss"]
    load(trainer_with(rules, *shape, "train.steps=2", *first), start).fit(tmp_path, settings)
    resumed = trainer_with(rules, *shape, "train.steps=4", *then)
    assert resumed.fit(tmp_path, settings)["loss"] == pytest.approx(wanted, rel=1e-5)
    assert_close_parameters(jax.device_get(resumed.stored_state.params), jax.device_get(whole.stored_state.params))
