"""Decoding with a cache computes what the whole forward computes, for every kind of cache; and what a cache holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.models import ModelConfig, Transformer, unroll_layers
from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.attention.block_sparse import BlockSparseAttention, StridedPattern
from jaxstack.models.attention.gemma import GemmaAttention
from jaxstack.models.attention.kv_cache import (
    KeyCache,
    attend_newest,
    attend_to,
    empty_cache,
    put,
    slot_positions,
    store,
)
from jaxstack.models.attention.linear import LinearAttention
from jaxstack.models.attention.longformer import LongformerAttention
from jaxstack.models.attention.performer import PerformerAttention
from jaxstack.models.attention.projected import ProjectedAttention
from jaxstack.models.layer import CacheSlots
from jaxstack.models.moe.router import MoEConfig
from jaxstack.module_arrays.module import ModuleArrays

BASE = {
    "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48,
    "initialization": "fan_in", "initializer_range": 0.5,
}  # fmt: skip
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
MODELS = {
    "every key": {},
    "windows, soft caps": {
        **WINDOWS, "num_layers": 3, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "post_norms": True,
        "rope_local_base_freq": 100.0,
    },
    "learned positions, windows only": {
        "positions": "learned", "max_position_embeddings": 40, "layer_types": ("sliding_attention",),
        "sliding_window": 4, "norm": "layer_norm", "tie_word_embeddings": True, "num_kv_heads": None,
    },
    "chunks, scaled queries": {
        "layer_types": ("chunked_attention", "full_attention_no_rope"), "attention_chunk_size": 5, "floor_scale": 4,
        "attn_scale": 0.5, "qk_norm": "without_gain",
    },
    "experts, unrolled": {
        **WINDOWS, "scan_layers": False, "moe": MoEConfig(num_experts=4, num_experts_per_tok=2, capacity_factor=None),
    },
    "keys of an earlier layer, embeddings of each layer": {
        **WINDOWS, "num_layers": 6, "num_kv_shared_layers": 4, "use_double_wide_mlp": True, "qk_norm": True,
        "hidden_size_per_layer_input": 8, "attention": GemmaAttention(),
    },
    "longformer, half of each head rotates": {
        "attention": LongformerAttention(window=4, global_tokens=3), "partial_rotary_factor": 0.5,
    },
    "block sparse": {"attention": BlockSparseAttention(pattern=StridedPattern(local=1, stride=2), block_size=16)},
    "linear, half of each head rotates": {"attention": LinearAttention(), "partial_rotary_factor": 0.5},
    "performer": {"attention": PerformerAttention(features=24)},
    "projected": {"attention": ProjectedAttention(block_size=8, summaries=3)},
}  # fmt: skip
T = 36
LENGTHS = (17, 2, 6)
STEPS = 19


@pytest.mark.parametrize("name", [pytest.param("every key", marks=pytest.mark.quick), *list(MODELS)[1:]])
def test_prefill_and_steps_give_the_logits_of_the_whole_forward(name):
    """Rows of other lengths side by side, over several turns of each ring."""
    model = Transformer(ModelConfig(**{**BASE, **MODELS[name]}), nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 61, (len(LENGTHS), T)).astype(np.int32)
    wanted = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, tokens))
    lengths = np.array(LENGTHS, np.int32)
    rows = np.arange(len(LENGTHS))
    prompt = np.where(np.arange(20) < lengths[:, None], tokens[:, :20], 7)
    logits, cache = nnx.jit(lambda *a: a[0].prefill(*a[1:], T))(model, prompt, lengths)
    step = nnx.jit(lambda model, *arguments: model.decode(*arguments))
    for done in range(STEPS):
        np.testing.assert_allclose(logits, wanted[rows, lengths + done - 1], rtol=1e-5, atol=1e-5, err_msg=str(done))
        at = (lengths + done)[:, None]
        logits, cache = step(model, tokens[rows[:, None], at], at, cache)
        logits = logits[:, 0]
    assert cache.seen.tolist() == [n + STEPS for n in LENGTHS]


@pytest.mark.parametrize(
    ("values", "slots"),
    [
        ({}, [512, 512]),
        (WINDOWS, [5, 512]),
        ({"layer_types": ("sliding_attention",), "sliding_window": 5}, [5, 5]),
        ({"layer_types": ("sliding_attention",), "sliding_window": 1000}, [512, 512]),
        ({"layer_types": ("chunked_attention", "full_attention"), "attention_chunk_size": 6}, [6, 512]),
        ({"attention": LongformerAttention(window=4, global_tokens=3)}, [7, 7]),
    ],
)
def test_the_window_bounds_what_a_layer_keeps(values, slots):
    model = Transformer(ModelConfig(**{**BASE, **values, "scan_layers": False}), nnx.Rngs(0))
    cache = jax.eval_shape(lambda: model.make_cache(3, 512))
    assert [layer.key.shape for layer in cache.layers] == [(3, 2, n, 8) for n in slots]


@pytest.mark.parametrize(
    ("slots", "pinned"),
    [(5, 2), *(pytest.param(*case, marks=pytest.mark.longer) for case in ((8, 0), (3, 3), (1, 0)))],
)
def test_a_slot_holds_the_newest_token_of_its_turn(slots, pinned):
    """A token at a time, several at once, and all at once, against a list of who wrote where."""
    heads = AttentionSpec(1, 1, 1, 1.0)
    ring = slots - (pinned if pinned < slots else 0)
    first = slots - ring
    count = 12
    values = (1 + jnp.arange(count, dtype=jnp.float32)).reshape(1, count, 1, 1)

    @jax.jit
    def add(cache, queries):
        new = jnp.take(values, queries[0], axis=1)
        cache = put(cache, new, new, CacheSlots(queries, queries[:, 0]), pinned)
        seen = queries[:, -1] + 1
        return cache, slot_positions(seen, slots, pinned), store(cache, values, values, seen, pinned)

    cache = start = empty_cache(heads, 1, slots, jnp.float32)
    held = [-1] * slots
    for position in range(count):
        held[position if position < first else first + (position - first) % ring] = position
        cache, found, whole = add(cache, np.array([[position]], np.int32))
        assert found[0].tolist() == held
        assert (np.asarray(cache.key[0, 0, :, 0]) - 1).tolist() == held
        some = np.array(held) >= 0
        assert (np.asarray(whole.value[0, 0, :, 0]) - 1)[some].tolist() == np.array(held)[some].tolist()
    together, _, _ = add(start, np.arange(count, dtype=np.int32)[None])
    assert together.key.tolist() == cache.key.tolist()


@pytest.mark.parametrize("lead", [0, 1])
def test_unrolled_layers_compute_the_same(lead):
    """With a remainder after the stacked layers, and dense layers before them."""
    moe = MoEConfig(num_experts=4, num_experts_per_tok=2, first_k_dense_replace=1) if lead else None
    config = ModelConfig(**{**BASE, **WINDOWS, "num_layers": 5 + lead, "moe": moe})
    unrolled = config.model_copy(update={"scan_layers": False})
    modules = [ModuleArrays(lambda rngs, c=c: Transformer(c, rngs)) for c in (config, unrolled)]
    params, non_params = modules[0].init(jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (1, 12)), jnp.int32)
    scanned, single = (
        jax.jit(lambda p, module=module: module.merge(p, non_params)(tokens))(p)
        for module, p in zip(modules, (params, unroll_layers(config, params)), strict=True)
    )
    assert modules[0].merge(params, non_params).decoder.scanned
    np.testing.assert_allclose(scanned, single, rtol=1e-5, atol=1e-5)


@pytest.mark.longer
def test_a_cache_as_pages_gives_the_attention_over_its_slots():
    """Slots in no multiple of a block, rows of other lengths, and a soft cap."""
    random = np.random.default_rng(0)
    heads = AttentionSpec(6, 2, 32, 0.2, soft_cap=4.0)
    q, *cache = (random.normal(size=shape).astype(np.float32) for shape in ((3, 1, 6, 32), *2 * [(3, 2, 37, 32)]))
    cache = KeyCache(*map(jnp.asarray, cache))
    lengths = jnp.array([37, 5, 1])
    visible = (jnp.arange(37) < lengths[:, None])[:, None]
    found = attend_newest(jnp.asarray(q), cache, lengths, heads, implementation="xla")
    assert found is not None
    np.testing.assert_allclose(found, attend_to(jnp.asarray(q), cache, visible, heads), rtol=1e-5, atol=1e-6)
    assert attend_newest(jnp.asarray(q), cache, lengths, heads) is None, "no kernel on a CPU"
