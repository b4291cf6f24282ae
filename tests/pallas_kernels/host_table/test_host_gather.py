"""Rows of a host table: by the CPU, and by the kernel, which is interpreted on the CPU and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.host_table.test_host_gather`.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import NotSupported, lowering_platform, record_choices
from pallas_kernels.host_table import triton
from pallas_kernels.host_table.api import host_gather
from pallas_kernels.host_table.table import HostTable
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import Array, let_numpy_index, needs_triton, run_interpreted

SHAPES = [(50, 3, 13), (9, 700, 40), (7, 2500, 5), (4, 1, 3)]
"""Rows and words of a table, and number of rows to gather."""


def make_table(rows: int, width: int, dtype=np.float32) -> HostTable:
    return HostTable.of(np.random.default_rng(0).normal(size=(rows, width)).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_rows_are_those_of_the_table_in_and_out_of_jit(dtype):
    table = make_table(20, 8, dtype)
    ids = np.array([[3, 0, 19], [3, 25, -4]], np.int32)
    wanted = table.array[np.clip(ids, 0, 19)]
    for gather in (host_gather, jax.jit(host_gather, static_argnums=0)):
        found = gather(table, jnp.asarray(ids))
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
    table.array[3] = 1
    assert np.all(np.asarray(host_gather(table, jnp.array([3]))) == 1)
    assert host_gather(table, jnp.zeros(0, jnp.int32)).shape == (0, 8)


def test_an_embedding_on_the_host_trains_the_layers_after_it():
    table = make_table(20, 8)

    @jax.jit
    def loss(weight, ids):
        return jnp.sum((host_gather(table, ids) @ weight) ** 2)

    weight = jnp.ones((8, 2))
    ids = jnp.array([1, 4, 4])
    rows = table.array[np.array([1, 4, 4])]
    np.testing.assert_allclose(jax.grad(loss)(weight, ids), 2 * rows.T @ (rows @ np.ones((8, 2))), rtol=1e-5)


def test_wrong_arguments_get_the_reason():
    with pytest.raises(ValueError, match="multiple of 4 bytes; 3 elements of bfloat16 have 6"):
        HostTable(4, 3, jnp.bfloat16)
    with pytest.raises(ValueError, match="must be integers, got float32"):
        host_gather(make_table(4, 4), jnp.zeros(3))
    with pytest.raises(NotSupported, match="triton|the target is cpu"):
        host_gather(make_table(4, 4), jnp.zeros(3, jnp.int32), implementation="triton")


def interpret() -> None:
    from pallas_kernels.host_table.triton_kernel import gather_rows_kernel

    let_numpy_index()
    for rows, words, count in SHAPES:
        table = make_table(rows, words)
        ids = np.random.default_rng(1).integers(-2, rows + 2, count).astype(np.int32)
        plan = triton.make_plan(table, count)
        out = np.full((count, words), -1, np.int32)
        arrays = Array(triton.address_words(table), "u32"), Array(ids, "i32"), Array(out, "i32")
        gather_rows_kernel[plan.grid](*arrays, plan=plan)
        np.testing.assert_array_equal(out.view(np.float32), table.array[np.clip(ids, 0, rows - 1)])


@needs_triton
def test_the_interpreted_kernel_copies_the_rows():
    done = run_interpreted("tests.pallas_kernels.host_table.test_host_gather")
    assert done.returncode == 0, done.stderr


@needs_triton
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_kernel_compiles_for_a_gpu(dtype):
    table = make_table(20, 8, dtype)
    ids = jax.ShapeDtypeStruct((100,), jnp.int32)
    with lowering_platform("cuda"), record_choices() as choices:
        text = compile_for_hopper(lambda ids: host_gather(table, ids), ids).as_text()
    assert [choice.backend for choice in choices] == ["triton"] and "triton" in text


if __name__ == "__main__":
    interpret()
