"""What a device holds: the ZeRO paper's table (Rajbhandari et al. 2020), for every axis that splits the state."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxstack.data.device_batches import abstract_batch
from tests.small_runs import batch_at, make_trainer, small_config

LAYERS = 4
D = 32
F = 80
SHAPE = (f"model.num_layers={LAYERS}", "train.global_batch_size=16", f"model.intermediate_size={F}")


def bytes_of_a_device(*overrides: str) -> tuple[int, int]:
    """(bytes of weights and moments on a device, bytes of the vectors among them, which are whole everywhere)."""
    state = make_trainer(small_config(*SHAPE, *overrides)).abstract_state
    held = vectors = 0
    for leaf in jax.tree.leaves((state.params, state.optimizer)):
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        held += size
        vectors += size if leaf.ndim < 2 or leaf.shape == (LAYERS, D) else 0
    return held, vectors


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("parallel.data=4",), 1),
        (("parallel.data=4", "parallel.zero=1"), 4),
        (("parallel.data=4", "parallel.zero=2"), 4),
        (("parallel.fsdp=4",), 4),
        (("parallel.context=4",), 4),
        (("parallel.fsdp=2", "parallel.context=4"), 8),
        (("parallel.data=2", "parallel.fsdp=2"), 2),
        (("parallel.data=2", "parallel.context=2", "parallel.zero=2"), 4),
        (("parallel.data=2", "parallel.fsdp=2", "parallel.context=2", "parallel.zero=1"), 8),
    ],
    ids=str,
)
def test_weights_and_moments_are_12_bytes_a_parameter_over_the_devices_that_share_them(overrides, parts):
    whole, vectors = bytes_of_a_device()
    count = make_trainer(small_config(*SHAPE)).count_parameters()
    assert whole == pytest.approx(12 * count, abs=64), "a float32 weight and two moments; Adam counts its steps"
    held, found = bytes_of_a_device(*overrides)
    assert found == vectors
    assert held == vectors + (whole - vectors) // parts


@pytest.mark.exhaustive
@pytest.mark.parametrize("scan", ["true", "false"])
def test_with_zero_2_no_stage_of_a_pipeline_has_whole_gradients(scan):
    """The float32 sums of a stage's two layers: whole with ZeRO-1, in two parts with ZeRO-2."""

    def text(zero: int) -> str:
        layout = ("parallel.pipeline=2", "parallel.data=2", f"parallel.zero={zero}", f"model.scan_layers={scan}")
        # In another dtype than the gathered copy of the weights.
        trainer = make_trainer(small_config(*SHAPE, *layout), dtype=jnp.bfloat16)
        batch = abstract_batch(batch_at(0, 16), trainer.rules, 16)
        return str(jax.make_jaxpr(trainer.steps.train_step)(trainer.abstract_state, batch))

    whole = f"f32[2,{D},{F}]" if scan == "true" else f"f32[{D},{F}] = broadcast_in_dim"
    assert whole in text(1)
    assert whole not in text(2)
