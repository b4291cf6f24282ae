"""Joined projections compute what the separate ones do, plain and packed; what does not fit together stays apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.attention.cache_formats import CACHE_FORMATS
from jaxstack.models.layer import CacheRoom, PageGroup, PageSlots
from jaxstack.models.restack import join_projections
from pallas_kernels import Grid, PackedWeight, record_choices
from pallas_kernels.weight_only.packed import concatenate_outputs, pack_lookup, pack_low_rank, pack_nearest

CONFIG = ModelConfig(vocab_size=31, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=48)
TOKENS = np.array([[5, 9, 2, 24, 17, 3, 8]], np.int32)


@pytest.mark.parametrize(
    "changes",
    [{}, {"scan_layers": False, "qkv_bias": True, "mlp_bias": True}, {"mlp": "plain", "hidden_act": "gelu"}],
    ids=["stacked", "biases", "plain_mlp"],
)
def test_outputs_stay_the_same(changes):
    model = Transformer(CONFIG.model_copy(update=changes), nnx.Rngs(0))
    for _, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        leaf[...] += 0.01 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)  # biases start as zeros
    expected = model(TOKENS)
    paths = join_projections(model)
    assert paths
    kernels = {path[-2] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)) if path[-1] == "kernel"}
    gate_up = set() if changes.get("mlp") == "plain" else {"gate_up_proj"}
    assert kernels - {"up_proj"} == {"qkv_proj", "o_proj", "down_proj"} | gate_up
    np.testing.assert_allclose(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert not join_projections(model), "they are joined already"


WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4, "scan_layers": False}
UPDATES = {
    "every_key": ({}, None, True),
    "windows": ({**WINDOWS, "rope_local_base_freq": 100.0}, None, True),
    "int8_cache": ({"head_dim": 16}, "int8", False),
    "learned_positions": ({"positions": "learned", "max_position_embeddings": 40}, None, False),
    "head_norms": ({"qk_norm": True}, None, False),
    "half_of_each_head_rotates": ({"partial_rotary_factor": 0.5}, None, False),
}
"""Changes of the model, the format of its cache, and whether one operation then rotates heads and writes the cache."""


def make_pair(changes, cache_format) -> list[Transformer]:
    """The same model with separate and with joined projections."""
    models = [Transformer(CONFIG.model_copy(update=changes), nnx.Rngs(0)) for _ in range(2)]
    for block in (block for model in models for block in model.decoder.layers):
        cache_format = CACHE_FORMATS[cache_format] if isinstance(cache_format, str) else cache_format
        block.attention.heads = dataclasses.replace(block.attention.heads, cache_format=cache_format)
    join_projections(models[1])
    return models


def assert_alike(found, expected) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", UPDATES)
def test_decoding_gives_the_logits_and_the_cache_of_separate_projections(name):
    """Steps of one token and of two, one row with padding."""
    changes, cache_format, together = UPDATES[name]
    prompts = np.tile(TOKENS, (2, 1))
    lengths = np.array([7, 3], np.int32)

    @nnx.jit
    def run(model):
        first, cache = model.prefill(prompts, lengths, 16)
        found = [first]
        for new in (1, 1, 2):
            positions = cache.seen[:, None] + jnp.arange(new)
            positions = positions.at[1, 1:].set(-1)
            logits, cache = model.decode(prompts[:, :new], positions, cache)
            found += [logits[0], logits[1, :1]]
        return found, cache.layers

    separate, joined = make_pair(changes, cache_format)
    with record_choices() as choices:
        found = run(joined)
    assert ("rotate_into_cache" in {choice.operation for choice in choices}) == together
    assert_alike(found, run(separate))


@pytest.mark.parametrize("name", UPDATES)
def test_packed_decoding_gives_what_separate_projections_give(name):
    """A sequence of five tokens in two pages, after one of no tokens but padding."""
    changes, cache_format, together = UPDATES[name]
    tables = jnp.array([[5, 1], [3, 0]])
    groups = (
        PageGroup(tables[:1], jnp.array([0]), 1, jnp.array([0])),
        PageGroup(tables[1:], jnp.array([5]), 6, jnp.array([1])),
    )
    positions = jnp.array([-1, -1, 0, 1, 2, 3, 4])
    slots = PageSlots(jnp.array([24, 24, 12, 13, 14, 15, 0]), groups)

    @nnx.jit
    def run(model):
        hidden, pages = model.decode_packed(TOKENS[0], positions, slots, model.make_shared_cache(CacheRoom(2, 8, 6, 4)))
        return hidden[2:], pages

    separate, joined = make_pair(changes, cache_format)
    with record_choices() as choices:
        found = run(joined)
    assert ("rotate_into_cache" in {choice.operation for choice in choices}) == together
    assert_alike(found, run(separate))


def pack(layer, grid: Grid) -> None:
    kernel = layer.kernel[...]
    packed = pack_nearest(grid, kernel.reshape(kernel.shape[0], -1).T)
    layer.kernel = layer.kernel.replace(packed.with_dims(kernel.shape[:1], kernel.shape[1:]))


def test_packed_kernels_of_one_format_are_joined_and_others_stay_apart():
    model = Transformer(CONFIG.model_copy(update={"scan_layers": False, "num_layers": 1}), nnx.Rngs(0))
    (block,) = model.decoder.layers
    attention = block.attention
    mlp = block.mlp
    for layer in (mlp.gate_proj, mlp.up_proj, attention.q_proj, attention.k_proj):
        pack(layer, Grid(4, 16))
    pack(attention.v_proj, Grid(8))
    expected = model(TOKENS)
    (path,) = join_projections(model)
    assert path[-1] == "mlp"
    assert isinstance(mlp.gate_up_proj.kernel.get_raw_value(), PackedWeight)
    np.testing.assert_allclose(model(TOKENS), expected, rtol=1e-5, atol=1e-5)


def test_a_cache_that_sorts_channels_keeps_the_projection_of_keys():
    model = Transformer(CONFIG, nnx.Rngs(0))
    (block,) = model.decoder.layers
    sorts = next(form for form in CACHE_FORMATS.values() if form.sorts_channels)
    block.attention.heads = dataclasses.replace(block.attention.heads, cache_format=sorts)
    assert {path[-1] for path in join_projections(model)} == {"mlp"}


def test_formats_without_a_row_for_each_output_do_not_concatenate():
    matrix = jax.random.normal(jax.random.key(0), (8, 16))
    lookup = pack_lookup(2, jnp.zeros((8, 16), jnp.int32), jnp.zeros((1, 4)))
    assert concatenate_outputs([lookup, lookup], -1) is None
    low_rank = pack_low_rank(matrix[:, :2], matrix[:2])
    assert concatenate_outputs([low_rank, low_rank], -1) is None
    assert concatenate_outputs([pack_nearest(Grid(8), matrix), matrix], -1) is None
