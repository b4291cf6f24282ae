"""Paged attention by Triton: interpreted on the CPU against XLA's form, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.paged_attention.test_triton grouped`.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NotSupported, lowering_platform, record_choices
from pallas_kernels.low_bits.codecs import Fp8Codec
from pallas_kernels.low_bits.encoded import Encoded
from pallas_kernels.paged_attention import triton, xla
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.request import PagedAttentionRequest, make_request
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import (
    Array,
    let_assembly_run,
    let_numpy_index,
    needs_triton,
    run_interpreted,
)

CASES = {
    "grouped": {},
    "one_range": {"ranges": 1, "soft_cap": 5.0},
    "several_tokens": {"new_tokens": 3, "lengths": (131, 2)},
    "window": {"window": 40, "new_tokens": 2, "scale": 0.3},
    "sinks": {"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32), "new_tokens": 2},
    "sinks_of_one_range": {"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32), "ranges": 1},
    "latents": {"values": 64, "width": 80, "key_heads": 1},
    "latents_of_one_range": {"values": 64, "width": 80, "key_heads": 1, "ranges": 1, "lengths": (131, 0)},
    "fp8": {"fp8": True, "new_tokens": 2},
    "fp8_of_one_range": {"fp8": True, "ranges": 1},
    "latents_of_many_rows": {"values": 64, "width": 96, "key_heads": 1, "new_tokens": 9, "rows": 16},
}


def make_case(
    new_tokens=1, lengths=(131, 20), ranges=3, key_heads=2, width=32, rows=64, values=None, fp8=False, **options
) -> tuple[PagedAttentionRequest, triton.PagedAttentionPlan]:
    """Return a request of two sequences whose pages are in random order, and a plan with that many ranges."""
    random = np.random.default_rng(0)
    page = 16
    heads = 4
    table = random.permutation(24)[:18].reshape(2, 9)
    q, *pages = (
        random.normal(size=shape).astype(np.float16)
        for shape in ((2, new_tokens, heads, width), *2 * [(24, page, key_heads, width)])
    )
    if fp8:
        pages = [Encoded(Fp8Codec().encode(jnp.asarray(x)), None, Fp8Codec()) for x in pages]
    options = {"scale": None, "soft_cap": None, "window": None, **options}
    request = make_request(q, pages[0], values or pages[1], table, np.array(lengths), **options)
    plan = triton.make_plan(request, triton.Tile(128, rows=rows))
    return request, dataclasses.replace(plan, ranges=ranges)


def interpret(name: str) -> None:
    from pallas_kernels.paged_attention.triton_kernel import attend_kernel, combine_kernel

    let_numpy_index()
    let_assembly_run()
    request, plan = make_case(**CASES[name])
    ranges = plan.ranges
    out = np.full((*request.q.shape[:3], plan.value_dim), np.nan, np.float16)
    sums = np.full((2, plan.key_heads, ranges, plan.rows), np.nan, np.float32)
    partial = np.full((*sums.shape, plan.value_dim), np.nan, np.float32)
    arrays = [Array(np.asarray(request.q), "fp16")]
    for pages in (request.k_pages, request.v_pages):
        (numbers,) = jax.tree.leaves(pages)
        arrays.append(Array(np.asarray(numbers), "fp8e4nv" if isinstance(pages, Encoded) else "fp16"))
    arrays += [Array(np.asarray(x), "i32") for x in (request.page_table, request.lengths)]
    arrays.append(arrays[-1] if request.sinks is None else Array(np.asarray(request.sinks), "fp32"))
    found = Array(out, "fp16") if ranges == 1 else Array(partial, "fp32")
    attend_kernel[(plan.key_heads * plan.row_blocks, 2, ranges)](*arrays, found, Array(sums, "fp32"), plan=plan)
    if ranges > 1:
        combine_kernel[(2, plan.key_heads, plan.rows)](
            found, Array(sums, "fp32"), arrays[-1], Array(out, "fp16"), plan=plan
        )
    valid = np.arange(plan.new_tokens)[None] >= plan.new_tokens - np.asarray(request.lengths)[:, None]
    np.testing.assert_allclose(out[valid], np.asarray(xla.attend(request))[valid], rtol=5e-3, atol=2e-3)


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_give_what_xla_gives(name):
    done = run_interpreted(__spec__.name, name)
    assert done.returncode == 0, done.stderr[-3000:]


def request_for(batch, length, dtype=jnp.bfloat16, new_tokens=1, head_dim=64):
    pages = jax.ShapeDtypeStruct((batch * length // 64, 64, 8, head_dim), dtype)
    return (
        jax.ShapeDtypeStruct((batch, new_tokens, 32, head_dim), dtype),
        pages,
        pages,
        jax.ShapeDtypeStruct((batch, length // 64), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


@needs_triton
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("batch", "kernels"), [(1, 2), (128, 1)])
def test_compiled_for_hopper_pages_are_not_copied(batch, kernels, fp8):
    q, pages, _, *places = request_for(batch, 4096)
    if fp8:
        pages = Encoded((jax.ShapeDtypeStruct(pages.shape, jnp.float8_e4m3fn),), None, Fp8Codec())
    with lowering_platform("cuda"):
        text = compile_for_hopper(paged_attention, q, pages, pages, *places).as_text()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == kernels
    assert " gather(" not in text and " copy(" not in text and " convert(" not in text


@pytest.mark.parametrize(
    ("batch", "length", "head_dim", "ranges", "key_block"),
    [
        (1, 32768, 128, 64, 64),
        (16, 8192, 128, 4, 64),
        (64, 1024, 64, 1, 128),
        (1, 256, 64, 2, 128),
        (384, 2048, 128, 1, 128),
    ],
)
def test_the_ranges_of_all_sequences_run_at_the_same_time(batch, length, head_dim, ranges, key_block):
    """At most as many programs as an H200 runs at a time, 4 on each of 132 multiprocessors, if more ranges are made."""

    def plan(*arrays: jax.Array) -> jax.Array:
        plans.append(triton.make_plan(make_request(*arrays, scale=None, soft_cap=None, window=None)))
        return arrays[0]

    plans = []
    with lowering_platform("cuda"):
        jax.eval_shape(plan, *request_for(batch, length, head_dim=head_dim))
    assert (plans[0].ranges, plans[0].key_block) == (ranges, key_block)
    assert ranges == 1 or batch * 8 * ranges <= 4 * 132


@needs_triton
def test_the_choice_and_its_reasons():
    pages = request_for(2, 256)
    with lowering_platform("cuda"), record_choices() as choices:
        jax.eval_shape(paged_attention, *pages)
        jax.eval_shape(paged_attention, *request_for(2, 256, jnp.float32))
        jax.eval_shape(paged_attention, *request_for(2, 256, new_tokens=17))
    reasons = [choice.refused[0][1] if choice.refused else None for choice in choices]
    assert reasons[0] is None and "float32" in reasons[1] and "got 68" in reasons[2]
    with pytest.raises(NotSupported, match="compute capability"):
        jax.eval_shape(lambda *arrays: paged_attention(*arrays, implementation="triton"), *pages)


if __name__ == "__main__":
    interpret(sys.argv[1])
