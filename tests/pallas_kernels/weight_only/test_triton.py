"""Packed matmuls by Triton: interpreted on the CPU against the matrix, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.weight_only.test_triton int4`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Grid
from pallas_kernels.weight_only import triton
from pallas_kernels.weight_only.packed import pack_integers
from pallas_kernels.weight_only.request import make_request
from pallas_kernels.weight_only.triton import Tile
from tests.pallas_kernels.triton_interpreter import Array, let_numpy_index, needs_triton, run_interpreted

S = jax.ShapeDtypeStruct
CASES = {
    "int4": (Grid(4, 32), 3, Tile(16, 32, 1, 1, 2, 2, assembly=False)),
    "int8": (Grid(8), 3, Tile(32, 64, 2, 1, 2, 2, assembly=False)),
    "int4_sliced": (Grid(4, 64), 1, Tile(16, 32, 2, 2, 2, 2, assembly=False)),
    "int8_sliced": (Grid(8, 64), 9, Tile(16, 64, 1, 4, 4, 2, assembly=False)),
}
OUT, IN = 32, 256


def interpret(name: str) -> None:
    from pallas_kernels.weight_only.triton_kernel import product_kernel, sliced_product_kernel

    let_numpy_index()
    grid, rows, tile = CASES[name]
    w = jax.random.normal(jax.random.key(0), (OUT, IN))
    scales = grid.scales(w)
    weight = pack_integers(grid, grid.quantize(w, scales), scales.astype(jnp.float16))
    x = np.random.default_rng(0).normal(size=(rows, IN)).astype(np.float16)
    request, _ = make_request(x, weight, jnp.float32)
    plan = triton.make_plan(request, tile)
    assert triton.tile_problem(plan) is None
    q = np.asarray(weight.arrays["q"].astype(jnp.int8))
    if grid.bits == 4:
        q = ((q[:, 1::2] << 4) | (q[:, ::2] & 15)).astype(np.int8)
    arrays = [Array(x, "fp16"), Array(q, "i8"), Array(np.asarray(weight.arrays["scales"]), "fp16")]
    out = np.full((tile.ranges, rows, OUT), np.nan, np.float32)
    kernel = product_kernel if tile.slices == 1 else sliced_product_kernel
    kernel[(OUT // tile.block_out, tile.ranges)](*arrays, Array(out, "fp32"), plan=plan)
    np.testing.assert_allclose(out.sum(0), x.astype(np.float32) @ np.asarray(weight.dense()), rtol=2e-5, atol=2e-5)


@needs_triton
@pytest.mark.parametrize("name", [pytest.param("int4", marks=pytest.mark.quick), *list(CASES)[1:]])
def test_the_kernels_multiply_by_the_matrix(name):
    done = run_interpreted(__spec__.name, name)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    interpret(sys.argv[1])
