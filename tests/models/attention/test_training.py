"""A model of every attention kind learns, and learns the same over several devices."""

import numpy as np
import pytest

from tests.small_runs import make_trainer, run_steps, small_config

TRAINED = {
    "longformer": "{name: longformer, window: 4, global_tokens: 2}",
    "block_sparse": "{name: block_sparse, block_size: 16}",
    "linear": "{name: linear}",
    "performer": "{name: performer, features: 16}",
}


@pytest.mark.parametrize("kind", TRAINED)
def test_a_tiny_model_learns(kind):
    config = small_config(f"model.attention={TRAINED[kind]}", "model.remat=save_attention", "train.sequence_length=32")
    losses = run_steps(make_trainer(config), 10)
    assert losses[-1] < losses[0] - 0.3, losses


@pytest.mark.parametrize("kind", ["longformer", pytest.param("performer", marks=pytest.mark.exhaustive)])
def test_a_layout_over_devices_gives_the_same_losses(kind):
    overrides = [f"model.attention={TRAINED[kind]}", "model.num_kv_heads=4", "train.sequence_length=32"]
    alone = run_steps(make_trainer(small_config(*overrides)), 3)
    split = run_steps(make_trainer(small_config(*overrides, "parallel.data=2", "parallel.tensor=2")), 3)
    np.testing.assert_allclose(split, alone, rtol=1e-5)
