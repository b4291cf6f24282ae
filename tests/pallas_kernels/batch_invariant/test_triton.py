"""Batch-invariant operations by Triton: interpreted on the CPU against plain sums, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.batch_invariant.test_triton product`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import lowering_platform, record_choices
from pallas_kernels.batch_invariant.attention import TILE, attend_pages, attend_whole
from pallas_kernels.batch_invariant.cross_entropy import invariant_cross_entropy
from pallas_kernels.batch_invariant.product import ProductPlan, matmul
from pallas_kernels.batch_invariant.rows import NormPlan, SumPlan, normalize
from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.request import make_request
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.batch_invariant.test_rows import in_fixed_order
from tests.pallas_kernels.triton_interpreter import Array, needs_triton, run_interpreted


def product() -> None:
    """Rows of three groups, with a depth and a width that are no multiples of a tile."""
    from pallas_kernels.batch_invariant.triton_kernel import product_kernel

    random = np.random.default_rng(0)
    x = random.normal(size=(64, 40)).astype(np.float32)
    weights = random.normal(size=(3, 40, 50)).astype(np.float32)
    groups = np.array([2, 0, 0, 1], np.int32)
    out = np.full((64, 50), np.nan, np.float32)
    plan = ProductPlan(16, 32, 16, 4, 2, 40, 50, band=3)
    arrays = Array(x, "fp32"), Array(weights, "fp32"), Array(groups, "i32"), Array(out, "fp32")
    product_kernel[(8,)](*arrays, plan=plan)
    wanted = np.concatenate([x[16 * i :][:16] @ weights[group] for i, group in enumerate(groups)])
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


def norm() -> None:
    """RMSNorm and LayerNorm of 5 rows, two in a program."""
    from pallas_kernels.batch_invariant.triton_kernel import norm_kernel

    random = np.random.default_rng(0)
    x = random.normal(size=(5, 24)).astype(np.float32)
    gain, bias = random.normal(size=(2, 24)).astype(np.float32)
    for centered in (False, True):
        out = np.full((5, 24), np.nan, np.float32)
        plan = NormPlan(2, 5, 24, 32, 1e-3, centered)
        norm_kernel[(3,)](*(Array(a, "fp32") for a in (x, gain, bias, out)), plan=plan)
        centre = x - x.mean(1, keepdims=True) * centered
        wanted = centre / np.sqrt(np.square(centre).mean(1, keepdims=True) + 1e-3) * gain + bias * centered
        np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


def sums() -> None:
    """Log-sum-exp of rows of several blocks, of large numbers and of one number."""
    from pallas_kernels.batch_invariant.triton_kernel import log_sum_exp_kernel

    x = 30 * np.random.default_rng(0).normal(size=(3, 70)).astype(np.float32)
    x[1, :-1] = -np.inf
    out = np.full(3, np.nan, np.float32)
    log_sum_exp_kernel[(3,)](Array(x, "fp32"), Array(out, "fp32"), plan=SumPlan(70, 32))
    np.testing.assert_allclose(out, np.logaddexp.reduce(x.astype(np.float64), axis=1), rtol=1e-6)


@needs_triton
@pytest.mark.parametrize("name", ["product", "norm", "sums"])
def test_the_kernels_give_plain_sums(name):
    done = run_interpreted(__spec__.name, name)
    assert done.returncode == 0, done.stderr[-3000:]


def shaped(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


ROWS = 300, 256
HEADS = (shaped(2, 96, 8, 64), *2 * [shaped(2, 96, 2, 64)])
PAGES = (
    shaped(3, 1, 8, 64), *2 * [shaped(20, 16, 2, 64)], shaped(3, 6, dtype="int32"), shaped(3, dtype="int32"),
)  # fmt: skip
CALLS = {
    "matmul": (matmul, shaped(*ROWS), shaped(256, 320)),
    "router": (matmul, shaped(*ROWS, dtype="float32"), shaped(256, 24, dtype="float32")),
    "groups": (
        in_fixed_order,
        shaped(320, 256), shaped(4, 256, 192), shaped(4, dtype="int32"),
    ),
    "norm": (lambda x, gain: normalize(x, gain, None, 1e-5), shaped(*ROWS), shaped(256, dtype="float32")),
    "sequences": (lambda *arrays: attend_whole(*arrays, scale=0.1), *HEADS),
    "pages": (lambda *arrays: attend_pages(*arrays, scale=0.1), *PAGES),
    "loss": (
        lambda *arrays: invariant_cross_entropy(*arrays, ignore_index=-100),
        shaped(*ROWS), shaped(256, 500, dtype="float32"), shaped(300, dtype="int32"),
    ),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("name", CALLS)
def test_compiled_for_hopper(name):
    function, *arrays = CALLS[name]
    with lowering_platform("cuda"), record_choices() as choices:
        text = compile_for_hopper(function, *arrays).as_text()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == len(choices) > 0
    assert {choice.backend for choice in choices} == {"triton"}


@pytest.mark.parametrize("new_tokens", [1, 7, 96])
def test_every_program_has_the_same_tile(new_tokens):
    """Attention of one new token is computed in tiles of as many queries as that of a whole sequence."""
    q = jnp.zeros((3, new_tokens, 8, 64), jnp.bfloat16)
    pages = jnp.zeros((20, 16, 2, 64), jnp.bfloat16)
    table, lengths = jnp.zeros((3, 6), jnp.int32), jnp.zeros(3, jnp.int32)
    request = make_request(q, pages, pages, table, lengths, scale=None, soft_cap=None, window=None)
    plan = triton.make_plan(request, TILE)
    assert (plan.padded_rows, plan.key_block, plan.ranges) == (64, 64, 1)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
