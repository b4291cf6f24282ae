"""Pipelines train as one device does: the same losses and parameters, for every schedule and in every company."""

import jax
import numpy as np
import pytest

from jaxstack.errors import ConfigError
from jaxstack.models.remat import POLICIES
from jaxstack.parallel import make_mesh
from jaxstack.trainer import Trainer
from tests.parallel.test_layouts import assert_trains_as_one_device, train
from tests.small_runs import batch_at, make_trainer, small_config

FOUR = ("model.num_layers=4",)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def pipeline(stages: int, schedule: str = "1f1b", **degrees: int) -> tuple[str, ...]:
    found = (f"parallel.pipeline={stages}", f"parallel.pipeline_schedule={schedule}")
    return (*found, *(f"parallel.{axis}={degree}" for axis, degree in degrees.items()))


@pytest.mark.parametrize(
    "overrides",
    [
        pipeline(2),
        pytest.param(pipeline(2, "interleaved", data=2, tensor=2), marks=pytest.mark.exhaustive),
        pytest.param(pipeline(2, "zero_bubble", fsdp=2, tensor=2, microbatches=4), marks=pytest.mark.exhaustive),
        pipeline(2, "1f1b", data=2, fsdp=2),
        pytest.param(pipeline(4, "1f1b", fsdp=2), marks=pytest.mark.exhaustive),
        pytest.param(pipeline(4, "gpipe", data=2, zero=1), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
def test_eight_devices_give_the_loss_curve_of_one(overrides):
    assert_trains_as_one_device(*overrides, shape=FOUR)


def every_factorisation_of_eight() -> list[tuple[str, ...]]:
    """pipeline x data x fsdp x tensor = 8 with every schedule; numbers of microbatches and sequence in turn."""
    found = []
    for stages in (2, 4, 8):
        rest = 8 // stages
        for data, fsdp in [(d, f) for d in (1, 2, 4) for f in (1, 2, 4) if rest % (d * f) == 0]:
            tensor = rest // data // fsdp
            for schedule in SCHEDULES:
                rows = 16 // data // fsdp
                fits = [m for m in (2, 4, 8, 16) if rows % m == 0 and (schedule != "interleaved" or m % stages == 0)]
                if not fits or (schedule == "interleaved" and stages == 8):
                    continue
                extra = {"microbatches": fits[len(found) % len(fits)]}
                overrides = pipeline(stages, schedule, data=data, fsdp=fsdp, tensor=tensor, **extra)
                sequence = ("parallel.sequence=true",) if tensor > 1 and len(found) % 2 else ()
                found.append((*overrides, *sequence))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", every_factorisation_of_eight(), ids=" ".join)
def test_every_factorisation_with_every_schedule(overrides):
    assert_trains_as_one_device(*overrides, shape=("model.num_layers=8",))


ODD_SHAPE = (
    "train.global_batch_size=12",
    "model.num_heads=6",
    "model.num_kv_heads=1",
    "model.head_dim=6",
    "model.num_layers=7",
    "model.layer_types=[sliding_attention,full_attention]",
    "model.sliding_window=5",
    "model.vocab_size=61",
    "model.tie_word_embeddings=true",
    "model.qkv_bias=true",
    "model.post_norms=true",
    "model.positions=learned",
    "model.max_position_embeddings=16",
    "model.attn_logit_softcapping=20",
    "model.final_logit_softcapping=10",
    "model.remat=full",
    "train.z_loss=0.001",
    "optimizer.learning_rate=0.002",  # with 0.01 the third gradient turns a rounding of 6e-8 into 1e-4
)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((*pipeline(2, "zero_bubble", fsdp=3), "model.remat=save_dots"), marks=pytest.mark.exhaustive),
        pytest.param((*pipeline(3, "1f1b", tensor=2),), marks=pytest.mark.exhaustive),
        pytest.param((*pipeline(3, "gpipe", data=2), "model.remat=save_attention"), marks=pytest.mark.exhaustive),
        pytest.param((*pipeline(2, "1f1b", fsdp=2), "model.remat=none"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
def test_alternating_layers_tied_embeddings_and_uneven_stages(overrides):
    """Three pairs of layers and one over, on stages that they do not divide; 61 ids; a key head that all share."""
    assert_trains_as_one_device(*overrides, shape=ODD_SHAPE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rematerialisation(remat, schedule):
    assert_trains_as_one_device(*pipeline(2, schedule, fsdp=2), f"model.remat={remat}", shape=FOUR)


@pytest.mark.exhaustive
def test_rematerialised_mixture_of_experts():
    moe = "model.moe={num_experts: 4, num_experts_per_tok: 2, router_aux_loss_coef: 0.0}"
    assert_trains_as_one_device(*pipeline(2), shape=(*FOUR, moe, "model.remat=full"))


@pytest.mark.parametrize(
    "overrides, layers",
    [
        (pipeline(2, "interleaved", tensor=2), 5),
        pytest.param(pipeline(3, "1f1b"), 5, marks=pytest.mark.exhaustive),
        pytest.param(pipeline(2, "interleaved"), 5, marks=pytest.mark.exhaustive),
        pytest.param(pipeline(6, "zero_bubble"), 7, marks=pytest.mark.exhaustive),
        pytest.param((*pipeline(2, "zero_bubble"), "model.scan_layers=false"), 4, marks=pytest.mark.exhaustive),
        pytest.param((*pipeline(3, "1f1b"), "model.scan_layers=false"), 5, marks=pytest.mark.exhaustive),
        pytest.param((*pipeline(2, "interleaved"), "model.scan_layers=false"), 5, marks=pytest.mark.exhaustive),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else str(x),
)
def test_layers_that_the_stages_do_not_divide_and_unrolled_ones(overrides, layers):
    unrolled = tuple(x for x in overrides if "scan_layers" in x)
    assert_trains_as_one_device(*overrides, shape=(f"model.num_layers={layers}", *unrolled))


@pytest.mark.exhaustive
def test_dropout_draws_what_one_device_draws():
    shape = ("model.dropout=0.2", "model.remat=full")
    losses = train(*pipeline(2), shape=shape).losses
    wanted = train(shape=shape).losses
    without = train(shape=shape[1:]).losses
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert abs(wanted[0] - without[0]) > 1e-4


def test_held_out_loss_is_that_of_one_device():
    held_out = [batch_at(1000 + i, 16) for i in range(2)]
    losses = []
    for overrides in ((), (*pipeline(2, "interleaved", data=2),)):
        config = small_config(*FOUR, "train.global_batch_size=16", *overrides)
        trainer = make_trainer(config, eval_data=held_out)
        losses.append(trainer.evaluate())
    assert losses[0]["eval_items"] == losses[1]["eval_items"]
    assert losses[1]["eval_loss"] == pytest.approx(losses[0]["eval_loss"], rel=1e-5)


def test_a_device_holds_only_its_own_stages():
    trainer = make_trainer(small_config(*FOUR, "train.global_batch_size=16", *pipeline(4)))
    state = trainer.state
    kernel = state.params["decoder"]["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    assert {shard.data.shape[0] for shard in kernel.addressable_shards} == {1}
    total = sum(x.nbytes for x in jax.tree.leaves((state.params, state.optimizer)))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((state.params, state.optimizer)))
    assert held < 0.27 * total, "embedding and head are split over the stages too"


def test_the_trained_model_is_the_plain_one():
    trainer = make_trainer(small_config("model.num_layers=3", "train.global_batch_size=16", *pipeline(2)))
    plain = make_trainer(small_config("model.num_layers=3", "train.global_batch_size=16"))

    def same(a, b):
        return np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)

    jax.tree.map(same, jax.device_get(trainer.stored_state.params), jax.device_get(plain.state.params))
    tokens = batch_at(0, 4)["tokens"]
    same(trainer.trained_module(tokens), plain.trained_module(tokens))


def test_other_modules_are_refused_with_what_they_can_use():
    from flax import nnx

    mesh = make_mesh(small_config(*pipeline(2)).parallel, jax.devices()[:2])
    with pytest.raises(ConfigError, match="Transformer into stages; found Linear"):
        Trainer(lambda rngs: nnx.Linear(4, 4, rngs=rngs), lambda m, b: 0.0, lambda step: None, mesh=mesh)
