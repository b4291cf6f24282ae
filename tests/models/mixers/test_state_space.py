"""State space layers, and others with states: counted, packed, decoded, served, and the same on several devices."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxstack.cost_model.roofline import Workload, model_operators
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, count_parameters
from jaxstack.models.count import model_flops_per_token
from jaxstack.run_config import load_config
from tests.models.test_layers import SHAPE, make, serve_and_compare
from tests.small_runs import make_trainer, run_steps, small_config

SSD = dict(num_heads=4, head_dim=6, state_size=8, n_groups=2)


def test_layers_are_counted():
    for changes in ({}, {"n_groups": 1, "use_bias": True, "use_conv_bias": False}):
        config = ModelConfig(**{**SHAPE, "num_layers": 2}, ssd={**SSD, **changes}, layer_types=("ssd", "ssd_only"))
        stored = nnx.state(nnx.eval_shape(lambda c=config: make(c)), nnx.Param)
        assert count_parameters(config).total == sum(int(np.prod(x.shape)) for x in jax.tree.leaves(stored))
        flops = model_flops_per_token(config, 64)
        assert flops == 6 * count_parameters(config).matmul + 2 * 12 * 4 * 6 * 8
        operators = model_operators(config, Workload(rows=1, length=64))
        counted = sum(x.flops * x.calls for x in operators if x.kind in ("matmul", "attention"))
        assert counted == pytest.approx(64 * flops)


DELTA = dict(num_heads=4, head_dim=6, num_key_heads=2, key_head_dim=8)


@pytest.mark.parametrize(
    "settings", [dict(ssd=SSD, layer_types=("ssd_only",)), dict(delta=DELTA, layer_types=("delta",))]
)
def test_packed_documents_are_as_if_alone_and_decoding_equals_the_full_forward(settings):
    model = make(ModelConfig(**{**SHAPE, "num_layers": 1}, **settings))
    tokens = np.random.default_rng(0).integers(0, 61, (2, 24)).astype(np.int32)
    forward = nnx.jit(lambda model, tokens, segment_ids: model(tokens, segment_ids=segment_ids))
    segments = np.stack([np.repeat([3, 1], [9, 15]), np.zeros(24, int)])
    wanted = forward(model, tokens, np.zeros_like(tokens))
    packed = forward(model, tokens, segments)
    alone = forward(model, np.roll(tokens, -9, axis=1), np.zeros_like(tokens))
    np.testing.assert_allclose(packed[0, :9], wanted[0, :9], atol=1e-5)
    np.testing.assert_allclose(packed[0, 9:], alone[0, :15], atol=1e-5)
    np.testing.assert_allclose(packed[1], wanted[1], atol=1e-5)
    # A prompt that is padded on the left, several tokens, and one, after which rows have different lengths.
    step = nnx.jit(lambda model, *arguments: model.decode(*arguments))
    cache = model.make_cache(2, 24)
    done = np.array([0, 0])
    for counts, width in (((7, 2), 7), ((5, 3), 5), ((0, 1), 1), ((1, 1), 1)):
        places = np.arange(width) - (width - np.array(counts)[:, None])
        at = np.where(places >= 0, places + done[:, None], -1).astype(np.int32)
        given = np.take_along_axis(tokens, np.maximum(at, 0), axis=1)
        logits, cache = step(model, given, at, cache)
        for row, count in enumerate(counts):
            end = done[row] + count
            if count:
                found = logits[row, -1:] if logits.shape[1] == 1 else logits[row, width - count :]
                np.testing.assert_allclose(found, wanted[row, end - len(found) : end], atol=1e-5)
            done[row] = end


@pytest.mark.exhaustive
def test_a_hybrid_is_generated_from_and_served():
    serve_and_compare(ModelConfig(**SHAPE, ssd=SSD, layer_types=("ssd", "ssd_only", "full_attention")))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("groups", "method"), [(1, "auto"), (4, "auto"), (1, "all_gather")])
def test_devices_that_share_heads_and_sequences_train_the_same(groups, method):
    ssd = f"{{num_heads: 4, head_dim: 8, state_size: 8, n_groups: {groups}}}"
    shape = [f"model={{num_layers: 2, layer_types: [ssd, ssd_only], ssd: {ssd}}}", "train.sequence_length=32"]
    alone = run_steps(make_trainer(small_config(*shape)), 3)
    layout = "parallel.tensor=2", "parallel.context=2", f"parallel.context_method={method}"
    split = run_steps(make_trainer(small_config(*shape, *layout)), 3)
    np.testing.assert_allclose(split, alone, rtol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.ssd.n_groups=3"], "num_heads (8) must be divisible by n_groups (3)"),
        (["model.delta.num_key_heads=3"], "num_heads (8) must be divisible by num_key_heads (3)"),
        (["model.ssd.time_step_limit=[0.5, 0.1]"], "must be [smallest, largest]; found [0.5, 0.1]"),
        (["model.ssd.time_step_min=0.5"], "time_step_min (0.5) must be at most time_step_max (0.1)"),
        (["parallel.tensor=16"], "model.ssd.num_heads (8) must be divisible by parallel.tensor (16)"),
        (
            ["parallel.context=16", "parallel.context_method=all_to_all"],
            "model.ssd.num_heads (8) must be divisible by parallel.context (16)",
        ),
        (
            ["parallel.context=2", "parallel.context_method=ring"],
            "layer_types ssd takes parallel.context_method all_gather",
        ),
        (["model.parametrization=mup", "model.base_width=64"], "layer_types has layers of ssd"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, ["model.layer_types=[ssd]", "parallel.simulate_devices=16", *overrides])
    assert message in " ".join(str(error.value).split())
