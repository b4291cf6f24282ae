"""The Hopper kernels: interpreted on the CPU with race detection against the contract, and compiled for an H200."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    NotSupported,
    block_sparse_attention,
    flash_attention,
    longformer_attention,
    lowering_platform,
    save_attention,
)
from pallas_kernels.attention import mosaic, mosaic_call
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.mosaic_config import KernelConfig, Tail
from pallas_kernels.attention.mosaic_scores import fill, late_factor
from pallas_kernels.attention.request import Options, Segments
from pallas_kernels.attention.tilings import Tiling
from pallas_kernels.attention.visible_tiles import Blocks, key_ranges, query_ranges
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.attention.contract import Case, check
from tests.pallas_kernels.attention.test_sparse import Windowed, plain_longformer

pytestmark = pytest.mark.longer  # a few seconds each

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")

CASES = {
    "causal_grouped": Case(batch=1, length=200, key_length=200, heads=2, kv_heads=1, head_dim=64),
    "segments_window": Case(
        batch=1, length=256, key_length=256, heads=1, kv_heads=1, head_dim=64, segments=3, window=90
    ),
    "sinks_window": Case(batch=1, length=200, key_length=200, heads=2, kv_heads=1, head_dim=64, window=70, sinks=True),
    "narrow_values": Case(
        batch=1, length=150, key_length=150, heads=2, kv_heads=1, head_dim=192, value_dim=128, segments=2
    ),
    "lengths_differ_cap": Case(
        batch=2,
        length=70,
        key_length=150,
        heads=1,
        kv_heads=1,
        head_dim=128,
        causal=False,
        soft_cap=3.0,
        dtype="float16",
    ),
}


@needs_mosaic
@pytest.mark.parametrize("name", CASES)
def test_error_at_most_twice_the_plain_version_and_no_race(name, monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    check(CASES[name], "mosaic")
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@pytest.mark.exhaustive
@needs_mosaic
def test_error_of_warpgroups_beyond_the_queries(monkeypatch):
    """A tile of 192 queries: one of its warpgroups has some, the others' rows would be those of the next sequence."""
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    monkeypatch.setattr(mosaic, "choose_tiling", lambda *_: Tiling(forward_warpgroups=3, forward_keys=64))
    monkeypatch.setattr(mosaic, "fewer_warpgroups_help", lambda *_: False)
    check(Case(batch=2, length=64, key_length=64, heads=2, kv_heads=1, head_dim=64), "mosaic")


@needs_mosaic
@pytest.mark.parametrize(
    ("length", "packed", "given"),
    [(320, False, 320), (328, False, 328), (320, True, 320), (40, False, 64), (323, False, 328)],
)
def test_queries_are_not_copied_to_whole_blocks(length, packed, given, monkeypatch):
    """Only segment ids are: copies with one dim would go beyond a sequence's end."""
    seen = []

    def forward(config, q, k, v, schedule, segments, sinks):
        seen.append((q.shape[1], segments and tuple(ids.shape[1] for ids in segments)))
        return q, jnp.zeros((1, 1, q.shape[1]))

    monkeypatch.setattr(mosaic_call, "forward", forward)
    monkeypatch.setattr(mosaic, "choose_tiling", lambda *_: Tiling(forward_warpgroups=3))
    monkeypatch.setattr(mosaic, "fewer_warpgroups_help", lambda *_: False)
    x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.bfloat16)
    ids = jnp.zeros((1, length), jnp.int32) if packed else None
    with lowering_platform("cuda"):
        jax.eval_shape(lambda x: flash_attention(x, x, x, segment_ids=ids, implementation="mosaic"), x)
    assert seen == [(given, (384, 384) if packed else None)]


@pytest.mark.exhaustive
@needs_mosaic
def test_error_with_the_query_heads_of_a_key_head_in_several_programs(monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    monkeypatch.setattr(mosaic_call, "choose_head_parts", lambda *_: 2)
    check(CASES["causal_grouped"], "mosaic")
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@needs_mosaic
@pytest.mark.exhaustive
def test_error_of_full_attention_with_several_blocks_of_queries(monkeypatch, capfd):
    """Blocks are dealt out sequence by sequence; the last of three has one group of 64 queries out of three."""
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    monkeypatch.setattr(mosaic, "choose_tiling", lambda *_: Tiling(forward_warpgroups=3, forward_keys=64))
    monkeypatch.setattr(mosaic, "fewer_warpgroups_help", lambda *_: False)
    check(Case(batch=2, length=437, key_length=200, heads=2, kv_heads=1, head_dim=64, causal=False), "mosaic")
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@needs_mosaic
@pytest.mark.parametrize(("heads", "length"), [(1, 384), (2, 200)])
@pytest.mark.exhaustive
def test_error_with_the_last_key_blocks_in_several_programs(heads, length, monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    monkeypatch.setattr(mosaic_call, "choose_tail", lambda *_: Tail(2, 3))
    check(Case(batch=2, length=length, key_length=300, heads=2, kv_heads=heads, head_dim=64, causal=False), "mosaic")
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@needs_mosaic
def test_key_blocks_are_divided_into_two_or_more_parts_only(monkeypatch):
    """As one part they would be stored in `outputs`, and then replaced by the sums of parts that nothing stored."""
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    monkeypatch.setattr(mosaic_call, "choose_tail", lambda *_: Tail(2, 1))
    with pytest.raises(ValueError, match="two or more parts"):
        check(Case(batch=1, length=128, key_length=300, head_dim=64, causal=False), "mosaic")


@needs_mosaic
def test_query_heads_are_divided_into_equal_parts_only(monkeypatch):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    monkeypatch.setattr(mosaic_call, "choose_head_parts", lambda *_: 2)
    x = jax.ShapeDtypeStruct((1, 128, 3, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="2 parts of the query heads"):
        jax.eval_shape(jax.grad(lambda x: flash_attention(x, x, x, implementation="mosaic").sum()), x)


@needs_mosaic
def test_error_of_the_kernels_of_wide_heads(monkeypatch, capfd):
    """Their small key blocks, one buffer of queries, and a kernel each for dQ, dK and dV, at a head dim of 64."""
    wide = {"forward_keys": 64, "fused_queries": 0, "query_keys": 32, "key_queries": 32, "key_value_together": False}
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    monkeypatch.setattr(mosaic, "choose_tiling", lambda *_: Tiling(**wide))
    monkeypatch.setattr("pallas_kernels.attention.mosaic_forward._TILE_BYTES", 0)
    check(dataclasses.replace(CASES["segments_window"], heads=2), "mosaic")
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@pytest.mark.exhaustive
@needs_mosaic
@pytest.mark.parametrize(("name", "parts"), [("segments_window", 1), ("causal_grouped", 2)])
def test_error_of_the_backward_whose_warpgroups_share_the_keys(name, parts, monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    monkeypatch.setattr(mosaic, "choose_tiling", lambda *_: Tiling(fused_queries=64, fused_keys=64))
    monkeypatch.setattr(mosaic_call, "choose_head_parts", lambda *_: parts)
    check(CASES[name], "mosaic")
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@needs_mosaic
@pytest.mark.parametrize("scale", [192**-0.5, 0.1, 1.0, 3.7, 1e-6, 0.0, -0.3])
@pytest.mark.parametrize("soft_cap", [None, 7.0])
def test_the_score_of_masked_entries_times_its_factor_is_exact(scale, soft_cap):
    """A fused multiply-add subtracts the rounded product from the exact one: any difference is exponentiated."""
    config = KernelConfig(Options(Mask(), scale, soft_cap), 128, 128, 128, 64)
    score = np.float32(fill(config))
    factor = np.float32(late_factor(config))
    assert score == fill(config)
    assert np.float64(score) * np.float64(factor) == np.float64(score * factor)
    assert -4e30 < score * factor < -1e29 or score == -(2.0**126)


@pytest.mark.exhaustive
@needs_mosaic
def test_error_of_the_deterministic_backward(monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    check(CASES["segments_window"], "mosaic_deterministic")
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@needs_mosaic
@pytest.mark.parametrize(("causal", "segments"), [(True, None), (False, None), (True, 3)])
def test_error_of_windows_with_global_tokens(causal, segments, monkeypatch):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    shape = {"batch": 1, "length": 200, "key_length": 200, "heads": 1, "kv_heads": 1, "head_dim": 64}
    case = Windowed(**shape, window=30, global_tokens=5, causal=causal, segments=segments)
    check(case, "mosaic", attention=longformer_attention, plainly=plain_longformer)


@needs_mosaic
def test_block_sparse_equals_the_chunked_backend(monkeypatch):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    q, k, v = (jax.random.normal(key, (1, 640, 1, 64), jnp.float16) for key in jax.random.split(jax.random.key(0), 3))
    layout = np.random.default_rng(0).random((5, 5)) < 0.5
    layout[2] = False  # Queries that see nothing.

    def loss(implementation, q, k, v):
        out, lse = block_sparse_attention(
            q, k, v, layout=layout, block_size=128, return_lse=True, implementation=implementation
        )
        return jnp.sin(out.astype(jnp.float32)).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    ours, chunked = (jax.grad(functools.partial(loss, name), argnums=(0, 1, 2))(q, k, v) for name in ("mosaic", "xla"))
    for actual, expected in zip(ours, chunked, strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-3)


@needs_mosaic
def test_a_layout_that_cuts_tiles_is_refused():
    q = jax.ShapeDtypeStruct((1, 640, 1, 64), jnp.bfloat16)

    def attend(q):
        return block_sparse_attention(q, q, q, layout=np.ones((10, 10), bool), block_size=64, implementation="mosaic")

    with lowering_platform("cuda"), pytest.raises(NotSupported, match="multiples of 128, got 64 and 0"):
        jax.eval_shape(attend, q)


def compile_gradient(head_dim, packed, batch=2, length=1024):
    q = jax.ShapeDtypeStruct((batch, length, 4, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((batch, length, 2, head_dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def layer(q, k, v, ids):
        out = flash_attention(q, k, v, segment_ids=ids if packed else None, implementation="mosaic")
        return (out.astype(jnp.float32) ** 2).sum()

    gradient = jax.grad(jax.checkpoint(layer, policy=save_attention), argnums=(0, 1, 2))
    with lowering_platform("cuda"):
        return compile_for_hopper(gradient, q, k, k, ids)


@needs_mosaic
@pytest.mark.parametrize(
    ("head_dim", "packed", "spilled"),
    # The backward keeps some addresses in local memory at 128; at 64 its larger blocks are faster in spite of spills.
    [(64, True, 0), (64, False, 320), (128, True, 64)],
)
def test_compiled_for_hopper_with_few_spills(head_dim, packed, spilled, monkeypatch, capfd):
    """One forward, kept by the policy, without spills, and one backward."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compile_gradient(head_dim, packed)
    report = "".join(capfd.readouterr())
    spills = dict(re.findall(r"properties for (\w+)_mosaic_gpu_kernel\n.* (\d+) bytes spill stores", report))
    assert spills.keys() == {"attention_forward", "attention_backward"}
    assert int(spills["attention_forward"]) == 0
    # Other releases of jax lower the same kernels a little differently.
    assert int(spills["attention_backward"]) <= spilled or jax.__version_info__[:2] != (0, 11)
    assert "serialized" not in report
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 2


def test_refuses_with_a_reason():
    q = jnp.zeros((1, 8, 1, 100), jnp.bfloat16)
    with pytest.raises(
        NotSupported, match="Hopper.*lowered for cpu" if jax.__version_info__ >= (0, 11) else "jax 0.11"
    ):
        flash_attention(q, q, q, implementation="mosaic")
    if jax.__version_info__ >= (0, 11):
        with lowering_platform("cuda"), pytest.raises(NotSupported, match="one of 64, 80, 96, 128, 192, 256, got 100"):
            flash_attention(q, q, q, implementation="mosaic")
        with lowering_platform("cuda", (8, 0)), pytest.raises(NotSupported, match="compute capability 9.0"):
            flash_attention(q, q, q, implementation="mosaic")


def test_ranges_skip_what_a_mask_hides():
    blocks = Blocks(512, 512, 128, 64)
    causal = key_ranges(Mask(), blocks, None)[0].tolist()
    assert causal == [[0, 2, 2, 2], [0, 0, 2, 4], [0, 0, 4, 6], [0, 0, 6, 8]]
    window = key_ranges(Mask(window=100), blocks, None)[0].tolist()
    assert window[3] == [4, 8, 8, 8]
    assert query_ranges(Mask(), blocks, None)[0, 5].tolist() == [2, 3, 4, 4]


def test_ranges_skip_other_documents():
    ids = jnp.asarray([[1] * 128 + [2] * 200 + [3] * 184])
    blocks = Blocks(512, 512, 128, 64)
    ranges = key_ranges(Mask(causal=False), blocks, Segments(ids, ids))[0].tolist()
    assert ranges == [[0, 0, 2, 2], [2, 2, 5, 6], [2, 8, 8, 8], [5, 6, 8, 8]]
    transposed = query_ranges(Mask(causal=False), blocks, Segments(ids, ids))[0].tolist()
    assert [row[::3] for row in transposed] == [[0, 1]] * 2 + [[1, 3]] * 3 + [[1, 4]] + [[2, 4]] * 2


def test_ranges_of_blocks_without_a_visible_key_are_empty():
    blocks = Blocks(256, 64, 64, 64)
    for first, _, _, end in key_ranges(Mask(), blocks, None)[0, :3].tolist():
        assert first == end
