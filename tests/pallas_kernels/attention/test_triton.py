"""The Triton kernels: interpreted on the CPU against the contract, and compiled for GPUs that are not here.

Triton decides at its import whether kernels are interpreted, so the interpreted cases run in a process of their own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.attention.test_triton NAME...` prints a line of JSON for each.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NotSupported, flash_attention, lowering_platform, record_choices, save_attention
from pallas_kernels.attention import triton, xla
from pallas_kernels.attention.triton import Tile, Tiling, WideTiling
from tests.compilation import run_jitted
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.attention.contract import Case, check
from tests.pallas_kernels.triton_interpreter import Array, let_numpy_index, needs_triton, run_interpreted


def small(length, key_length=None, **options):
    """Float16, as the interpreter multiplies bfloat16 as the integers that it stores them as."""
    defaults = {"batch": 1, "heads": 2, "kv_heads": 1, "dtype": "float16"}
    return Case(**{**defaults, **options, "length": length, "key_length": key_length or length})


TILING = Tiling(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1))
WIDE_TILING = WideTiling(Tile(32, 16, 4, 1, 256), Tile(32, 16, 4, 1, 128))
CASES = {
    "causal_grouped": small(48, batch=2, heads=4, kv_heads=2),
    "full_uneven_head_dim_80": small(41, causal=False, head_dim=80),
    "head_dim_24": small(33, head_dim=24),
    "window": small(90, heads=1, window=60),
    "window_without_causal": small(50, window=7, causal=False),
    "segments": small(64, batch=2, segments=3),
    "segments_window_cap": small(60, segments=3, window=19, soft_cap=2.0),
    "full_segments_cap_scale": small(48, segments=3, causal=False, soft_cap=1.5, scale=0.7),
    "negative_scale": small(40, scale=-0.4),
    "fewer_queries": small(20, 60, window=30),
    "more_queries": small(50, 20),
    "sinks_of_more_queries": small(50, 20, sinks=True),
    "unlike_segments": small(33, 52, segments=5, causal=False),
    "wide": small(64, head_dim=512, heads=4, kv_heads=2),
    "wide_full_uneven": small(41, head_dim=512, causal=False, scale=-0.1),
    "wide_window_cap": small(70, head_dim=272, heads=1, window=20, soft_cap=2.0),
    "wide_segments": small(64, head_dim=320, batch=2, segments=3),
    "wide_fewer_queries": small(20, 60, head_dim=264, sinks=True),
    "wide_more_queries": small(70, 20, head_dim=384, segments=2),
}


# --- interpreted, in a process of its own -------------------------------------------------------------------------


def interpret(kernel, plan, tile, capability, programs, arrays, outputs):
    """Takes the place of `triton.launch`."""
    del tile, capability
    names = {"float16": "fp16", "float32": "fp32", "int32": "i32"}

    def run(*inputs):
        # Results start as nan, so that what a kernel does not write is seen.
        results = [np.full(x.shape, np.nan, x.dtype) for x in outputs]
        arguments = [Array(np.ascontiguousarray(x), names[str(x.dtype)]) for x in (*inputs, *results)]
        kernel[(programs,)](*arguments, plan=plan)
        return [x.array for x in arguments[len(inputs) :]]

    return jax.pure_callback(run, list(outputs), *arrays)


def check_vmap():
    """One call over a batch of batches, of which only some arguments have one, gives what the reference gives."""
    q = jax.random.normal(jax.random.key(0), (2, 1, 40, 2, 16), jnp.float16)
    k = jax.random.normal(jax.random.key(1), (1, 40, 1, 16), jnp.float16)
    ids = jnp.asarray([[[0] * 8 + [1] * 32], [[0] * 32 + [1] * 8]])

    def gradient(implementation):
        def loss(q, k, ids):
            out = flash_attention(q, k, k, segment_ids=ids, implementation=implementation)
            return (out.astype(jnp.float32) ** 2).sum()

        return run_jitted(jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None, 0)), q, k, ids)

    for a, b in zip(gradient("triton"), gradient("reference"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2)


def main(names):
    let_numpy_index()
    triton.launch = interpret
    triton.tiling_for = lambda head_dim, _: WIDE_TILING if head_dim > 256 else TILING
    xla._LARGEST_BLOCK = xla._SMALLEST_BLOCK = 32
    for name in names:
        error = None
        try:
            with lowering_platform("cuda", (8, 0)):
                check_vmap() if name == "vmap" else check(CASES[name], "triton")
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"name": name, "error": error}), flush=True)


# --- tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted():
    """Name of a case -> its error or None."""
    process = run_interpreted(__spec__.name, *CASES, "vmap")
    rows = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    assert rows, process.stderr
    return {row["name"]: row["error"] for row in rows}


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize("name", [*CASES, "vmap"])
def test_error_at_most_twice_the_plain_version(name, interpreted):
    assert interpreted[name] is None, interpreted[name]


def spills(ptx, capability):
    """Bytes that ptxas stores outside of registers."""
    from triton.knobs import nvidia

    architecture = f"sm_{capability[0]}{capability[1]}{'a' if capability >= (9, 0) else ''}"
    command = [nvidia.ptxas.path, "-v", f"-arch={architecture}", "-", "-o", os.devnull]
    process = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True)
    return int(re.search(r"(\d+) bytes spill stores", process.stderr)[1])


@needs_triton
@pytest.mark.parametrize(
    ("capability", "head_dim", "packed"),
    [((8, 0), 128, True), ((9, 0), 512, True), ((8, 9), 256, False), ((9, 0), 64, False)],
)
def test_compiled_kernels_fit_the_device(capability, head_dim, packed, monkeypatch):
    """One forward, kept by the policy, and the kernels of the backward, compiled for a GPU that is not here.

    Two compute the gradients; for wide heads one computes scores, and XLA multiplies.
    """
    from jax_triton import triton_lib

    results = []
    compile_kernel = triton_lib.compile_ttir_inplace

    def record(*arguments, **options):
        results.append(compile_kernel(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(triton_lib, "compile_ttir_inplace", record)
    q = jax.ShapeDtypeStruct((2, 1024, 4, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 1024, 2, head_dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32)

    def layer(q, k, v, ids):
        out = flash_attention(q, k, v, segment_ids=ids if packed else None, implementation="triton")
        return (out.astype(jnp.float32) ** 2).sum()

    gradient = jax.grad(jax.checkpoint(layer, policy=save_attention), argnums=(0, 1, 2))
    with lowering_platform("cuda", capability):
        compiled = compile_for_hopper(gradient, q, k, k, ids)
    backward = ["score_gradient_kernel"] if head_dim > 256 else ["key_kernel", "query_kernel"]
    names = ["forward_kernel", *backward]
    assert compiled.as_text().count('custom_call_target="triton_kernel_call') == len(names)
    assert sorted(result.name for result in results) == names
    for result in results:
        assert f".target sm_{capability[0]}{capability[1]}" in result.binary
        assert result.shared_mem_bytes <= 1024 * triton.shared_memory_kib(capability)
        assert spills(result.binary, capability) <= 64


def test_shared_memory_of_devices():
    kib = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
    assert {capability: triton.shared_memory_kib(capability) for capability in kib} == kib


def refusal(dtype=jnp.bfloat16, head_dim=64, platform="cuda", capability=(8, 0)):
    x = jax.ShapeDtypeStruct((1, 64, 1, head_dim), dtype)
    with lowering_platform(platform, capability), pytest.raises(NotSupported) as raised:
        jax.eval_shape(lambda x: flash_attention(x, x, x, implementation="triton"), x)
    return str(raised.value)


def test_refuses_with_a_reason(monkeypatch):
    assert "runs on NVIDIA GPUs, lowered for cpu" in refusal(platform="cpu", capability=None)
    assert "8.0 (Ampere) or newer, lowered for cuda 7.5" in refusal(capability=(7, 5))
    assert "got float32" in refusal(dtype=jnp.float32)
    assert "multiple of 8 and at most 512, got 100" in refusal(head_dim=100)
    assert "got 520" in refusal(head_dim=520)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton and jax_triton cannot be imported: pip install" in refusal()


@needs_triton
def test_chosen_where_cudnn_refuses():
    def chosen(length=512, **options):
        x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
        with lowering_platform("cuda", (8, 0)), record_choices() as choices:
            jax.eval_shape(lambda x: flash_attention(x, x, x, **options), x)
        return choices[0]

    assert chosen().backend == "cudnn"
    assert chosen(soft_cap=20.0).backend == "triton"
    assert chosen(segment_ids=jnp.zeros((1, 4096), int), length=4096).backend == "triton"
    few = chosen(soft_cap=20.0, length=8)
    assert few.backend == "xla_dense" and "got T 8" in dict(few.refused)["triton"]


if __name__ == "__main__":
    main(sys.argv[1:])
