"""The product with integers on Hopper: interpreted against exact sums, and compiled without spills."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Grid, PackedWeight, lowering_platform, packed_matmul
from pallas_kernels.target import Target
from pallas_kernels.weight_only import mosaic, widened, xla
from pallas_kernels.weight_only.formats import IntegerFormat, RoundedInputFormat
from pallas_kernels.weight_only.packed import pack_nearest
from pallas_kernels.weight_only.request import PackedMatmulRequest
from tests.hopper import compile_for_hopper

S = jax.ShapeDtypeStruct
HOPPER = Target("cuda", (9, 0))
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")


def weight_of(bits, group, outputs=256, inputs=384, dtype=jnp.bfloat16):
    weight = pack_nearest(Grid(bits, group), jax.random.normal(jax.random.key(0), (outputs, inputs)))
    return dataclasses.replace(weight, arrays={**weight.arrays, "scales": weight.arrays["scales"].astype(dtype)})


def abstract(bits, group, outputs=4096, inputs=14336, **arrays):
    q = S((outputs, inputs), jnp.int4 if bits == 4 else jnp.int8)
    scales = S((outputs, inputs // (group or inputs)), jnp.bfloat16)
    arrays = {"q": q, "scales": scales, **arrays}
    return PackedWeight(arrays, IntegerFormat(Grid(bits, group)), (inputs,), (outputs,))  # type: ignore[arg-type]


def values_of(weight):
    """The matrix that the kernel multiplies with: of groups, numbers times their scales, rounded to bfloat16."""
    dense = np.asarray(weight.matrix(), np.float64)
    if weight.arrays["scales"].shape[1] == 1:
        return dense
    return np.asarray(jnp.asarray(dense, jnp.float32).astype(jnp.bfloat16), np.float64)


@pytest.mark.longer
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 128), (4, None), (8, None), (8, 128)])
@pytest.mark.parametrize("scales", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [65, 200])
def test_the_kernel_multiplies_as_exact_sums(monkeypatch, bits, group, scales, rows):
    """Two programs take several tiles each through a ring that wraps around; the last rows of x do not fill a tile."""
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    weight = weight_of(bits, group, dtype=scales)
    x = jax.random.normal(jax.random.key(1), (rows, 384), jnp.bfloat16)
    found = mosaic.multiply(PackedMatmulRequest(x, weight, jnp.bfloat16, HOPPER))
    wanted = np.asarray(x, np.float64) @ values_of(weight).T
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2.0**-8, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.longer
@pytest.mark.parametrize("tile_rows", [64, 128, 192, 256])
def test_tiles_of_all_sizes_give_the_same(monkeypatch, tile_rows):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    weight = weight_of(4, 128)
    x = jax.random.normal(jax.random.key(1), (300, 384), jnp.bfloat16)
    request = PackedMatmulRequest(x, weight, jnp.bfloat16, HOPPER)
    expected = mosaic.multiply(request)
    monkeypatch.setattr(mosaic, "tile_rows", lambda *_: tile_rows)
    np.testing.assert_array_equal(np.asarray(mosaic.multiply(request), np.float32), np.asarray(expected, np.float32))


def test_gradients_are_those_of_xla(monkeypatch):
    """Of the product in place of the kernel, and of a weight that another function than the kernel writes."""
    weight = pack_nearest(Grid(8, 64), 1e-3 * jax.random.normal(jax.random.key(0), (128, 128)))
    x = jax.random.normal(jax.random.key(1), (100, 128))

    def product(spec, x, q, scales, out_dtype):
        assert spec.rows % spec.tile_rows == 0 and x.shape == (spec.rows, 128)
        changed = dataclasses.replace(weight, arrays={"q": q, "scales": scales})
        return xla.multiply(PackedMatmulRequest(x, changed, out_dtype, HOPPER))

    monkeypatch.setattr(mosaic.mosaic_product, "product", product)
    monkeypatch.setattr(widened, "widen", lambda request: (request.weight.matrix(), None))

    def loss(x, scales, multiply):
        changed = dataclasses.replace(weight, arrays={**weight.arrays, "scales": scales})
        return jnp.sum(jnp.sin(1e2 * multiply(PackedMatmulRequest(x, changed, jnp.float32, HOPPER))))

    value_and_gradients = jax.value_and_grad(loss, (0, 1))
    found, expected = (value_and_gradients(x, weight.arrays["scales"], backend.multiply) for backend in (mosaic, xla))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), found, expected)


@pytest.mark.parametrize(
    ("rows", "outputs", "expected"),
    [(128, 28672, 128), (256, 28672, 256), (512, 4096, 128), (512, 28672, 128), (8192, 4096, 256), (100, 4096, 64)],
)
def test_the_size_of_tiles_follows_from_the_shape(rows, outputs, expected):
    assert mosaic.tile_rows(rows, outputs, 132) == expected


@pytest.mark.parametrize(
    ("weight", "x", "out", "words"),
    [
        (abstract(4, 128), S((512, 14336), jnp.float16), jnp.float16, "needs activations in bfloat16"),
        (abstract(4, 128), S((512, 14336), jnp.bfloat16), jnp.float32, "returns numbers of 16 bits"),
        (abstract(4, 128), S((64, 14336), jnp.bfloat16), jnp.bfloat16, "takes 65 rows or more; got 64"),
        (abstract(4, 32), S((512, 14336), jnp.bfloat16), jnp.bfloat16, "groups of a multiple of 64 inputs; got 32"),
        (abstract(8, None, 4000), S((512, 14336), jnp.bfloat16), jnp.bfloat16, "a multiple of 128 and inputs of 64"),
        (
            abstract(4, 128, zeros=S((4096, 112), jnp.int4)),
            S((512, 14336), jnp.bfloat16),
            jnp.bfloat16,
            "without zero points",
        ),
        (
            dataclasses.replace(abstract(8, None), format=RoundedInputFormat()),
            S((512, 14336), jnp.bfloat16),
            jnp.bfloat16,
            "with inputs as they are",
        ),
    ],
)
def test_what_it_cannot_multiply_is_told(weight, x, out, words):
    for target, expected in ((HOPPER, words), (Target("cpu"), "is written for Hopper")):
        reason = mosaic.unsupported_reason(PackedMatmulRequest(x, weight, out, target))
        assert reason and expected in reason


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (8, None)])
@pytest.mark.parametrize("rows", [128, 512])
def test_compiled_for_hopper_the_weight_goes_to_the_tensor_cores_through_registers(
    monkeypatch, capfd, bits, group, rows
):
    """Without spills, and without an array of the weight's size in memory."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    weight = abstract(bits, group)
    with lowering_platform("cuda"):
        multiply = functools.partial(packed_matmul, implementation="mosaic")
        compiled = compile_for_hopper(multiply, S((rows, 14336), jnp.bfloat16), weight)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu_v2"') == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 14336 // 8
    report = "".join(capfd.readouterr())
    spills = re.findall(r"properties for integer_product_mosaic_gpu_kernel\n.* (\d+) bytes spill stores", report)
    assert spills and set(spills) == {"0"}
    size = mosaic.tile_rows(rows, 4096, 132)
    left_in_registers = rf"wgmma\.mma_async\.sync\.aligned\.m64n{size}k16\.f32\.bf16\.bf16 \{{[^}}]*\}},\s*\{{"
    assert re.search(left_in_registers, report)
