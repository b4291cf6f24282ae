"""Sums over microbatches and devices: which way a module takes, random keys, and what each layout keeps in memory."""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxstack.data.device_batches import abstract_batch
from jaxstack.gradients.build import GlobalGradients, LocalOrGlobal, make_gradients
from jaxstack.loss import LossSum, language_model_loss
from jaxstack.models import Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import AXES, ParallelConfig, ShardingContext, StepLayout, make_mesh, make_rules
from tests.small_runs import batch_at, make_trainer, small_config


def rules(zero: int = 0, *, data: int = 1, fsdp: int = 1, tensor: int = 1) -> ShardingContext:
    degrees = ParallelConfig(data=data, fsdp=fsdp, tensor=tensor)
    mesh = make_mesh(degrees, jax.devices()[: data * fsdp * tensor])
    return ShardingContext(make_rules(mesh), StepLayout(zero=zero))


def transformer(*overrides: str) -> ModuleArrays:
    return ModuleArrays(lambda rngs: Transformer(small_config(*overrides).model, rngs))


class Normalised(nnx.Module):
    """Somebody else's module: matrices without logical axes, statistics of the batch."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.outer = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.norm(self.inner(x)))


def test_our_transformer_runs_on_its_own_rows_and_other_modules_on_all():
    modules = (transformer(), ModuleArrays(Normalised))
    found = [type(make_gradients(module, language_model_loss, rules(data=2))) for module in modules]
    assert found == [LocalOrGlobal, GlobalGradients]
    assert type(make_gradients(transformer(), language_model_loss, rules(tensor=2))) is GlobalGradients


@pytest.mark.parametrize("accumulation", [1, 2])
def test_dropout_differs_between_devices_and_microbatches(accumulation):
    seen = set()

    def loss(model, batch, key):
        jax.debug.callback(lambda k: seen.add(tuple(k.tolist())), jax.random.key_data(key))
        return language_model_loss(model, batch, key=key, train=True)

    module = transformer()
    gradients = make_gradients(module, loss, rules(data=2, fsdp=2), accumulation)
    params, non_params = module.init(jax.random.key(0))
    batch = {name: jnp.asarray(x) for name, x in batch_at(0, 8).items()}
    jax.block_until_ready(jax.jit(gradients)(params, non_params, batch, jax.random.key(1)))
    jax.effects_barrier()
    assert len(seen) == 4 * accumulation


def test_a_loss_that_is_a_mean_sees_the_whole_batch():
    def mean(model, batch):
        logits = jax.nn.log_softmax(model(batch["tokens"], segment_ids=batch["segment_ids"]))
        counted = batch["labels"] != -100
        picked = jnp.take_along_axis(logits, jnp.where(counted, batch["labels"], 0)[..., None], -1)[..., 0]
        return -jnp.sum(picked * counted) / jnp.sum(counted)

    module = transformer()
    params, non_params = module.init(jax.random.key(0))
    batch = {name: jnp.asarray(x) for name, x in batch_at(0, 8).items()}
    found, wanted = (
        jax.jit(make_gradients(module, mean, layout))(params, non_params, batch, jax.random.key(1))[0]
        for layout in (rules(data=2, fsdp=2), rules(data=1))
    )
    assert float(found.count) == 1 and float(found.loss) == pytest.approx(float(wanted.loss), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found.gradients, wanted.gradients)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_somebody_elses_statistics_are_those_of_the_whole_batch(zero):
    def loss(model, batch):
        return LossSum(jnp.sum((model(batch["x"]) - batch["x"]) ** 2), batch["x"].shape[0])

    module = ModuleArrays(Normalised)
    params, non_params = module.init(jax.random.key(0))
    batch = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)}
    (found, after), (wanted, expected) = (
        jax.jit(make_gradients(module, loss, layout))(params, non_params, batch, jax.random.key(1))
        for layout in (rules(zero, data=4, fsdp=2), rules(data=1))
    )
    for a, b in zip(jax.tree.leaves((found, after)), jax.tree.leaves((wanted, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    if zero:
        assert math.prod(found.gradients["inner"]["kernel"].sharding.shard_shape((4, 8))) == 4 * 8 // 8


def bytes_of_a_device(*overrides: str) -> tuple[int, int, int]:
    """Of the stored state on one device: those of matrices' weights and moments, of all else; and all parameters."""
    trainer = make_trainer(small_config(*overrides))
    state = trainer.abstract_state
    shards = [math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves((state.params, state.optimizer))]
    vectors = sum(x.size for x in jax.tree.leaves(state.params) if x.shape[-1:] == (32,) and x.size <= 2 * 32)
    return sum(shards), vectors, trainer.count_parameters()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("parallel.data=8",), 1),
        (("parallel.data=8", "parallel.zero=1"), 8),
        (("parallel.data=8", "parallel.zero=2"), 8),
        (("parallel.fsdp=8",), 8),
        (("parallel.data=2", "parallel.fsdp=4"), 4),
        (("parallel.data=2", "parallel.fsdp=4", "parallel.zero=1"), 8),
    ],
    ids=str,
)
def test_weights_and_adams_moments_are_twelve_bytes_a_parameter_over_the_devices_that_share_them(overrides, parts):
    found, vectors, parameters = bytes_of_a_device(*overrides)
    counter = 2 * 4  # of Adam's and the schedule's steps
    assert found == pytest.approx(12 * ((parameters - vectors) / parts + vectors), abs=counter)


def equations(name: str, *overrides: str, **params: Any) -> list[Any]:
    """The traced step's equations of a primitive with these parameters, inside of loops and calls too."""
    trainer = make_trainer(small_config("train.global_batch_size=8", *overrides))
    batch = abstract_batch(batch_at(0, 8), trainer.rules, 8)
    found = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == name and params.items() <= equation.params.items():
                found.append(equation)
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    walk(getattr(inner, "jaxpr", inner))

    walk(jax.make_jaxpr(trainer.steps.train_step)(trainer.abstract_state, batch).jaxpr)
    return found


def shapes_of(name: str, *overrides: str, **params: Any) -> list[tuple[int, ...]]:
    """Shapes of what a primitive with these parameters returns in the traced step."""
    return [x.aval.shape for equation in equations(name, *overrides, **params) for x in equation.outvars]


UP = (2, 32, 48)
"""Shape of the MLP's first matrices, stacked."""


@pytest.mark.parametrize("accumulation", [1, 2])
def test_zero_2_never_has_a_whole_gradient(accumulation):
    over = ("parallel.data=4", f"train.gradient_accumulation={accumulation}")
    assert UP in shapes_of("scan", *over, "parallel.zero=1", reverse=True), "ZeRO 1 adds up whole gradients"
    stacked = shapes_of("scan", *over, "parallel.zero=2", reverse=True)
    assert UP not in stacked and (2, 8, 48) in stacked


@pytest.mark.parametrize("zero", [1, 2])
def test_one_loop_over_the_layers_gathers_all_of_their_matrices(zero):
    """The collectives of two independent loops may meet when XLA's CPU backend runs them concurrently: it aborts."""
    over = ("parallel.data=4", "parallel.prefetch=false")
    assert len(equations("scan", *over, f"parallel.zero={zero}")) == len(equations("scan", *over)) + 1


@pytest.mark.parametrize("remat", ["none", "full"])
def test_fsdp_keeps_no_gathered_weights(remat):
    over = ("parallel.fsdp=4", f"model.remat={remat}")
    kept = shapes_of("scan", *over)
    assert UP not in kept and (2, 8, 48) in kept
    assert shapes_of("all_gather", *over).count(UP[1:]) == 2 * 2, "gate and up, forward and backward"


def test_only_full_rematerialisation_repeats_matmuls():
    plain, none, full = (
        len(shapes_of("dot_general", *over))
        for over in (("parallel.data=4",), ("parallel.fsdp=4",), ("parallel.fsdp=4", "model.remat=full"))
    )
    assert plain == none < full


@pytest.mark.parametrize(
    ("degrees", "zero", "within_a_step", "published"),
    [
        ({"data": 64}, 0, lambda used, stored: 4 * used, 120e9),
        ({"data": 64}, 1, lambda used, stored: 2 * used + 2 * used, 31.4e9),
        ({"data": 64}, 2, lambda used, stored: 2 * used + 4 * stored, 16.6e9),
        ({"fsdp": 64}, 0, lambda used, stored: 4 * stored, 1.9e9),
    ],
    ids=["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"],
)
def test_the_published_bytes_of_seven_and_a_half_billion_parameters_on_64_devices(
    degrees, zero, within_a_step, published
):
    """State as it is sharded, and on top what docs/parallelism.md says of a step's copy and gradients."""
    mesh = jax.sharding.AbstractMesh(tuple(degrees.get(axis, 1) for axis in AXES), AXES)
    layout = make_rules(cast(Mesh, mesh))  # shapes only: no device is asked for
    shape = ("model.hidden_size=4096", "model.num_layers=35", "model.num_heads=32", "model.intermediate_size=10880")
    module = transformer(*shape, "model.vocab_size=51200")

    def bytes_of(tree: Any, specs: Any) -> int:
        local = jax.tree.map(lambda x, spec: math.prod(NamedSharding(mesh, spec).shard_shape(x.shape)), tree, specs)
        return sum(jax.tree.leaves(local))

    stored = bytes_of(module.abstract_params, module.parameter_specs(layout, zero))
    used_specs = module.map_parameters(lambda names, shape, _: layout.parameter_spec(names, shape), layout)
    used = bytes_of(module.abstract_params, used_specs)
    assert 12 * stored + within_a_step(used, stored) == pytest.approx(published, rel=0.02)
