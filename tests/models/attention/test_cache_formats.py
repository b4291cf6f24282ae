"""The cache in few bits: decoding computes what the forward with rounded keys and values computes."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer, with_kv_cache
from jaxstack.models.attention.cache_formats import CACHE_FORMATS, as_stored, magnitude_order
from jaxstack.models.attention.linear import LinearAttention
from jaxstack.models.attention.longformer import LongformerAttention
from jaxstack.models.layer import CacheRoom, PageGroup, PageSlots
from jaxstack.models.rope import apply_rope, rope_cos_sin, rope_frequencies
from jaxstack.precision import PrecisionConfig
from jaxstack.run.build import make_trainer
from jaxstack.run.train import train
from jaxstack.run_config import load_config
from pallas_kernels.low_bits.encoded import stored_bytes
from tests.compilation import run_jitted

BASE = {
    "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
    "intermediate_size": 48, "initialization": "fan_in", "initializer_range": 0.5,
}  # fmt: skip
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5, "scan_layers": False}
T = 24


def make_model(name: str, **changes) -> Transformer:
    return with_kv_cache(Transformer(ModelConfig(**{**BASE, **changes}), nnx.Rngs(0)), name)


def test_the_setting_offers_the_formats_of_the_table():
    assert set(get_args(PrecisionConfig.model_fields["kv_cache"].annotation)) == {"none", *CACHE_FORMATS}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bfp12", {}),
        ("int4", WINDOWS),
        ("fp8", {"attention": LongformerAttention(window=4, global_tokens=3)}),
        pytest.param("int8", {}, marks=pytest.mark.longer),
        pytest.param("bfp12", WINDOWS, marks=pytest.mark.longer),
    ],
)
def test_prefill_and_steps_give_the_logits_of_the_forward_with_rounded_keys(name, changes):
    model = make_model(name, **changes)
    tokens = np.random.default_rng(0).integers(0, 61, (2, T)).astype(np.int32)
    wanted = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens)))
    plain = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(make_model("none", **changes), jnp.asarray(tokens)))
    assert 1e-4 < np.abs(wanted - plain).max() < np.abs(plain).max(), "the forward rounds keys and values"
    lengths = np.array([9, 3], np.int32)
    logits, cache = nnx.jit(lambda *a: a[0].prefill(*a[1:], T))(model, jnp.asarray(tokens[:, :9]), lengths)
    step = nnx.jit(lambda model, *arguments: model.decode(*arguments))
    for done in range(0, 12, 2):
        np.testing.assert_allclose(logits, wanted[[0, 1], lengths + done - 1], rtol=2e-4, atol=2e-4)
        at = (lengths + done)[:, None] + np.arange(2)
        logits, cache = step(model, jnp.asarray(tokens[[[0], [1]], at]), at, cache)
        logits = logits[:, 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_packed_tokens_over_pages_give_the_logits_of_the_forward_with_rounded_keys(name):
    """Chunks of 18 tokens of two sequences, then single tokens."""
    model = make_model(name)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 20)).astype(np.int32)
    wanted = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens)))
    table = np.random.default_rng(1).permutation(12)[:10].reshape(2, 5)
    pages = nnx.jit(lambda model: model.make_shared_cache(CacheRoom(2, 20, 12, 4)))(model)

    @nnx.jit
    def step(model, ids, positions, write, lengths, pages):
        slots = PageSlots(write, (PageGroup(jnp.asarray(table), lengths, len(write) // 2, jnp.arange(2)),))
        hidden, pages = model.decode_packed(ids, positions, slots, pages)
        return model.logits(hidden), pages

    for start, end in ((0, 18), (18, 19), (19, 20)):
        at = np.tile(np.arange(start, end), (2, 1)).astype(np.int32)
        write = np.take_along_axis(table, at // 4, 1) * 4 + at % 4
        ids = jnp.asarray(tokens[:, start:end].ravel())
        lengths = jnp.full(2, end)
        logits, pages = step(model, ids, jnp.asarray(at.ravel()), jnp.asarray(write.ravel()), lengths, pages)
        np.testing.assert_allclose(
            logits.reshape(2, end - start, -1), wanted[:, start:end], rtol=2e-4, atol=2e-4, err_msg=str(start)
        )


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4.5), ("k8v4", 6.25), ("bfp12", 6.25)])
def test_bytes_of_a_cache(name, bits):
    """Bits of a value, of which bfloat16 has 16: int8 takes exactly half of it, scales included."""
    config = ModelConfig(**{**BASE, "head_dim": 128, "scan_layers": False})
    made = jax.eval_shape(lambda: with_kv_cache(Transformer(config, nnx.Rngs(0)), name).make_cache(3, 64))
    layer = made.layers[0]
    assert 8 * (stored_bytes(layer.key) + stored_bytes(layer.value)) == bits * 2 * 3 * 64 * 2 * 128
    order = None if name != "bfp12" else (2, 128)
    assert (layer.key.order and layer.key.order.shape) == order


@pytest.mark.parametrize("width", [32, 12])
def test_the_order_of_channels_is_that_of_rotated_keys(width):
    """The weights of a random projection predict which channels are large after the rotation."""
    random = np.random.default_rng(0)
    scale = np.exp(random.normal(size=(1, 1, 32)))
    kernel = jnp.asarray(random.normal(size=(16, 1, 32)) * scale, jnp.float32)
    x = jnp.asarray(random.normal(size=(1, 4096, 16)), jnp.float32)
    keys = jnp.einsum("btd,dkh->btkh", x, kernel)
    np.testing.assert_array_equal(magnitude_order(kernel, rotated=0)[0], jnp.argsort(jnp.square(kernel).sum(0)[0]))
    frequencies = np.full(width // 2, 1.0) + rope_frequencies(width, 10000.0)
    rotated = apply_rope(keys, rope_cos_sin(jnp.arange(4096)[None], frequencies))
    energies = np.asarray(jnp.square(rotated).mean((0, 1, 2)))[np.asarray(magnitude_order(kernel, rotated=width))[0]]
    assert (energies[2:] > 0.85 * energies[:-2]).all()


def test_a_sorted_cache_rounds_to_the_same_values_in_any_layout():
    """`as_stored` returns keys in their own order, with the error of the sorted blocks."""
    random = np.random.default_rng(0)
    name = CACHE_FORMATS["bfp12"]
    scale = np.exp(2 * random.normal(size=64))
    k = (random.normal(size=(1, 50, 1, 64)) * scale).astype(np.float32)
    order = np.argsort(scale)[None].astype(np.int32)
    rounded = run_jitted(lambda k: [as_stored(k, k, name, given)[0] for given in (jnp.asarray(order), None)], k)
    in_order, as_they_are = (np.square((one - k) / scale).mean() for one in rounded)
    assert in_order < 0.6 * as_they_are


def test_what_has_no_cache_of_this_format_is_refused():
    linear = {"attention": LinearAttention(), "scan_layers": False}
    message = "needs attention.name softmax, longformer or block_sparse.*found attention.name linear"
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda: make_model("int8", **linear).make_cache(1, 8))
    with pytest.raises(ConfigError, match="heads of 8 channels.*blocks of 32.*fp8"):
        jax.eval_shape(lambda: make_model("bfp12", head_dim=8).make_cache(1, 8))
    with pytest.raises(ConfigError, match="heads of 8 channels.*scale of 16 bits does not fit into 8 values.*fp8"):
        jax.eval_shape(lambda: make_model("int8", head_dim=8).make_cache(1, 8))
    spec = make_model("fp8").decoder.layers[0].attention.heads
    assert dataclasses.replace(spec, cache_format=None) == make_model("none").decoder.layers[0].attention.heads


@pytest.mark.quick
def test_training_and_pipelines_refuse_the_setting():
    with pytest.raises(ConfigError, match="precision.kv_cache \\(fp8\\) is a setting of trained models"):
        train(load_config(None, ["precision.kv_cache=fp8"]))
    config = load_config(None, ["precision.kv_cache=fp8", "parallel.pipeline=2"])
    with pytest.raises(ConfigError, match="set parallel.pipeline=1 \\(2\\)"):
        make_trainer(config, lambda step: {})
