"""Reinforcement learning as it runs on the device: exact rollouts are exact."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import record_choices
from tests.gpu.test_training import MIXTURE, WIDE
from tests.reinforce.exact_runs import compare, sample, spread
from tests.small_runs import make_trainer, small_config

LENGTH = 256
MODELS = {
    "dense": ("model.qk_norm=true",),
    "rolled": ("model.scan_layers=true", "model.tie_word_embeddings=true"),
    "mixture": (MIXTURE,),
}


@pytest.mark.parametrize("name", MODELS)
def test_bits_of_sampler_and_trainer_are_equal(name):
    trainer = spread(make_trainer(small_config(*WIDE, *MODELS[name]), dtype=jnp.bfloat16))
    with record_choices() as choices:
        prompts, answers = sample(trainer, True, LENGTH)
        difference, _ = compare(trainer, prompts, answers, True, LENGTH)
    assert difference.size and not difference.any(), np.abs(difference).max()
    invariant = {c.operation: c.backend for c in choices if "invariant" in c.operation or "tiled" in c.operation}
    assert len(invariant) == 4 and {*invariant.values()} == {"triton"}
    usual, _ = compare(trainer, *sample(trainer, False, LENGTH), False, LENGTH)
    assert usual.any(), "without it they differ"
