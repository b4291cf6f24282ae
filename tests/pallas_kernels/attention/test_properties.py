"""The contract of attention at shapes and options that nobody chose: random ones, the same each time in CI."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import xla
from tests.pallas_kernels.attention.contract import Case, check

BACKENDS = ("xla_dense", "xla")


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of 16: lengths up to 50 are several, the last one cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "_LARGEST_BLOCK", 16)
        patch.setattr(xla, "_SMALLEST_BLOCK", 16)
        yield


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Everything that `flash_attention` takes; half of the cases have as many keys as queries.

    An error is a norm: of a gradient of a few numbers it would be luck. Hence at least 8 keys of width 8.
    """
    kv_heads = draw(st.integers(1, 3))
    length = draw(st.integers(8, 50))
    return Case(
        batch=draw(st.integers(1, 2)),
        length=length,
        key_length=draw(st.just(length) | st.integers(8, 50)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 20, 64])),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 60)),
        segments=draw(st.none() | st.integers(1, 5)),
        scale=draw(st.none() | st.sampled_from([0.05, 1.3])),
        soft_cap=draw(st.none() | st.sampled_from([1.5, 30.0])),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
    )


@pytest.mark.exhaustive  # test_backends and test_api have the cases of the default
@settings(max_examples=8, deadline=None, derandomize="CI" in os.environ)
@given(case=cases(), with_lse=st.booleans())
def test_error_at_most_twice_the_plain_version(case, with_lse):
    """Output, log-sum-exp and all gradients, with a cotangent of the log-sum-exp where it is returned."""
    for backend in BACKENDS:
        check(case, backend, with_lse)
