"""What a Transformer computes: who sees whom, the components of the families, and decoding with a cache."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.block import drop
from jaxstack.models.norm import NORMS, RMSNorm

BASE = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
LARGER = {"initialization": "fan_in", "initializer_range": 0.5}
"""Initial weights that make everything matter."""
FAMILIES = {
    "llama": {"num_kv_heads": 2},
    "gpt2": {
        "positions": "learned", "max_position_embeddings": 32, "norm": "layer_norm", "mlp": "plain",
        "hidden_act": "gelu_tanh", "qkv_bias": True, "output_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    },
    "qwen3": {"qk_norm": True, "head_dim": 6},
    "gemma2": {
        "norm": "rms_norm_unit_offset", "post_norms": True, "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 5, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 9.0,
        "tie_word_embeddings": True, "scale_embeddings": True, "num_layers": 3, "hidden_act": "gelu_tanh",
    },
    "mistral": {"layer_types": ("sliding_attention",), "sliding_window": 4},
    "llama4": {
        "layer_types": ("chunked_attention", "full_attention_no_rope"), "attention_chunk_size": 4, "floor_scale": 2,
        "attn_scale": 0.5, "qk_norm": "without_gain",
    },
    "no positions": {"positions": "none", "hidden_act": "relu_squared"},
}  # fmt: skip
B = 3
T = 16


def build(seed: int = 0, **values) -> Transformer:
    return Transformer(ModelConfig(**{**BASE, **LARGER, **values}), nnx.Rngs(seed))


@nnx.jit
def forward(model: Transformer, tokens, positions=None, segment_ids=None):
    return model(tokens, positions=positions, segment_ids=segment_ids)


@functools.cache
def model_of(family: str) -> Transformer:
    return build(**FAMILIES[family])


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 61, (B, T)).astype(np.int32)


def close(a, b, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


@pytest.mark.longer
@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_token_changes_nothing_before_it(tokens, family):
    other = tokens.copy()
    other[:, 9] = (other[:, 9] + 1) % 61
    first = forward(model_of(family), tokens)
    second = forward(model_of(family), other)
    assert first.shape == (B, T, 61) and first.dtype == jnp.float32
    close(first[:, :9], second[:, :9])
    assert np.abs(first[:, 9:] - second[:, 9:]).max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "llama4"])
def test_packed_documents_are_as_if_alone(tokens, family):
    lengths = [6, 4, 6]
    segments = np.repeat([1, 2, 3], lengths)[None].repeat(B, 0).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].repeat(B, 0).astype(np.int32)
    packed = forward(model_of(family), tokens, positions, segments)
    start = 0
    for length in lengths:
        alone = forward(model_of(family), tokens[:, start : start + length])
        close(packed[:, start : start + length], alone)
        start += length
    assert np.abs(packed - forward(model_of(family), tokens)).max() > 1e-2


def test_a_window_hides_what_lies_behind_it(tokens):
    model = build(layer_types=("sliding_attention",), sliding_window=4, num_layers=1)
    other = tokens.copy()
    other[:, 3] = (other[:, 3] + 1) % 61
    first = forward(model, tokens)
    second = forward(model, other)
    assert np.abs(first[:, 3:7] - second[:, 3:7]).max(axis=(0, 2)).min() > 1e-4
    close(first[:, 7:], second[:, 7:])


def test_a_chunk_hides_the_others(tokens):
    model = build(layer_types=("chunked_attention",), attention_chunk_size=4, num_layers=1)
    other = tokens.copy()
    other[:, 5] = (other[:, 5] + 1) % 61
    first = forward(model, tokens)
    second = forward(model, other)
    assert np.abs(first[:, 5:8] - second[:, 5:8]).max(axis=(0, 2)).min() > 1e-4
    close(first[:, 8:], second[:, 8:])


def test_grouped_queries_equal_repeated_key_heads(tokens):
    grouped = build(num_kv_heads=2)
    full = build()
    state = nnx.state(grouped)
    for name in ("k_proj", "v_proj"):
        kernel = state["decoder"]["layers"][0]["attention"][name]["kernel"]
        kernel.set_value(jnp.repeat(kernel[...], 2, axis=2))
    nnx.update(full, state)
    close(forward(grouped, tokens), forward(full, tokens))


def test_scanned_equals_unrolled(tokens):
    """Also their dropout masks, which each layer draws with its own index."""
    kinds = ("sliding_attention", "full_attention")
    values = {"num_layers": 5, "layer_types": kinds, "sliding_window": 3, "dropout": 0.2}
    scanned = build(**values)
    unrolled = build(scan_layers=False, **values)
    stacks = [nnx.state(layer) for layer in scanned.decoder.layers]
    assert len(stacks) == 3 and len(unrolled.decoder.layers) == 5
    for index, layer in enumerate(unrolled.decoder.layers):
        repeat, kind = divmod(index, 2)
        source = stacks[2] if index == 4 else jax.tree.map(lambda x, r=repeat: x[r], stacks[kind])
        nnx.update(layer, source)
    for part in ("embedding", "final_norm"):
        nnx.update(getattr(unrolled, part), nnx.state(getattr(scanned, part)))
    unrolled.head.set_value(scanned.head[...])
    close(forward(scanned, tokens), forward(unrolled, tokens))
    dropped = nnx.jit(lambda model: model.hidden(tokens, dropout_key=jax.random.key(3)))
    close(dropped(scanned), dropped(unrolled), 1e-4)


def test_tied_head_is_the_embedding(tokens):
    tied = build(tie_word_embeddings=True)
    assert tied.head is None
    untied = build()
    hidden = np.asarray(tied.hidden(tokens))
    close(forward(tied, tokens), hidden @ np.asarray(tied.embedding.table[...]).T, 1e-4)
    assert untied.head.shape == (32, 61)


def test_soft_caps_bound_and_are_close_to_nothing_when_large(tokens):
    plain = build()
    state = nnx.state(plain)
    capped = {cap: build(final_logit_softcapping=cap, attn_logit_softcapping=cap) for cap in (0.5, 1e4)}
    for model in capped.values():
        nnx.update(model, state)
    wanted = forward(plain, tokens)
    assert np.abs(forward(capped[0.5], tokens)).max() <= 0.5 < np.abs(wanted).max()
    close(forward(capped[1e4], tokens), wanted, 1e-4)


def test_final_cap_formula(tokens):
    plain = build()
    capped = build(final_logit_softcapping=2.0)
    nnx.update(capped, nnx.state(plain))
    close(forward(capped, tokens), 2.0 * np.tanh(np.asarray(forward(plain, tokens)) / 2.0), 1e-4)


def test_query_key_norm_forgets_the_scale_of_the_projections(tokens):
    model = build(qk_norm=True, norm_eps=1e-12)
    before = forward(model, tokens)
    for name in ("q_proj", "k_proj"):
        kernel = getattr(model.decoder.layers[0].attention, name).kernel
        kernel.set_value(kernel[...] * 7)
    close(forward(model, tokens), before, 1e-4)


def test_learned_positions_are_looked_up(tokens):
    model = build(positions="learned", max_position_embeddings=40)
    shifted = np.broadcast_to(np.arange(T) + 20, (B, T)).astype(np.int32)
    before = np.asarray(forward(model, tokens, shifted))
    assert np.abs(before - forward(model, tokens)).max() > 1e-3
    table = model.position_embedding.table
    table.set_value(jnp.roll(table[...], -20, axis=0))
    close(forward(model, tokens), before)


def test_rotary_positions_are_relative(tokens):
    model = build()
    shifted = np.broadcast_to(np.arange(T) + 1000, (B, T)).astype(np.int32)
    close(forward(model, tokens, shifted), forward(model, tokens), 1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_a_cache_equals_the_full_forward(tokens, family):
    """A prompt padded at the left, then a token at a time; each row as if it were alone and unpadded."""
    model = model_of(family)
    lengths = [6, 3, 1]
    width = 6
    steps = 4
    prompt = np.zeros((B, width), np.int32)
    positions = np.full((B, width), -1, np.int32)
    for row, length in enumerate(lengths):
        prompt[row, width - length :] = tokens[row, :length]
        positions[row, width - length :] = np.arange(length)
    step = nnx.jit(lambda model, *arguments: model.decode(*arguments))
    logits, cache = step(model, prompt, positions, model.make_cache(B, width + steps))
    found = [[np.asarray(logits[row, -1])] for row in range(B)]
    for i in range(steps):
        ids = np.array([[tokens[row, length + i]] for row, length in enumerate(lengths)], np.int32)
        at = np.array([[length + i] for length in lengths], np.int32)
        logits, cache = step(model, ids, at, cache)
        for row in range(B):
            found[row].append(np.asarray(logits[row, -1]))
    wanted = forward(model, tokens)
    for row, length in enumerate(lengths):
        close(np.stack(found[row]), wanted[row, length - 1 : length + steps], 1e-4)


def test_prefill_gives_the_logits_after_the_last_token_of_each_row(tokens):
    model = model_of("llama")
    lengths = np.array([T, 5, 1], np.int32)
    positions = np.broadcast_to(np.arange(T), (B, T)).astype(np.int32)
    every, cache = model.decode(tokens, positions, model.make_cache(B, T))
    assert cache.seen.tolist() == [T] * B
    last, cache = model.prefill(tokens, lengths, T)
    close(np.asarray(every)[np.arange(B), lengths - 1], last)
    assert cache.seen.tolist() == lengths.tolist()


def test_dropout_needs_a_key_and_keeps_the_mean(tokens):
    model = build(dropout=0.4)
    run = nnx.jit(lambda model, key: model.hidden(tokens, dropout_key=key))
    close(forward(model, tokens), model.logits(model.hidden(tokens)))
    first, again, other = (run(model, jax.random.key(seed)) for seed in (0, 0, 1))
    assert (np.asarray(first) == np.asarray(again)).all() and np.abs(first - other).max() > 0.1
    ones = jnp.ones((200, 200))
    dropped = drop(ones, 0.4, jax.random.key(0))
    assert float(dropped.mean()) == pytest.approx(1, abs=0.02)
    assert float((dropped == 0).mean()) == pytest.approx(0.4, abs=0.02)
    assert drop(ones, 0.4, None) is ones and drop(ones, 0.0, jax.random.key(0)) is ones


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_loss_is_that_of_a_uniform_guess(family, tokens):
    values = {**FAMILIES[family], "initialization": "depth_scaled", "initializer_range": 0.02}
    model = Transformer(ModelConfig(**{**BASE, **values}), nnx.Rngs(0))
    logits = jax.nn.log_softmax(forward(model, tokens[:, :-1]))
    loss = -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()
    assert float(loss) == pytest.approx(math.log(61), rel=0.05)


def test_initialization_follows_the_papers():
    def spread(initialization: str) -> tuple[float, float, float]:
        model = build(initialization=initialization, initializer_range=0.02, hidden_size=256, num_layers=8)
        attention = model.decoder.layers[0].attention
        matrices = (attention.q_proj.kernel, attention.o_proj.kernel, model.embedding.table)
        return tuple(float(jnp.std(matrix[...])) for matrix in matrices)

    assert spread("normal") == pytest.approx((0.02, 0.02, 0.02), rel=0.03)
    assert spread("depth_scaled") == pytest.approx((0.02, 0.02 / 4, 0.02), rel=0.03)
    assert spread("fan_in") == pytest.approx((1 / 16, 1 / 64, 0.02), rel=0.03)


def test_layers_start_different():
    kernel = build(num_layers=3).decoder.layers[0].attention.q_proj.kernel[...]
    assert kernel.shape[0] == 3 and float(jnp.abs(kernel[0] - kernel[1]).max()) > 0.01


def test_bfloat16_computation_keeps_float32_weights(tokens):
    model = Transformer(ModelConfig(**BASE), nnx.Rngs(0), dtype=jnp.bfloat16)
    assert model.hidden(tokens).dtype == jnp.bfloat16 and model(tokens).dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}


def test_a_vocabulary_is_needed():
    with pytest.raises(ValueError, match="vocab_size"):
        Transformer(ModelConfig(), nnx.Rngs(0))


class OwnNorm(nnx.Module):
    """What `docs/add-a-model.md` asks of a norm: no more than a scale and a call."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size), logical_axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.eps) * self.scale[...]


def test_a_norm_of_a_users_own(tokens, monkeypatch):
    expected = forward(build(), tokens)
    assert NORMS["rms_norm"] is RMSNorm
    monkeypatch.setitem(NORMS, "rms_norm", OwnNorm)
    close(forward(build(), tokens), expected)
