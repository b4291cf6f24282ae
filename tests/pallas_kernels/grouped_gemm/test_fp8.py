"""The grouped matmul in FP8: numbers against float32, the Hopper kernels interpreted and compiled for an H200."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NotSupported, fp8_grouped_matmul, grouped_matmul, grouped_matmul_alignment, lowering_platform
from pallas_kernels.grouped_gemm import mosaic
from pallas_kernels.grouped_gemm.groups import aligned_rows, realign
from tests.compilation import run_jitted
from tests.hopper import compile_for_hopper

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
SIZES = (100, 0, 150, 128)


def arrays(depth, columns, dtype="bfloat16", sizes=SIZES):
    """x, two weights and two cotangents."""
    keys = jax.random.split(jax.random.key(0), 5)
    rows = aligned_rows(sum(sizes), len(sizes), 128)

    def draw(key, columns):
        drawn = jax.random.normal(key, (sum(sizes), columns), dtype)
        return realign(drawn, jnp.asarray(sizes, jnp.int32), 1, 128, rows)

    # Channels of very different sizes, which one scale for the whole array would lose.
    x = draw(keys[0], depth) * jnp.asarray(jnp.where(jnp.arange(depth) % 256 < 128, 1.0, 1e-3), dtype)
    weights = tuple(jax.random.normal(key, (len(sizes), depth, columns), dtype) for key in keys[1:3])
    return x, weights, tuple(draw(key, columns) for key in keys[3:])


def outputs_and_gradients(function, x, weights, cotangents, sizes=SIZES):
    """(outputs, d_x, d_weights), as float32."""

    def both(x, weights, cotangents):
        out, pullback = jax.vjp(lambda x, weights: function(x, weights, jnp.asarray(sizes, jnp.int32)), x, weights)
        return jax.tree.leaves((out, pullback(cotangents)))

    return [np.asarray(a.astype(jnp.float32)) for a in run_jitted(both, x, weights, cotangents)]


def in_fp8(implementation):
    return lambda x, weights, sizes: fp8_grouped_matmul(x, weights, sizes, alignment=128, implementation=implementation)


def in_float32(x, weights, sizes):
    return tuple(grouped_matmul(x, weight, sizes, alignment=128, implementation="reference") for weight in weights)


def relative_errors(found, wanted):
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.longer
@pytest.mark.parametrize(("depth", "columns", "dtype"), [(256, 128, "bfloat16"), (96, 200, "float32")])
def test_errors_are_those_of_e4m3(depth, columns, dtype):
    x, weights, cotangents = arrays(depth, columns, dtype)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, weights, cotangents))
    found = outputs_and_gradients(in_fp8("xla"), x, weights, cotangents)
    wanted = outputs_and_gradients(in_float32, *wide)
    assert max(relative_errors(found, wanted)) < 0.045
    small = slice(128, 256) if depth > 128 else slice(None)
    assert max(relative_errors([d[:, small] for d in found[3:]], [d[:, small] for d in wanted[3:]])) < 0.045


@pytest.mark.longer
def test_float32_weights_are_quantized_directly():
    x, weights, cotangents = arrays(128, 128)
    wide = tuple(weight.astype(jnp.float32) for weight in weights)
    found = outputs_and_gradients(in_fp8("xla"), x, wide, cotangents)
    same = outputs_and_gradients(in_fp8("xla"), x, weights, cotangents)
    assert all((a == b).all() for a, b in zip(found, same, strict=True))


@needs_mosaic
@pytest.mark.exhaustive
@pytest.mark.parametrize(("depth", "columns"), [(256, 384), (128, 512)])
def test_kernels_compute_what_xla_does_without_a_race(depth, columns, monkeypatch, capfd):
    x, weights, cotangents = arrays(depth, columns)
    wanted = outputs_and_gradients(in_fp8("xla"), x, weights, cotangents)
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    found = outputs_and_gradients(in_fp8("mosaic"), x, weights, cotangents)
    assert max(relative_errors(found, wanted)) < 4e-3, "the rounding of bfloat16"
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@needs_mosaic
@pytest.mark.parametrize("columns", [768, 1408])
def test_compiled_for_hopper_without_spills(columns, monkeypatch, capfd):
    """Tiles of 256 and 128 columns; the gradient of x is one launch for both weights."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    weight = jax.ShapeDtypeStruct((4, 512, columns), jnp.float32)
    rows = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def loss(x, first, second, sizes):
        outs = fp8_grouped_matmul(x, (first, second), sizes, alignment=128)
        return sum((out.astype(jnp.float32) ** 2).sum() for out in outs)

    with lowering_platform("cuda"):
        compiled = compile_for_hopper(jax.grad(loss, argnums=(0, 1, 2)), rows, weight, weight, sizes)
    report = "".join(capfd.readouterr())
    spills = dict(re.findall(r"properties for (\w+)_mosaic_gpu_kernel\n.* (\d+) bytes spill stores", report))
    assert set(spills) == {"fp8_grouped_product", "fp8_grouped_weights"}
    assert set(spills.values()) == {"0"}
    text = compiled.as_text()
    names = re.findall(r'custom_call_target="mosaic_gpu.*/(fp8_grouped_\w+)/', text)
    assert sorted(names) == ["fp8_grouped_product"] * 3 + ["fp8_grouped_weights"] * 2
    assert f"bf16[4,512,{columns}]" not in text.split("ENTRY")[1].split("custom-call")[0], "no copy in bfloat16"


def test_groups_start_at_blocks():
    assert grouped_matmul_alignment(4096, 4, fp8=True) == 128


def test_refusals():
    x = jnp.zeros((512, 128), jnp.bfloat16)
    weights = (jnp.zeros((4, 128, 128), jnp.bfloat16),) * 2
    sizes = jnp.asarray(SIZES)
    with pytest.raises(ValueError, match="alignment must be 128, got 8; .*fp8=True"):
        fp8_grouped_matmul(x, weights, sizes, alignment=8)
    with pytest.raises(ValueError, match="bfloat16 or float32, got float16"):
        fp8_grouped_matmul(x.astype("float16"), [w.astype("float16") for w in weights], sizes, alignment=128)
    with pytest.raises(NotSupported, match=r"compute capability 9\.0|Hopper|cpu"):
        fp8_grouped_matmul(x, weights, sizes, alignment=128, implementation="mosaic")
