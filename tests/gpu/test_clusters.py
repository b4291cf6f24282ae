"""Every tile of the results of kernels with clusters of two programs agrees with float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BiasedProduct, activated_matmul, fp8_dot_general, linear_cross_entropy_sum, record_choices
from tests.gpu.conftest import on_hopper

TILE = 128


def normal(seed, *shape, scale=1.0):
    return scale * jax.random.normal(jax.random.key(seed), shape)


def gelu(implementation, x, first, bias, last):
    return activated_matmul(BiasedProduct(x, first, bias), last, "gelu_tanh", implementation=implementation)


def swiglu(implementation, gate, up, last):
    return activated_matmul((gate, up), last, "swiglu", implementation=implementation)


def loss(implementation, hidden, weight):
    labels = jax.random.randint(jax.random.key(9), hidden.shape[:1], 0, weight.shape[1])
    return linear_cross_entropy_sum(hidden, weight, labels, implementation=implementation)


def blockwise(implementation, x, weight):
    if implementation == "xla":
        return jnp.matmul(x, weight, precision="highest")
    return fp8_dot_general(x, weight, (((1,), (0,)), ((), ())), recipe="blockwise", implementation=implementation)


# Each case returns the function, its arrays, and the largest relative error of a tile.
def gelu_case(rows, width):
    arrays = normal(0, rows, 192), normal(1, 192, width, scale=0.1), normal(2, width), normal(3, width, 256, scale=0.1)
    return gelu, arrays, 0.03


def swiglu_case(rows, width):
    return swiglu, (normal(0, rows, width), normal(1, rows, width), normal(2, width, 256, scale=0.1)), 0.03


def loss_case(rows, vocabulary):
    return loss, (normal(0, rows, 256), normal(1, 256, vocabulary, scale=0.1)), 0.03


def blockwise_case(rows, width):
    return blockwise, (normal(0, rows, 384), normal(1, 384, width)), 0.1


CASES = {
    "gelu": (gelu_case, 2048, 1536),
    "gelu, an odd number of rows of tiles": (gelu_case, 1920, 1536),
    "gelu, an odd number of columns": (gelu_case, 1280, 1408),
    "gelu, fewer tiles than multiprocessors": (gelu_case, 256, 384),
    "swiglu": (swiglu_case, 2048, 1792),
    "swiglu, an odd number of rows of tiles": (swiglu_case, 1920, 1792),
    "loss": (loss_case, 1280, 5376),
    "loss, an odd number of rows of tiles": (loss_case, 1152, 5248),
    "blockwise": (blockwise_case, 1280, 1792),
    "blockwise, an odd number of columns": (blockwise_case, 1280, 1664),
    "blockwise, an odd number of rows": (blockwise_case, 1152, 1792),
}
"""Name -> the case and its sizes."""


def tile_errors(found, wanted):
    """Relative error of each 128 x 128 tile of a matrix, or of a whole vector or scalar."""
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    if found.ndim < 2:
        return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    shape = found.shape[0] // TILE, TILE, found.shape[1] // TILE, TILE
    difference, size = (np.sqrt(np.square(x[: shape[0] * TILE, : shape[2] * TILE].reshape(shape)).sum((1, 3)))
                        for x in (found - wanted, wanted))  # fmt: skip
    return difference / size


@pytest.mark.parametrize("name", CASES)
def test_every_tile_is_right(name):
    if not on_hopper():
        pytest.skip("needs a Hopper GPU")
    case, *sizes = CASES[name]
    function, arrays, limit = case(*sizes)

    def results(implementation, dtype):
        inputs = [x.astype(jnp.bfloat16).astype(dtype) for x in arrays]

        def weighted(*inputs):
            out = function(implementation, *inputs)
            return (out.astype(jnp.float32) * normal(8, *out.shape)).sum(), out

        with jax.default_matmul_precision("highest"):
            run = jax.jit(jax.value_and_grad(weighted, argnums=range(len(inputs)), has_aux=True))
            return lambda: jax.tree.leaves(run(*inputs))

    wanted = results("xla", jnp.float32)()
    with record_choices() as choices:
        run = results("mosaic", jnp.bfloat16)
        run()
    assert {choice.backend for choice in choices} == {"mosaic"}
    for _ in range(5):  # A race does not show every time.
        for found, exact in zip(run()[1:], wanted[1:], strict=True):
            assert np.max(tile_errors(found, exact)) < limit
