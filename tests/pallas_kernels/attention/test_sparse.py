"""Longformer's windows with global tokens and block-sparse layouts: every backend against a mask written by loops."""

import dataclasses
from typing import Any

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
    record_choices,
)
from pallas_kernels.attention import xla
from pallas_kernels.attention.patterns import bigbird, fixed, strided
from tests.compilation import run_jitted
from tests.marks import longer
from tests.pallas_kernels.attention.contract import Case, attend_plainly, check

BACKENDS = ("xla_dense", "xla")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(xla, "_LARGEST_BLOCK", 16)
    monkeypatch.setattr(xla, "_SMALLEST_BLOCK", 16)


def same_document(segment_ids, batch, length, key_length):
    if segment_ids is None:
        return np.ones((batch, length, key_length), bool)
    query, key = (np.asarray(ids) for ids in segment_ids)
    return query[:, :, None] == key[:, None, :]


def plainly(visible_pair, q, k, v, segment_ids, scale, return_lse):
    """`visible_pair(document ids or None, position, key)` for every pair, then attention as one writes it."""
    (batch, length), key_length = q.shape[:2], k.shape[1]
    visible = same_document(segment_ids, batch, length, key_length)
    for b in range(batch):
        ids = None if segment_ids is None else np.asarray(segment_ids[1])[b]
        for t in range(length):
            for s in range(key_length):
                visible[b, t, s] &= visible_pair(ids, t + key_length - length, s)
    out, lse = attend_plainly(q, k, v, jnp.asarray(visible)[:, None], scale)
    return (out, lse) if return_lse else out


# --- Longformer -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Windowed(Case):
    window: int = 7
    global_tokens: int = 2

    def options(self) -> dict[str, Any]:
        return {
            "window": self.window, "global_tokens": self.global_tokens, "causal": self.causal, "scale": self.scale,
        }  # fmt: skip


def plain_longformer(q, k, v, *, segment_ids, return_lse, window, global_tokens, causal, scale):
    def visible(ids, position, key):
        first = [0, 0] if ids is None else [int(np.argmax(ids == ids[x])) for x in (position, key)]
        is_global = position - first[0] < global_tokens or key - first[1] < global_tokens
        return (abs(position - key) < window or is_global) and (key <= position or not causal)

    return plainly(visible, q, k, v, segment_ids, scale, return_lse)


LONGFORMER = {
    "causal": Windowed(),
    "both sides": Windowed(causal=False, kv_heads=4, dtype="float32"),
    "documents": Windowed(segments=3, window=4, global_tokens=3),
    "documents, both sides": Windowed(segments=3, window=3, causal=False, dtype="float32"),
    "no global tokens, both sides": Windowed(global_tokens=0, causal=False, window=5),
    "more global tokens than the window": Windowed(global_tokens=20, window=3, length=33, key_length=33),
    "fewer queries": Windowed(length=9, key_length=40, global_tokens=4),
    "more queries": Windowed(length=25, key_length=18, dtype="float32"),
}


@pytest.mark.longer
@pytest.mark.parametrize("backend", ["xla", *longer("xla_dense")])
@pytest.mark.parametrize("name", LONGFORMER)
def test_longformer_error_at_most_twice_the_plain_version(name, backend):
    check(LONGFORMER[name], backend, attention=longformer_attention, plainly=plain_longformer)


@pytest.mark.longer
def test_longformer_without_global_tokens_is_a_causal_window():
    q = jax.random.normal(jax.random.key(0), (1, 50, 2, 8))
    windowed = run_jitted(lambda q: flash_attention(q, q, q, window=9, implementation="xla"), q)
    ours = run_jitted(lambda q: longformer_attention(q, q, q, window=9, global_tokens=0, implementation="xla"), q)
    np.testing.assert_array_equal(ours, windowed)


@pytest.mark.parametrize("backend", ["xla", "xla_dense"])
def test_a_packed_document_is_as_if_alone(backend):
    q = np.random.default_rng(0).normal(size=(1, 50, 2, 8)).astype(np.float32)
    ids = np.array([[0] * 21 + [1] * 29])

    def attend(q, ids):
        return longformer_attention(q, q, q, window=4, global_tokens=3, segment_ids=ids, implementation=backend)

    together = run_jitted(attend, q, ids)
    for part in (slice(0, 21), slice(21, 50)):
        np.testing.assert_allclose(together[:, part], run_jitted(attend, q[:, part], None), atol=1e-5)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0, "global_tokens": 1}, "at least 1; got 0"),
        ({"window": None, "global_tokens": 1}, "window must be a Python integer"),
        ({"window": 4, "global_tokens": -1}, "at least 0; got -1"),
        ({"window": 4, "global_tokens": 1.5}, "Python integer"),
        ({"window": 4, "global_tokens": 1, "segment_ids": (jnp.zeros((1, 8), int), jnp.zeros((1, 9), int))}, "T = S"),
    ],
)
def test_longformer_wrong_arguments_name_the_rule(options, message):
    q = jnp.ones((1, 8, 1, 8))
    k = jnp.ones((1, 9, 1, 8))
    with pytest.raises(ValueError, match=message):
        longformer_attention(q, k, k, **options)


# --- block-sparse -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Blocked(Case):
    length: int = 70
    key_length: int = 70
    pattern: tuple[tuple[int, ...], ...] = ()

    def options(self) -> dict[str, Any]:
        layout = np.asarray(self.pattern, bool)
        return {"layout": layout, "block_size": 16, "causal": self.causal, "scale": self.scale}


def plain_block_sparse(q, k, v, *, segment_ids, return_lse, layout, block_size, causal, scale):
    def visible(ids, position, key):
        return layout[position // block_size, key // block_size] and (key <= position or not causal)

    return plainly(visible, q, k, v, segment_ids, scale, return_lse)


def random_pattern(seed):
    return tuple(map(tuple, np.random.default_rng(seed).random((5, 5)) < 0.5))


BLOCK_SPARSE = {
    "causal": Blocked(pattern=random_pattern(0)),
    "full, multi-head": Blocked(pattern=random_pattern(1), causal=False, kv_heads=4, dtype="float32"),
    "documents": Blocked(pattern=random_pattern(2), segments=3, causal=False),
    "empty rows and columns": Blocked(pattern=((0,) * 5, (1, 0, 0, 0, 0), (0,) * 5, (1, 0, 1, 1, 0), (1, 0, 0, 0, 1))),
    "the last queries": Blocked(length=21, pattern=random_pattern(3), dtype="float32"),
}


@pytest.mark.longer
@pytest.mark.parametrize("backend", ["xla", "xla_dense"])
@pytest.mark.parametrize("name", BLOCK_SPARSE)
def test_block_sparse_error_at_most_twice_the_plain_version(name, backend):
    check(BLOCK_SPARSE[name], backend, attention=block_sparse_attention, plainly=plain_block_sparse)


@pytest.mark.parametrize("backend", ["xla", "xla_dense", "reference"])
def test_an_empty_row_gives_zero_and_no_gradient(backend):
    q = np.random.default_rng(0).normal(size=(1, 48, 1, 8)).astype(np.float32)
    layout = np.array([[1, 0, 0], [0, 0, 0], [1, 1, 1]], bool)

    def total(q):
        out, lse = block_sparse_attention(
            q, q, q, layout=layout, block_size=16, return_lse=True, implementation=backend
        )
        return (out**2).sum(), (out, lse)

    gradient, (out, lse) = run_jitted(jax.grad(total, has_aux=True), q)
    assert (out[0, 16:32] == 0).all() and (lse[0, 0, 16:32] == -jnp.inf).all()
    assert jnp.isfinite(gradient).all() and (jnp.abs(out[0, 32:]).max(axis=(1, 2)) > 0).all()


def test_a_full_layout_is_full_attention():
    q = jax.random.normal(jax.random.key(0), (1, 40, 2, 8))
    layout = np.ones((3, 3), bool)
    ours = run_jitted(lambda q: block_sparse_attention(q, q, q, layout=layout, block_size=16, causal=False), q)
    np.testing.assert_allclose(ours, run_jitted(lambda q: flash_attention(q, q, q, causal=False), q), atol=1e-5)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (np.ones((3, 4), bool), {}, r"shape \[3, 3\].*40 / 16 rounded up; got \[3, 4\]"),
        (np.ones(3, bool), {}, r"got \[3\]"),
        (np.ones((3, 3)), {}, "must be boolean.*float64"),
        (np.ones((3, 3), bool), {"block_size": 20}, "multiple of 16.*got 20"),
        (np.ones((3, 3), bool), {"block_size": 0}, "multiple of 16"),
    ],
)
def test_block_sparse_wrong_layouts_name_the_rule(layout, options, message):
    q = jnp.ones((1, 40, 1, 8))
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(q, q, q, **{"layout": layout, "block_size": 16, **options})


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_traced_layout_and_too_many_queries_are_refused():
    q = jnp.ones((1, 40, 1, 8))
    with pytest.raises(ValueError, match="known while tracing"):
        jax.jit(lambda layout: block_sparse_attention(q, q, q, layout=layout, block_size=16))(jnp.ones((3, 3), bool))
    with pytest.raises(ValueError, match="T 40 must not exceed S 20"):
        block_sparse_attention(q, q[:, :20], q[:, :20], layout=np.ones((2, 2), bool), block_size=16)


# --- choice, cost, patterns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attend",
    [
        lambda q: longformer_attention(q, q, q, window=256, global_tokens=4),
        lambda q: block_sparse_attention(q, q, q, layout=np.eye(32, dtype=bool), block_size=64),
    ],
)
def test_backends_that_know_bands_only_refuse(attend):
    x = jax.ShapeDtypeStruct((1, 2048, 2, 64), jnp.bfloat16)
    with lowering_platform("cuda", (8, 0)), record_choices() as choices:
        jax.eval_shape(attend, x)
    (choice,) = choices
    assert choice.backend == "xla"
    reasons = dict(choice.refused)
    assert "block layouts" in reasons["cudnn"] and "one range of keys" in reasons["triton"]


def test_a_backend_asked_for_by_name_refuses_what_it_cannot_mask():
    q = jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    with pytest.raises(NotSupported, match="one range of keys per query.*4 global tokens"):
        longformer_attention(q, q, q, window=8, global_tokens=4, implementation="triton")


@pytest.mark.parametrize(("dtype", "visits_a_tile"), [("bfloat16", 2), ("float32", 3)])
def test_work_follows_the_density(monkeypatch, dtype, visits_a_tile):
    """The tiles of a layout are visited one after another: their number is the loop's length.

    Once forward, once backward, and in float32 once for the correction of the backward's row sums.
    """
    monkeypatch.setattr(xla, "_LARGEST_BLOCK", 128)
    monkeypatch.setattr(xla, "_SMALLEST_BLOCK", 128)
    x = jax.ShapeDtypeStruct((1, 4096, 1, 16), dtype)
    blocks = 4096 // 128

    def visits(layout):
        def attend(q):
            return block_sparse_attention(q, q, q, layout=layout, block_size=128, causal=False, implementation="xla")

        jaxpr = jax.make_jaxpr(jax.grad(lambda q: attend(q).sum()))(x)
        return sum(lengths(jaxpr.jaxpr))

    dense = visits(np.ones((blocks, blocks), bool))
    half = visits(np.tril(np.ones((blocks, blocks), bool)))
    assert dense == visits_a_tile * blocks**2
    assert half == visits_a_tile * blocks * (blocks + 1) // 2


def lengths(jaxpr):
    """Of all scans, also inside of other functions."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation.params["length"]
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from lengths(inner)


def test_tiles_of_other_documents_are_skipped_while_running():
    """Two documents: the loop's length is data, so it is counted by a callback."""
    visits = []
    original = xla.pieces.absorb

    def counting(state, scores, v):
        jax.debug.callback(lambda: visits.append(1))
        return original(state, scores, v)

    q = jnp.ones((1, 64, 1, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla.pieces, "absorb", counting)
        attend = jax.jit(lambda ids: flash_attention(q, q, q, segment_ids=ids, implementation="xla"))
        for ids, tiles in (([0] * 64, 10), ([0] * 32 + [1] * 32, 6)):
            visits.clear()
            jax.block_until_ready(attend(jnp.asarray([ids])))
            jax.effects_barrier()
            assert len(visits) == tiles


def test_patterns_of_the_papers():
    assert strided(6, local=2, stride=3)[5].tolist() == [False, False, True, False, True, True]
    assert fixed(6, stride=3, summary=1)[4].tolist() == [False, False, True, True, True, False]
    causal = bigbird(20, window=3, global_blocks=1, random_blocks=2, seed=0)
    assert causal[10].sum() == 3 + 1 + 2 and causal[10, [0, 8, 9, 10]].all()
    full = bigbird(20, window=3, global_blocks=1, random_blocks=2, seed=0, causal=False)
    assert full[0].all() and full[:, 0].all() and full[10, 8:13].all() and full[10].sum() == 5 + 1 + 2
    assert (causal != bigbird(20, window=3, global_blocks=1, random_blocks=2, seed=1)).any()


@pytest.mark.parametrize(
    "make",
    [
        lambda blocks: strided(blocks, local=2, stride=4),
        lambda blocks: fixed(blocks, stride=4, summary=1),
        lambda blocks: bigbird(blocks, window=2, global_blocks=1, random_blocks=2, seed=3),
    ],
)
def test_a_causal_pattern_is_the_corner_of_a_larger_one(make):
    small = make(9)
    large = make(23)
    np.testing.assert_array_equal(small, large[:9, :9])
    assert not np.triu(large, 1).any() and large.diagonal().all()


def test_pattern_rules():
    with pytest.raises(ValueError, match="summary .5. counts blocks of a stripe"):
        fixed(8, stride=4, summary=5)
    with pytest.raises(ValueError, match="local must be at least 1; got 0"):
        strided(8, local=0, stride=2)
    with pytest.raises(ValueError, match="random_blocks must be at least 0"):
        bigbird(8, window=1, global_blocks=0, random_blocks=-1)
