"""Decoding of packed tokens over random pages computes what the whole forward computes."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.attention import paged_cache
from jaxstack.models.attention.block_sparse import BlockSparseAttention, StridedPattern
from jaxstack.models.attention.linear import LinearAttention
from jaxstack.models.attention.longformer import LongformerAttention
from jaxstack.models.attention.performer import PerformerAttention
from jaxstack.models.attention.projected import ProjectedAttention
from jaxstack.models.layer import CacheRoom, PageGroup, PageSlots
from jaxstack.models.moe.router import MoEConfig

BASE = {
    "vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48,
    "initialization": "fan_in", "initializer_range": 0.5, "scan_layers": False,
}  # fmt: skip
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
MODELS = {
    "every key, half of each head rotates": {"partial_rotary_factor": 0.5},
    "windows, soft caps": {**WINDOWS, "attn_logit_softcapping": 5.0, "rope_local_base_freq": 100.0},
    "chunks of two pages, scaled queries": {
        "layer_types": ("chunked_attention", "full_attention_no_rope"), "attention_chunk_size": 8, "floor_scale": 4,
        "attn_scale": 0.5, "qk_norm": "without_gain",
    },
    "learned positions, stacked layers": {
        "positions": "learned", "max_position_embeddings": 40, "scan_layers": True, "num_kv_heads": None,
    },
    "blocks": {"attention": BlockSparseAttention(pattern=StridedPattern(local=1, stride=2), block_size=16)},
    "a ring of a window after two tokens": {"attention": LongformerAttention(window=7, global_tokens=2)},
    "sums of blocks": {"attention": ProjectedAttention(block_size=8, summaries=3)},
    "a state": {"attention": LinearAttention()},
    "a state, stacked layers": {"attention": PerformerAttention(), "scan_layers": True},
    "experts": {"moe": MoEConfig(num_experts=4, num_experts_per_tok=2, capacity_factor=None)},
}  # fmt: skip
T = 36
PAGE = 4
PAGES = 40


def place(table: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Slot of each position [R, T] by the tables [R, pages]; a number past the pages for padding."""
    page = np.take_along_axis(table, np.maximum(positions, 0) // PAGE, axis=1)
    return np.where(positions < 0, PAGES * PAGE, page * PAGE + positions % PAGE).ravel()


# On either side of the width from which keys are copied on a GPU, in one of a few sizes, or as many as there are.
@pytest.mark.parametrize(("width", "kernels"), [(5, False), (18, False), (18, True)])
@pytest.mark.parametrize("name", MODELS)
def test_random_page_tables_give_the_logits_of_the_whole_forward(name, width, kernels, monkeypatch):
    """Chunks of two sequences, padded in front, beside single tokens of two others and one row without a sequence."""
    monkeypatch.setattr(paged_cache, "_kernels_copy", lambda *_: kernels)
    monkeypatch.setattr(paged_cache, "current_target", lambda: types.SimpleNamespace(platform="cuda"))
    monkeypatch.setattr(paged_cache, "_LEAST_COPIED", 2 * PAGE)
    model = Transformer(ModelConfig(**{**BASE, **MODELS[name]}), nnx.Rngs(0))
    random = np.random.default_rng(0)
    tokens = random.integers(0, 61, (4, T)).astype(np.int32)
    wanted = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, tokens))
    tables = random.permutation(PAGES)[: 4 * T // PAGE].reshape(4, -1).astype(np.int32)

    @nnx.jit
    def run(model, tokens, positions, write, tables, lengths, slots, pages):
        split = jnp.split(tables, [3]), jnp.split(lengths, [3]), (1, width), jnp.split(jnp.asarray(slots), [3])
        groups = tuple(PageGroup(*parts) for parts in zip(*split, strict=True))
        hidden, pages = model.decode_packed(tokens, positions, PageSlots(write, groups), pages)
        return model.logits(hidden), pages

    pages = model.make_shared_cache(CacheRoom(4, T, PAGES, PAGE))
    seen = np.zeros(4, int)
    for turn in range(6):
        single, chunked = ([0, 1], [2, 3]) if turn % 2 else ([2, 3], [0, 1])
        order = [*single, 0, *chunked]  # the third row is no sequence
        counts = np.array([1, 1, 0, *random.integers(1, 6, 2)])
        starts = seen[order]
        positions = [starts[row] + np.arange(n) - n + counts[row] for row, n in enumerate((1, 1, 1, width, width))]
        positions = [np.where(p >= starts[row], p, -1) for row, p in enumerate(positions)]
        positions[2][:] = -1
        packed = np.concatenate(positions)
        ids = np.concatenate([tokens[order[row], np.maximum(p, 0)] for row, p in enumerate(positions)])
        write = np.concatenate([place(tables[order[row]][None], p[None]) for row, p in enumerate(positions)])
        lengths = np.where(counts > 0, starts + counts, 0).astype(np.int32)
        logits, pages = run(
            model, *(x.astype(np.int32) for x in (ids, packed, write, tables[order])), lengths, np.array(order), pages
        )
        rows = np.repeat(order, [1, 1, 1, width, width])
        real = packed >= 0
        expected = wanted[rows[real], packed[real]]
        np.testing.assert_allclose(np.asarray(logits)[real], expected, rtol=1e-5, atol=1e-5, err_msg=str(turn))
        seen[[*single, *chunked]] = lengths[counts > 0]


def test_chunks_copy_few_widths_of_pages():
    assert paged_cache.copied_widths(504, 64) == (64, 126, 504)
    assert paged_cache.copied_widths(9, 2) == (2, 3, 9) and paged_cache.copied_widths(40, 64) == (40,)
