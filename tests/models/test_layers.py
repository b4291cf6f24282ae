"""Layers as records: types of layers, layers of one sublayer, and scans over any repeating pattern."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from jaxstack.compress.after_training.calibrate import LayerRunner
from jaxstack.cost_model.model_shape import model_shape
from jaxstack.cost_model.roofline import Workload, model_operators
from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer, count_parameters, preset_config
from jaxstack.models.attention import SoftmaxAttention
from jaxstack.models.attention.gemma import GemmaAttention
from jaxstack.models.layer import Layer
from jaxstack.models.restack import restack
from jaxstack.models.stages import make_repetition_function
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
from jaxstack.parallel.sharding_context import logical_axis_rules
from jaxstack.run.load import open_window
from tests.serve.test_engine import expected, prompts

SHAPE = dict(
    vocab_size=61, hidden_size=32, num_layers=7, num_heads=4, num_kv_heads=2, intermediate_size=48,
    initialization="fan_in", initializer_range=0.5, max_position_embeddings=128, sliding_window=8,
)  # fmt: skip
SHARED_KEYS = Path(__file__).parent / "huggingface" / "gemma4-shared-keys"
TYPES = ("attention_only", "feed_forward_only", "sliding_attention")


def make(config: ModelConfig) -> Transformer:
    return Transformer(config, nnx.Rngs(0))


def test_a_record_says_what_each_layer_consists_of():
    config = ModelConfig(**SHAPE, layer_types=TYPES, rope_local_base_freq=100.0, moe={"num_experts": 2})
    attention = SoftmaxAttention()
    assert config.layers()[:3] == (
        Layer(attention, rotation="global", feed_forward=None),
        Layer(None, feed_forward="experts"),
        Layer(attention, 8, rotation="local", feed_forward="experts"),
    )
    assert config.layers()[3:] == (*config.layers()[:3], config.layers()[0])
    assert config.mixers() == [attention]
    assert (config.dense_layers, config.mixture_layers) == (0, 4)
    assert set(config.rotations()) == {"global", "local"}


def test_layers_of_one_sublayer_have_only_its_weights():
    blocks = make(ModelConfig(**SHAPE, layer_types=TYPES, scan_layers=False)).decoder.layers
    assert blocks[0].mlp is None and blocks[0].mlp_norm is None
    assert blocks[1].attention is None and blocks[1].attention_norm is None
    assert blocks[2].mlp is not None and blocks[2].attention is not None


@pytest.mark.parametrize("post_norms", [False, True])
def test_parameters_of_layers_of_one_sublayer_are_counted(post_norms):
    config = ModelConfig(**SHAPE, layer_types=TYPES, post_norms=post_norms, qkv_bias=True)
    stored = nnx.state(nnx.eval_shape(lambda: make(config)), nnx.Param)
    assert count_parameters(config).total == sum(int(np.prod(x.shape)) for x in jax.tree.leaves(stored))


def test_a_scan_of_a_pattern_of_records_equals_unrolled_layers():
    config = ModelConfig(**SHAPE, layer_types=TYPES)
    unrolled = config.model_copy(update={"scan_layers": False})
    scanned, single = (ModuleArrays(lambda rngs, c=c: Transformer(c, rngs)) for c in (config, unrolled))
    params, others = scanned.init(jax.random.key(0))
    model = scanned.merge(params, others)
    assert (model.decoder.period, model.decoder.repeats, len(model.decoder.layers)) == (3, 2, 4)
    same = single.merge(restack(params, config, unrolled), single.init(jax.random.key(0))[1])
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, 61)
    np.testing.assert_allclose(model(tokens), same(tokens), atol=1e-5)


def test_the_cost_model_counts_the_sublayers_that_there_are():
    config = ModelConfig(**SHAPE, layer_types=TYPES)
    calls = {operator.name: operator.calls for operator in model_operators(config, Workload(rows=1, length=64))}
    assert calls["query, key, value projection"] == 5
    assert calls["attention"] == 3
    assert calls["attention, window 8"] == 2
    assert calls["feed-forward, down"] == 4
    assert calls["residual connection"] == 9
    shape = model_shape(config)
    assert shape.matmul == 7 * shape.active_layer_parameters + 61 * 32


def test_the_cost_model_counts_reused_keys_and_embeddings_of_each_layer():
    config = preset_config("gemma4-e2b")
    work = Workload(rows=1, length=64)
    matmuls = [operator for operator in model_operators(config, work) if operator.kind == "matmul"]
    flops = sum(operator.flops * operator.calls for operator in matmuls)
    assert flops == 6 * count_parameters(config).matmul * work.tokens
    assert model_shape(config).tables == 262144 * (1536 + 35 * 256)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.exhaustive
def test_layers_of_one_sublayer_are_generated_from_and_served(scan):
    serve_and_compare(ModelConfig(**SHAPE, layer_types=TYPES, scan_layers=scan))


ADDED = {
    "norms of outputs": dict(pre_norms=False, post_norms=True),
    "one norm of all heads": dict(qk_norm="all_heads"),
    "factors": dict(scale_embeddings=3.0, residual_multiplier=0.5, logits_scaling=2.0),
    "half of each head rotates": dict(partial_rotary_factor=0.5),
    "keys of earlier layers, embeddings of each layer": dict(
        layer_types=("sliding_attention", "full_attention"),
        attention=GemmaAttention(),
        qk_norm=True,
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
    ),
    "layers without rotary positions": dict(layer_types=("full_attention", "full_attention_no_rope")),
}


@pytest.mark.parametrize("settings", ADDED.values(), ids=list(ADDED))
def test_parts_of_newer_models_are_counted_and_served(settings):
    config = ModelConfig(**SHAPE, **settings, scan_layers=False)
    stored = nnx.state(nnx.eval_shape(lambda: make(config)), nnx.Param)
    assert count_parameters(config).total == sum(int(np.prod(x.shape)) for x in jax.tree.leaves(stored))
    serve_and_compare(config)


def test_one_norm_of_all_heads_is_the_same_where_devices_share_the_heads():
    module = ModuleArrays(lambda rngs: Transformer(ModelConfig(**SHAPE, qk_norm="all_heads"), rngs))
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, 61)

    def logits(devices: int) -> np.ndarray:
        rules = make_rules(make_mesh(ParallelConfig(tensor=devices), jax.devices()[:devices]))
        shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
        params, others = jax.jit(module.init, out_shardings=(shardings, None))(jax.random.key(0))
        scale = params["decoder"]["layers"]["0"]["attention"]["q_norm"]["scale"]
        assert scale.sharding.shard_shape(scale.shape)[-2] == 4 // devices

        @jax.jit
        def run(params, others):
            with logical_axis_rules(rules):
                return module.merge(params, others)(tokens)

        with jax.set_mesh(rules.mesh):
            return np.asarray(run(params, others))

    np.testing.assert_allclose(logits(2), logits(1), atol=2e-5)


@pytest.mark.parametrize(
    "run",
    [
        make_repetition_function,
        lambda model: LayerRunner(model.dtype, None).embed(model, []),
        lambda model: open_window(SHARED_KEYS, 2),
    ],
    ids=["pipeline", "calibration", "layers read from disk"],
)
def test_what_runs_layers_apart_refuses_those_that_read_more_than_their_input(run):
    model = nnx.eval_shape(lambda: make(ModelConfig(**SHAPE, hidden_size_per_layer_input=8)))
    with pytest.raises(ConfigError, match="passes only the residual stream .* hidden_size_per_layer_input is 8"):
        run(model)


def test_a_model_without_any_norm_is_refused():
    with pytest.raises(ValueError, match="pre_norms: false needs post_norms: true"):
        ModelConfig(**SHAPE, pre_norms=False)


def test_layers_without_a_mixer_alone_are_refused():
    with pytest.raises(ValueError, match=r"layer_types \(feed_forward_only\) must have a type"):
        ModelConfig(**SHAPE, layer_types=("feed_forward_only",))


def serve_and_compare(config: ModelConfig):
    """Chunks of prompts and more requests than slots, against whole forward passes."""
    module = ModuleArrays(lambda rngs: Transformer(config, rngs))
    rules = make_rules(make_mesh(ParallelConfig(), jax.devices()[:1]))
    decoder = Decoder(module, *module.init(jax.random.key(0)), rules)
    asked = prompts([40, 3, 21])
    wanted = [expected(decoder, prompt, 4) for prompt in asked]
    assert len({tuple(answer) for answer in wanted}) > 1
    greedy = Sampling(temperature=0)
    rows = list(decoder.generate(asked, 4, greedy))
    assert [[int(row[i]) for row in rows] for i in range(3)] == wanted
    with Engine(decoder, EngineConfig(slots=2, chunk=16), warm_up=False) as engine:
        handles = [engine.submit(prompt, 4, greedy) for prompt in asked]
        assert [handle.result() for handle in handles] == wanted
