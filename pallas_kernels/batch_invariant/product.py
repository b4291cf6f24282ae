"""Batch-invariant matmuls: rows are multiplied in tiles of a fixed size, each in the same order along the depth.

Dims: R rows, D depth, F width of the result, G groups of rows with a matrix each.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.batch_invariant.mode import with_gradient_of
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.grouped_gemm.groups import group_of_tiles
from pallas_kernels.grouped_gemm.request import GroupedMatmulRequest
from pallas_kernels.target import Target, current_target
from pallas_kernels.triton_support import triton_call, unsupported_target

GROUP_TILE = 64
"""Rows of a tile of `grouped_matmul`, at whose multiples groups must begin."""
_GPU_TILE = 128
_CPU_TILE = 32
"""Rows of a tile of `matmul`."""


@dataclass(frozen=True)
class TiledProduct:
    """Arguments of a product of tiles of rows.

    Attributes:
        x: rows [R, D]; R is a multiple of `tile`.
        weights: [G, D, F] in the dtype of x.
        groups: int32 [R / tile], the group of each tile.
        tile: rows of a tile.
        dtype: dtype of the result.
        target: the device that the call is lowered for.
    """

    x: jax.Array
    weights: jax.Array
    groups: jax.Array
    tile: int
    dtype: jax.typing.DTypeLike
    target: Target

    def __str__(self) -> str:
        return f"{self.x.dtype.name} {list(self.x.shape)} x {list(self.weights.shape)} on {self.target}"


@dataclass(frozen=True)
class ProductPlan:
    """Compile-time constants of the Triton kernel: sizes of the operands, of a tile and of its steps.

    Attributes:
        rows, columns: sizes of a tile of the result.
        block: depth of a step.
        row_tiles, column_tiles: numbers of tiles.
        depth, width: D and F.
        band: tiles of rows whose programs run next to each other.
    """

    rows: int
    columns: int
    block: int
    row_tiles: int
    column_tiles: int
    depth: int
    width: int
    band: int = 8


def matmul(
    x: Float[Array, "R D"], weight: Float[Array, "D F"], dtype: jax.typing.DTypeLike | None = None
) -> Float[Array, "R F"]:
    """Multiply with float32 sums, each row as it would be alone; the gradient is that of a plain matmul.

    Args:
        x: [R, D].
        weight: [D, F] in the dtype of x.
        dtype: dtype of the result; None: that of x.
    """
    result = jnp.dtype(x.dtype if dtype is None else dtype)

    def tiled(x: jax.Array, weight: jax.Array) -> jax.Array:
        target = current_target()
        tile = _CPU_TILE if target.platform == "cpu" else _GPU_TILE
        padded = jnp.pad(x, ((0, -x.shape[0] % tile), (0, 0)))
        groups = jnp.zeros(padded.shape[0] // tile, jnp.int32)
        return _multiply(TiledProduct(padded, weight[None], groups, tile, result, target))[: x.shape[0]]

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.matmul(x, weight, preferred_element_type=result)

    return with_gradient_of(plain, tiled)(x, weight)


def grouped_matmul(request: GroupedMatmulRequest, usual: Callable[..., jax.Array]) -> Float[Array, "R F"]:
    """Multiply each row with its group's matrix as it would be alone, see `pallas_kernels.grouped_matmul`.

    Args:
        request: its alignment is `GROUP_TILE`, and rows outside of every group are 0.
        usual: grouped matmul of (x, weights, group_sizes) whose gradient is taken.
    """
    if request.alignment != GROUP_TILE or request.x.shape[0] % GROUP_TILE:
        raise ValueError(
            f"groups must begin at multiples of {GROUP_TILE} rows; got alignment {request.alignment}, "
            f"{request.x.shape[0]} rows"
        )

    def tiled(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        tiles = x.shape[0] // GROUP_TILE
        groups, _ = group_of_tiles(sizes, GROUP_TILE, tiles)
        return _multiply(TiledProduct(x, weights, groups, GROUP_TILE, x.dtype, current_target()))

    return with_gradient_of(usual, tiled)(request.x, request.weights, request.group_sizes)


def _multiply(product: TiledProduct) -> jax.Array:
    """Return x @ weights of each row's group: [R, F]."""
    return select("tiled_product", _BACKENDS, None, product).call(product)


def _by_loop(product: TiledProduct) -> jax.Array:
    def one_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, group = tile
        # Barriers hold XLA from fusing the matmul with others, which would change the order of its sums. A CPU has no
        # matmul of bfloat16 with sums in float32.
        operands = jax.lax.optimization_barrier((rows, product.weights[group]))
        return jax.lax.optimization_barrier(jnp.matmul(*(x.astype(jnp.float32) for x in operands)))

    tiles = product.x.reshape(-1, product.tile, product.x.shape[1])
    # A loop of one step would be compiled as part of what surrounds it.
    if len(tiles) == 1:
        tiles = jnp.concatenate([tiles, jnp.zeros_like(tiles)])
        groups = jnp.concatenate([product.groups, product.groups])
    else:
        groups = product.groups
    found = jax.lax.map(one_tile, (tiles, groups))
    return found.reshape(-1, found.shape[-1])[: product.x.shape[0]].astype(product.dtype)


def _by_triton(product: TiledProduct) -> jax.Array:
    from pallas_kernels.batch_invariant.triton_kernel import product_kernel

    rows, depth = product.x.shape
    width = product.weights.shape[2]
    wide = product.x.dtype == jnp.float32
    columns = 64 if wide else 128
    plan = ProductPlan(
        product.tile, columns, 32 if wide else 64, rows // product.tile, -(-width // columns), depth, width
    )
    major, minor = product.target.compute_capability or (0, 0)
    return triton_call(
        product.x,
        product.weights,
        product.groups,
        kernel=product_kernel,
        out_shape=jax.ShapeDtypeStruct((rows, width), product.dtype),
        grid=(plan.row_tiles * plan.column_tiles,),
        name="batch_invariant_matmul",
        num_warps=8 if product.tile == _GPU_TILE else 4,
        num_stages=2 if wide else 4,
        compute_capability=10 * major + minor,
        plan=plan,
    )


def _unsupported_by_triton(product: TiledProduct) -> str | None:
    return unsupported_target(product.target, (8, 0))


_BACKENDS = (
    Backend("triton", "one launch for all tiles", _unsupported_by_triton, _by_triton, opaque=True),
    Backend("xla", "a loop over tiles of rows, on every device", lambda _: None, _by_loop),
)
