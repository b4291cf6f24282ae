"""Gated DeltaNet with gated attention: counted, generated from, served, and the same on several devices."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxstack.models import ModelConfig, count_parameters
from jaxstack.models.count import model_flops_per_token
from jaxstack.optim.base import is_matrix
from tests.models.test_layers import SHAPE, make, serve_and_compare
from tests.parallel.test_layouts import assert_trains_as_one_device

DELTA = dict(num_heads=4, head_dim=6, num_key_heads=2, key_head_dim=8)
HYBRID = dict(
    **{**SHAPE, "num_layers": 4}, delta=DELTA, layer_types=("delta", "delta", "delta", "full_attention"),
    attention={"name": "gated"}, qk_norm=True, norm="rms_norm_unit_offset", partial_rotary_factor=0.5,
)  # fmt: skip
MIXTURE = dict(num_experts=4, moe_intermediate_size=16, n_shared_experts=1, shared_expert_gate=True)


def test_layers_are_counted():
    config = ModelConfig(**HYBRID, moe=MIXTURE)
    params = nnx.state(nnx.eval_shape(lambda: make(config)), nnx.Param)
    assert count_parameters(config).total == sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))
    paths = {"/".join(map(str, keys)): variable for keys, variable in nnx.to_flat_state(params)}
    decayed = {
        path.split("/attention/")[1] for path, x in paths.items() if "layers/0/att" in path and is_matrix(path, x)
    }
    assert decayed == {f"in_proj_{name}/kernel" for name in "qkvzba"} | {"out_proj/kernel"}
    alone = ModelConfig(**SHAPE, delta=DELTA, layer_types=("delta",))
    wanted = 6 * count_parameters(alone).matmul + 7 * 18 * 4 * 8 * 6
    assert model_flops_per_token(alone, 64) == wanted


@pytest.mark.exhaustive
def test_a_hybrid_is_generated_from_and_served():
    serve_and_compare(ModelConfig(**HYBRID))


TRAINED = (
    "model.layer_types=[delta,full_attention]",
    "model.delta={num_heads: 8, head_dim: 4, num_key_heads: 4, key_head_dim: 6}",
    "model.attention={name: gated}",
    "model.num_layers=4",  # two stages of a pipeline need two groups of the layer types
)


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.tensor=2", "parallel.context=2", "parallel.fsdp=2"),
        pytest.param(("parallel.tensor=8",), marks=pytest.mark.exhaustive),  # more devices than heads of keys
        pytest.param(("parallel.pipeline=2", "parallel.context=4"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
def test_layouts_train_as_one_device(overrides):
    """Each device has some heads, and with `context` whole sequences of fewer heads."""
    assert_trains_as_one_device(*overrides, shape=TRAINED)
