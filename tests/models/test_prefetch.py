"""A scan that gathers weights a layer ahead computes what the plain scan does."""

import jax
import numpy as np
import pytest

from jaxstack.errors import ConfigError
from jaxstack.trainer import Trainer
from tests.small_runs import make_trainer, small_config

MOE = ("model.moe.num_experts=4", "model.moe.num_experts_per_tok=2")


def layout(**degrees: int) -> tuple[str, ...]:
    return tuple(f"parallel.{axis}={degree}" for axis, degree in degrees.items())


def sums(trainer: Trainer):
    """The sums of the first batch, with the loss alone as an evaluation computes it."""
    batches = trainer.batches(0)
    batch = next(batches)[0]
    batches.close()
    state = trainer.state
    gradients = trainer.steps.gradients

    def compute(params, non_params, key):
        found, non_params = gradients(params, non_params, batch, key)
        return found, non_params, gradients.loss(params, non_params, batch)

    with jax.set_mesh(trainer.rules.mesh):
        return jax.device_get(jax.jit(compute)(state.params, state.non_params, jax.random.key(1)))


def slow(*overrides: str) -> object:
    return pytest.param(overrides, marks=pytest.mark.exhaustive)


WINDOWS = ("model.layer_types=[sliding_attention, full_attention]", "model.sliding_window=4")
FP8 = (*layout(fsdp=2), "model.num_layers=5", "model.unscanned_end_layers=1", "model.remat=none")


@pytest.mark.parametrize(
    "overrides",
    [
        (*layout(fsdp=2), "model.num_layers=5", "model.dropout=0.1", "model.remat=none"),
        (*layout(fsdp=2, data=2), "model.num_layers=4", "model.remat=full", "train.gradient_accumulation=2"),
        slow(*FP8, "precision.fp8=delayed"),
        slow(*FP8, "precision.fp8=current"),
        slow(*FP8, "precision.fp8=blockwise"),
        slow(*layout(fsdp=4), "model.num_layers=2"),
        slow(*layout(fsdp=2, tensor=2), "model.num_layers=4", "model.remat=save_attention"),
        slow(*layout(fsdp=2, context=2), "model.num_layers=4", "model.remat=save_dots"),
        slow(*layout(fsdp=2, expert=2), "model.num_layers=4", "model.remat=none", *MOE),
        slow(*layout(fsdp=2), "model.num_layers=8", *WINDOWS),
        slow(*layout(fsdp=2), "model.num_layers=4", "adapters.rules=[{path: q_proj, method: dora, rank: 2}]"),
    ],
    ids=lambda overrides: " ".join(overrides),
)
@pytest.mark.exhaustive
def test_gradients_are_those_of_the_plain_scan(overrides):
    config = small_config("train.global_batch_size=8", *overrides)
    ahead = small_config("train.global_batch_size=8", *overrides, "parallel.prefetch=true")
    wanted = sums(make_trainer(config))
    found = sums(make_trainer(ahead))
    assert wanted[0].loss > 0 and max(np.abs(x).max() for x in jax.tree.leaves(wanted[0].gradients)) > 1e-3

    def compare(found, wanted):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())

    jax.tree.map(compare, found, wanted)


@pytest.mark.parametrize(
    "override", ["model.scan_layers=false", "model.remat=save_attention_offload", "parallel.pipeline=2"]
)
def test_what_is_not_gathered_ahead_is_refused(override):
    with pytest.raises(ConfigError, match=r"parallel\.prefetch needs model\.scan_layers=true.* or remove it"):
        small_config("parallel.prefetch=true", "parallel.fsdp=2", override)
