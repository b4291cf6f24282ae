"""Every backend that runs here against the contract: forward, log-sum-exp and all gradients."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import xla
from tests.marks import longer
from tests.pallas_kernels.attention.contract import Case, check

BACKENDS = ("xla_dense", "xla")

CASES = {
    "causal": Case(),
    "full_multi_head_float16": Case(causal=False, kv_heads=4, dtype="float16"),
    "multi_query_float32": Case(kv_heads=1, dtype="float32"),
    "window": Case(window=7),
    "window_without_causal": Case(window=5, causal=False),
    "segments_window_cap": Case(segments=3, window=9, soft_cap=2.0),
    "soft_cap_and_scale": Case(soft_cap=1.5, scale=0.7, dtype="float32"),
    "fewer_queries": Case(length=17, key_length=45, window=20),
    "more_queries": Case(length=45, key_length=17, dtype="float32"),
    "unlike_segments": Case(length=33, key_length=21, segments=5, causal=False),
    "sinks": Case(sinks=True, window=9, segments=3),
    "sinks_of_more_queries_float32": Case(length=45, key_length=17, sinks=True, soft_cap=1.5, dtype="float32"),
    "narrow_values": Case(value_dim=12, segments=3),
    "one_query": Case(length=1, key_length=37),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles, whole, cut and skipped, at shapes that are small enough for a test."""
    monkeypatch.setattr(xla, "_LARGEST_BLOCK", 16)
    monkeypatch.setattr(xla, "_SMALLEST_BLOCK", 16)


@pytest.mark.parametrize("backend", ["xla", *longer("xla_dense")])
@pytest.mark.parametrize("name", CASES)
def test_error_at_most_twice_the_plain_version(name, backend):
    check(CASES[name], backend)


@pytest.mark.longer
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_the_log_sum_exp(backend):
    check(Case(segments=2), backend, with_lse=False)


@pytest.mark.longer
def test_dense_weights_recomputed_where_memory_is_dear():
    """Off the CPU the dense backend keeps no weights: its gradients must be the same."""
    from pallas_kernels import flash_attention, lowering_platform

    q = jax.random.normal(jax.random.key(0), (1, 24, 2, 8))

    def gradient(q):
        return jax.grad(lambda q: (flash_attention(q, q, q, implementation="xla_dense") ** 2).sum())(q)

    kept = jax.jit(gradient)(q)
    with lowering_platform("cuda"):
        recomputed = jax.jit(gradient)(q)
    assert jnp.abs(kept - recomputed).max() < 1e-5
