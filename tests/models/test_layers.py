"""Layers as records: types of layers, scans over any repeating pattern, and a token mixer that is added in one file."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.cost_model.model_shape import model_shape
from jaxstack.cost_model.roofline import Workload, model_operators
from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.sampling import Sampling
from jaxstack.models import ModelConfig, Transformer, count_parameters
from jaxstack.models.attention import SoftmaxAttention
from jaxstack.models.attention.slot_cache import decode_slots
from jaxstack.models.block import MIXERS
from jaxstack.models.config import LAYER_TYPES, LayerType
from jaxstack.models.count import model_flops_per_token
from jaxstack.models.initialization import make_initializer
from jaxstack.models.linear import Linear
from jaxstack.models.mixer import Layer, Mixer, ParameterCount
from jaxstack.models.restack import restack
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
from jaxstack.parallel.sharding_context import logical_axis_rules
from tests.serve.test_engine import expected, prompts

SHAPE = dict(
    vocab_size=61, hidden_size=32, num_layers=7, num_heads=4, num_kv_heads=2, intermediate_size=48,
    initialization="fan_in", initializer_range=0.5, max_position_embeddings=128, sliding_window=8,
)  # fmt: skip
TYPES = ("attention_only", "feed_forward_only", "sliding_attention")


def make(config: ModelConfig) -> Transformer:
    return Transformer(config, nnx.Rngs(0))


def test_a_record_says_what_each_layer_consists_of():
    config = ModelConfig(**SHAPE, layer_types=TYPES, rope_local_base_freq=100.0, moe={"num_experts": 2})
    attention = SoftmaxAttention()
    assert config.layers()[:3] == (
        Layer(attention, None, "global", None),
        Layer(None, None, None, "experts"),
        Layer(attention, 8, "local", "experts"),
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


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.exhaustive
def test_layers_of_one_sublayer_are_generated_from_and_served(scan):
    serve_and_compare(ModelConfig(**SHAPE, layer_types=TYPES, scan_layers=scan))


ADDED = {
    "norms of outputs": dict(pre_norms=False, post_norms=True),
    "one norm of all heads": dict(qk_norm="all_heads"),
    "factors": dict(scale_embeddings=3.0, residual_multiplier=0.5, logits_scaling=2.0),
    "half of each head rotates": dict(partial_rotary_factor=0.5),
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


def test_a_model_without_any_norm_is_refused():
    with pytest.raises(ValueError, match="pre_norms: false needs post_norms: true"):
        ModelConfig(**SHAPE, pre_norms=False)


def test_layers_without_a_mixer_alone_are_refused():
    with pytest.raises(ValueError, match=r"layer_types \(feed_forward_only\) must have a type"):
        ModelConfig(**SHAPE, layer_types=("feed_forward_only",))


class ShiftMixer(Mixer):
    """Configuration of the mixer that adds a projection of the token before; not shipped."""

    name: str = "shift"
    scale: float = 1.0


class LastInput(NamedTuple):
    """The last input of each row."""

    x: Float[Array, "B D"]


class Shift(nnx.Module):
    """A token mixer with weights, a state and FLOPs of its own: out(x_t + scale in(x_{t-1})); not shipped."""

    def __init__(self, config: ModelConfig, layer: Layer, rngs: nnx.Rngs):
        d = config.hidden_size
        inner = make_initializer(config)
        outer = make_initializer(config, residual=True)
        self.in_proj = Linear((d,), (d,), ("embed", "mlp"), rngs=rngs, initialize=inner)
        self.out_proj = Linear((d,), (d,), ("mlp", "embed"), rngs=rngs, initialize=outer)
        self.scale = layer.mixer.scale
        self.width = d

    def __call__(self, x, context, cache=None):
        x = getattr(x, "carrier", x)
        if cache is None:
            return self._mix(x, LastInput(jnp.zeros_like(x[:, 0])), None)[0], None
        if context.slots.pages is None:
            return self._mix(x, cache, context.slots)
        out, cache = decode_slots(self._mix, [x.reshape(1, -1, self.width)], cache, context.slots)
        return out.reshape(x.shape), cache

    def _mix(self, x, cache, slots):
        before = jnp.concatenate([cache.x[:, None].astype(x.dtype), x[:, :-1]], axis=1)
        last = x[:, -1]
        if slots is not None:
            # A row's padding stands before its tokens in a packed group.
            first = slots.queries == slots.seen[:, None]
            before = jnp.where(first[..., None], cache.x[:, None], before)
            last = jnp.where((slots.queries >= 0).any(1)[:, None], last, cache.x)
        return self.out_proj(x + self.scale * self.in_proj(before)), LastInput(last)

    def make_cache(self, batch, length, dtype):
        return LastInput(jnp.zeros((batch, self.width), dtype))

    def make_shared_cache(self, room, dtype):
        return self.make_cache(room.slots, room.length, dtype)

    def complete_cache(self, cache):
        return cache

    @staticmethod
    def count(config, layer) -> ParameterCount:
        return ParameterCount(2 * config.hidden_size**2, 0)

    @staticmethod
    def flops_per_token(config, layer, length) -> float:
        return 6.0 * config.hidden_size


@pytest.fixture
def shift_config(monkeypatch) -> type[ModelConfig]:
    """The configuration with a key and a layer type for the new mixer."""
    monkeypatch.setitem(MIXERS, ShiftMixer, Shift)
    monkeypatch.setitem(LAYER_TYPES, "shift", LayerType(mixer="shift"))

    class ShiftConfig(ModelConfig):
        shift: ShiftMixer = ShiftMixer(scale=0.5)

    return ShiftConfig


def test_a_mixer_of_its_own_file_is_built_counted_and_served(shift_config):
    config = shift_config(**SHAPE, layer_types=("shift", "shift", "full_attention"))
    stored = nnx.state(nnx.eval_shape(lambda: make(config)), nnx.Param)
    assert count_parameters(config).total == sum(int(np.prod(x.shape)) for x in jax.tree.leaves(stored))
    attention = config.model_copy(update={"layer_types": ("full_attention",)})
    of_attention = (model_flops_per_token(attention, 64) - 6 * count_parameters(attention).matmul) / 7
    wanted = 6 * count_parameters(config).matmul + 5 * 6 * 32 + 2 * of_attention
    assert model_flops_per_token(config, 64) == pytest.approx(wanted)
    serve_and_compare(config)


def test_a_mixer_without_a_module_is_refused(shift_config, monkeypatch):
    monkeypatch.delitem(MIXERS, ShiftMixer)
    with pytest.raises(KeyError, match="no module computes ShiftMixer"):
        make(shift_config(**SHAPE, layer_types=("shift", "full_attention")))


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
