"""Triton matmul of 1 to 64 rows with a packed weight (integers, FP8, indices into tables, 2:4 sparsity), as stored.

At few rows the product is limited by reading the weight. XLA's matmuls spend more time on the conversion of integers
than on reading them, mostly with scales of groups; these kernels convert two integers with each instruction and apply
the scale of a group to a partial sum. Values of a lookup table XLA writes to memory before its matmul; these kernels
look them up in registers. With W8A8 the activations are integers of 8 bits too, and sums are int32, which are those of
XLA's products bit by bit. There are two kinds: those of `triton_kernel` use `tl.dot` and read all formats but 2:4
sparsity; those of `fragments` are for it, and for few rows with integers of 4 bits. In the first kind, with
integers or indices of up to 4 bits, each byte holds two neighbours, which are not put back into the order of the row:
the low halves are multiplied by the activations with even positions, the high halves by those with odd ones.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.target import Target, automatic_axes, multiprocessors
from pallas_kernels.triton_support import triton_call, unsupported_target
from pallas_kernels.weight_only import fragments, xla
from pallas_kernels.weight_only.float8_products import MOST_EXACT_ROWS
from pallas_kernels.weight_only.formats import (
    Float8Format,
    IntegerFormat,
    LookupFormat,
    RoundedInputFloat8Format,
    RoundedInputFormat,
    TwoOfFourFormat,
)
from pallas_kernels.weight_only.fragments import FragmentTile
from pallas_kernels.weight_only.integer_products import quantize_tokens, scale_sums
from pallas_kernels.weight_only.packed import PackedWeight
from pallas_kernels.weight_only.request import PackedMatmulRequest

_LEAST_CAPABILITY = (9, 0)
_MANY_OUTPUTS = 128
"""Outputs for each multiprocessor from which on integers of 4 bits have the kernel of `fragments`, unless measured.

It was the faster one with 28,672 outputs, and not with 6,144 or fewer.
"""
MOST_ROWS = 64
"""Rows that the kernel multiplies with a matrix at most."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tile sizes of a matmul: the part of the product that each Triton program computes.

    Attributes:
        block_out: outputs of a program.
        block_in: inputs of a step of its loop; at most a group, if groups have scales.
        ranges: number of programs that share the inputs of an output; their sums are added by XLA.
        slices: number of warps, or groups of warps, of a program that share these inputs: in a step each has one of
            as many neighbouring blocks of inputs.
        warps: warps of a program.
        stages: steps whose loads are under way at once.
        assembly: whether inline assembly converts the stored numbers; it exists for bfloat16 only.
    """

    block_out: int
    block_in: int
    ranges: int
    slices: int
    warps: int
    stages: int
    assembly: bool = True


def padded_rows(rows: int) -> int:
    """Return a number of rows rounded up to a power of two and to the 8 columns of a tensor-core tile."""
    return max(8, 1 << (rows - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class ProductPlan:
    """Compile-time constants of the Triton kernel that multiplies activations with a packed weight.

    Attributes:
        rows: rows of x.
        inputs, outputs: dims of the matrix.
        halves: integers or indices per byte.
        groups: scales per output; 1 for indices without scales.
        tile: see `Tile`.
        tables: lookup tables, each of which serves outputs / tables consecutive outputs.
        entries: values of a table; 0 for integers and FP8.
        scale_rows: consecutive outputs that share their scales, as in blocks of FP8.
        exponent_size: inputs that share an exponent; 0: there are none.
        tiles: tiles of `rows` rows, each multiplied with one of several matrices; 0: there is one matrix.
        float8: True for FP8.
        rounded: True for W8A8: the activations are integers of 8 bits too, and sums are int32.
        scaled: whether the kernel multiplies with scales, of numbers or of indices.
    """

    rows: int
    inputs: int
    outputs: int
    halves: int
    groups: int
    tile: Tile
    tables: int = 1
    entries: int = 0
    scale_rows: int = 1
    exponent_size: int = 0
    tiles: int = 0
    float8: bool = False
    rounded: bool = False
    scaled: bool = True

    @property
    def all_rows(self) -> int:
        """Number of rows of all tiles."""
        return self.rows * max(1, self.tiles)

    @property
    def constants(self) -> int:
        """Number of scales, or of values in tables, of a matrix."""
        return self.tables * self.entries or -(-self.outputs // self.scale_rows) * self.groups

    @property
    def padded_rows(self) -> int:
        """See the function `padded_rows`."""
        return padded_rows(self.rows)

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        return self.inputs // self.groups

    @property
    def steps(self) -> int:
        """Number of steps of a Triton program's loop over its inputs."""
        return self.inputs // (self.tile.block_in * self.tile.ranges * self.tile.slices)

    @property
    def block_out(self) -> int:
        """Number of outputs that a Triton program computes."""
        return self.tile.block_out

    @property
    def block_in(self) -> int:
        """Number of inputs per step of a Triton program's loop."""
        return self.tile.block_in

    @property
    def slices(self) -> int:
        """Number of warp groups of a Triton program that divide its inputs among them."""
        return self.tile.slices

    @property
    def assembly(self) -> bool:
        """True if inline assembly converts the stored numbers to bfloat16."""
        return self.tile.assembly


MEASURED: Mapping[tuple[int, int, int, int], Tile | FragmentTile] = {
    (8, 2048, 2048, 8): Tile(16, 256, 1, 4, 4, 3),
    (8, 2048, 2048, 16): Tile(16, 128, 1, 4, 4, 4),
    (8, 2048, 8192, 8): Tile(16, 128, 1, 4, 4, 4),
    (8, 2048, 8192, 16): Tile(16, 128, 1, 4, 4, 4),
    (8, 3072, 2048, 8): Tile(16, 128, 1, 4, 4, 4),
    (8, 3072, 2048, 16): Tile(16, 128, 1, 4, 4, 4),
    (8, 4096, 4096, 8): Tile(16, 256, 1, 4, 4, 3),
    (8, 4096, 4096, 16): Tile(32, 128, 1, 4, 4, 4),
    (8, 4096, 14336, 8): Tile(16, 128, 2, 2, 2, 5),
    (8, 4096, 14336, 16): Tile(32, 128, 4, 1, 2, 5),
    (8, 6144, 4096, 8): Tile(16, 128, 1, 4, 4, 4),
    (8, 6144, 4096, 16): Tile(16, 128, 1, 4, 4, 4),
    (8, 8192, 2048, 8): Tile(16, 128, 1, 4, 4, 4),
    (8, 8192, 2048, 16): Tile(32, 128, 1, 4, 4, 4),
    (8, 14336, 4096, 8): Tile(64, 128, 1, 1, 4, 6),
    (8, 14336, 4096, 16): Tile(32, 128, 4, 1, 2, 6),
    (8, 16384, 2048, 8): Tile(64, 128, 1, 1, 4, 6),
    (8, 16384, 2048, 16): Tile(64, 128, 1, 2, 2, 4),
    (8, 28672, 4096, 8): Tile(32, 128, 1, 1, 1, 4),
    (8, 28672, 4096, 16): Tile(32, 128, 1, 1, 1, 4),
    (4, 2048, 2048, 8): Tile(16, 128, 1, 4, 4, 4),
    (4, 2048, 2048, 16): Tile(16, 128, 1, 4, 4, 4),
    (4, 2048, 8192, 8): Tile(64, 128, 4, 1, 4, 5),
    (4, 2048, 8192, 16): Tile(32, 128, 4, 1, 2, 6),
    (4, 3072, 2048, 8): Tile(16, 128, 1, 4, 4, 4),
    (4, 3072, 2048, 16): Tile(16, 128, 1, 4, 4, 4),
    (4, 4096, 4096, 8): Tile(16, 128, 1, 4, 4, 4),
    (4, 4096, 4096, 16): Tile(32, 128, 4, 1, 2, 6),
    (4, 4096, 14336, 8): Tile(32, 128, 4, 2, 2, 4),
    (4, 4096, 14336, 16): Tile(32, 128, 4, 2, 2, 4),
    (4, 6144, 4096, 8): Tile(16, 128, 1, 4, 4, 4),
    (4, 6144, 4096, 16): Tile(32, 128, 4, 1, 2, 6),
    (4, 8192, 2048, 8): Tile(64, 128, 1, 1, 4, 6),
    (4, 8192, 2048, 16): Tile(32, 128, 1, 4, 4, 4),
    (4, 14336, 4096, 8): Tile(64, 128, 4, 1, 4, 5),
    (4, 14336, 4096, 16): Tile(32, 128, 4, 1, 2, 6),
    (4, 16384, 2048, 8): Tile(32, 128, 1, 2, 2, 5),
    (4, 16384, 2048, 16): Tile(64, 128, 1, 2, 2, 4),
    (4, 28672, 4096, 8): FragmentTile(1, 2),
    (4, 28672, 4096, 16): FragmentTile(1, 2),
    (16, 4096, 4096, 8): FragmentTile(1, 8),
    (16, 4096, 4096, 16): FragmentTile(1, 8),
    (16, 4096, 14336, 8): FragmentTile(1, 8),
    (16, 4096, 14336, 16): FragmentTile(1, 8),
    (16, 6144, 4096, 8): FragmentTile(1, 8),
    (16, 6144, 4096, 16): FragmentTile(1, 8),
    (16, 28672, 4096, 8): FragmentTile(1, 2),
    (16, 28672, 4096, 16): FragmentTile(1, 1),
}
"""(bits of a stored integer, outputs, inputs, `padded_rows`) -> the fastest tile on an H200, from `benchmarks/
kernels/packed_products.py --sweep`, which prints such lines. Bits are 4 or 8, or 16 of 2:4 sparsity.
Products that are not listed have `default_tile`. Those with FP8 and with lookup tables were not measured: they have the
tiles of integers of as many bits, as both read the same bytes.
"""


def stored_matrix(weight: PackedWeight) -> jax.Array:
    """Return the stored integers or indices of a packed weight, [out, in], that the Triton kernel reads."""
    return weight.arrays["indices" if isinstance(weight.format, LookupFormat) else "q"]


def pair_bytes(halves: jax.Array) -> jax.Array:
    """Return the bytes of integers of 4 bits, of which XLA stores the one at the even place in the low half.

    It is a change of the type alone.
    """
    pairs = halves.reshape(*halves.shape[:-1], halves.shape[-1] // 2, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.int8)


def _matrix_shape(weight: PackedWeight) -> tuple[int, int]:
    return math.prod(weight.outputs), math.prod(weight.inputs)


def stored_bits(request: PackedMatmulRequest) -> int:
    """Return how many bits each stored number of the packed weight takes in memory: 4, 8, or 16 of 2:4 sparsity."""
    if isinstance(request.weight.format, TwoOfFourFormat):
        return 16
    return 4 if stored_matrix(request.weight).dtype in (jnp.int4, jnp.uint4) else 8


def default_tile(outputs: int, inputs: int, groups: int, rows: int, tables: int = 1, halves: int = 1) -> Tile:
    """Choose tile sizes for a matmul with a packed weight whose shape has not been measured.

    Up to 16 rows the inputs of a program are divided among its warps. A program then needs few outputs to read at the
    speed of the memory, and no second kernel has to add partial sums. With more rows the activations of so many slices
    would not fit into shared memory. The outputs of a program share a lookup table.
    """
    largest = inputs if groups == 1 else inputs // groups
    together = outputs // tables
    block_in = next(size for size in (128, 64, 32) if largest % size == 0)
    many = outputs >= 64 * multiprocessors()
    if rows <= 16 and many and together % 32 == 0 and inputs % (halves * block_in) == 0:
        return Tile(32, block_in, 1, halves, halves, 4)
    if rows <= 16:
        block_out = 32 if together % 32 == 0 and many else 16
        slices = next(count for count in (4, 2, 1) if inputs % (block_in * count) == 0)
        return Tile(block_out, block_in, 1, slices, slices, 4)
    block_out = next(size for size in (64, 32, 16) if together % size == 0)
    ranges = 1
    while outputs // block_out * ranges < 2 * multiprocessors() and inputs % (8 * block_in * ranges) == 0:
        ranges *= 2
    return Tile(block_out, block_in, ranges, 1, 4, 4)


def make_plan(request: PackedMatmulRequest, tile: Tile | None = None, tiles: int = 0) -> ProductPlan:
    """Return the Triton kernel's compile-time constants for a call, with tile sizes chosen for it unless given.

    Args:
        request: the call.
        tile: sizes of the parts of the product.
        tiles: number of parts of the rows of x that are multiplied with one matrix of a stack each; 0: one matrix.
    """
    weight = request.weight
    bits = stored_bits(request)
    rows = request.x.shape[0] // max(1, tiles)
    outputs, inputs = _matrix_shape(weight)
    lookup = isinstance(weight.format, LookupFormat)
    tables, entries = weight.arrays["codebook"].shape[-2:] if lookup else (1, 0)
    groups = weight.arrays["scales"].shape[-1] if "scales" in weight.arrays else 1
    halves = 2 if bits == 4 else 1
    default = default_tile(outputs, inputs, groups, rows, tables, halves)
    default = dataclasses.replace(default, assembly=request.x.dtype == jnp.bfloat16)
    if tiles:  # which are enough programs
        default = dataclasses.replace(default, ranges=1)
    plan = ProductPlan(
        rows,
        inputs,
        outputs,
        halves,
        groups,
        tile or default,
        tables,
        entries,
        scale_rows=(weight.format.rows or 1) if isinstance(weight.format, Float8Format) else 1,
        exponent_size=inputs // weight.arrays["exponents"].shape[-1] if "exponents" in weight.arrays else 0,
        tiles=tiles,
        float8=isinstance(weight.format, Float8Format),
        rounded=isinstance(weight.format, RoundedInputFormat),
        scaled="scales" in weight.arrays and not isinstance(weight.format, RoundedInputFormat),
    )
    if tile is not None or not isinstance(measured := _measured_tile(request), Tile):
        return plan
    chosen = dataclasses.replace(plan, tile=dataclasses.replace(measured, assembly=default.assembly))
    return plan if tile_problem(chosen) else chosen  # Tiles were measured with other groups, and without tables.


def _measured_tile(request: PackedMatmulRequest) -> Tile | FragmentTile | None:
    return MEASURED.get((stored_bits(request), *_matrix_shape(request.weight), padded_rows(request.x.shape[0])))


def fragment_tile(request: PackedMatmulRequest) -> FragmentTile | None:
    """Return the tile of a call by the kernels of `fragments`; None: it is one of the others."""
    if fragments.unsupported_reason(request) is not None:
        return None
    measured = _measured_tile(request)
    if isinstance(measured, FragmentTile) and not fragments.tile_problem(fragments.make_plan(request, measured)):
        return measured
    plan = fragments.make_plan(request)
    many = plan.outputs >= _MANY_OUTPUTS * multiprocessors()
    return plan.tile if plan.sparse or measured is None and many else None


def tile_problem(plan: ProductPlan) -> str | None:
    """Return why the tile sizes of a plan do not fit the shapes of its matmul, or None if they do."""
    tile = plan.tile
    if plan.outputs % tile.block_out:
        return f"blocks of {tile.block_out} do not divide {plan.outputs} outputs"
    if plan.outputs // plan.tables % tile.block_out:
        return f"blocks of {tile.block_out} do not divide the {plan.outputs // plan.tables} outputs of a table"
    if plan.inputs % (tile.block_in * tile.ranges * tile.slices):
        parts = f"{tile.ranges} ranges of {tile.slices} slices"
        return f"{parts} of blocks of {tile.block_in} do not divide {plan.inputs} inputs"
    if plan.groups > 1 and plan.group_size % tile.block_in:
        return f"blocks of {tile.block_in} do not divide a group of {plan.group_size} inputs"
    return None


def multiply(request: PackedMatmulRequest, tile: Tile | FragmentTile | None = None) -> Float[Array, "rows out"]:
    """Multiply x with the transposed packed matrix by the Triton kernel; gradients are those of the XLA backend."""
    return _product(request.out_dtype, request.target, tile, request.x, request.weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(
    out_dtype: jax.typing.DTypeLike,
    target: Target,
    tile: Tile | FragmentTile | None,
    x: jax.Array,
    weight: PackedWeight,
) -> jax.Array:
    request = PackedMatmulRequest(x, weight, out_dtype, target)
    chosen = tile or fragment_tile(request)
    return fragments.multiply(request, chosen) if isinstance(chosen, FragmentTile) else _launch(request, chosen)


def multiply_tiles(request: PackedMatmulRequest, groups: Int32[Array, " tiles"]) -> Float[Array, "rows out"]:
    """Multiply equal parts of the rows of x with one matrix of a stack each, by the Triton kernel.

    Args:
        request: the call, with a weight whose `stack` is (matrices,).
        groups: the matrix of each part, or -1 for a result of 0.
    """
    return _launch(request, None, groups)


def kernel_arrays(
    weight: PackedWeight, plan: ProductPlan, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a weight as the kernels take it: its bytes, its scales or tables, and what belongs beside tables."""
    stored = stored_matrix(weight)
    constants = weight.arrays["codebook" if plan.entries else "scales"]
    beside = weight.arrays.get("exponents", weight.arrays.get("scales", constants))
    if plan.entries and plan.halves == 1:
        constants = constants.astype(dtype)  # The kernels round smaller tables themselves.
    return pair_bytes(stored) if plan.halves == 2 else stored, constants, beside


def _launch(request: PackedMatmulRequest, tile: Tile | None, groups: jax.Array | None = None) -> jax.Array:
    from pallas_kernels.weight_only.triton_kernel import product_kernel, sliced_product_kernel

    x = request.x
    weight = request.weight
    out_dtype = request.out_dtype
    plan = make_plan(request, tile, 0 if groups is None else groups.shape[0])
    ranges = plan.tile.ranges
    stored, constants, beside = kernel_arrays(weight, plan, x.dtype)
    major, minor = request.target.compute_capability or (0, 0)
    shape = (plan.all_rows, plan.outputs)
    sums, x_scales = jnp.float32, None
    if plan.rounded:
        sums = out_dtype = jnp.int32
        x, x_scales = quantize_tokens(x)
    y = triton_call(
        x,
        stored,
        constants,
        beside,
        constants if groups is None else groups,
        kernel=product_kernel if plan.slices == 1 else sliced_product_kernel,
        out_shape=jax.ShapeDtypeStruct(*((shape, out_dtype) if ranges == 1 else ((ranges, *shape), sums))),
        grid=(plan.outputs // plan.tile.block_out, ranges, max(1, plan.tiles)),
        name="packed_matmul",
        num_warps=plan.tile.warps,
        num_stages=plan.tile.stages,
        compute_capability=10 * major + minor,
        plan=plan,
    )
    y = y if ranges == 1 else jnp.sum(y, 0).astype(out_dtype)
    if x_scales is None:
        return y
    return scale_sums(y, x_scales, constants[:, 0].astype(jnp.float32)).astype(request.out_dtype)


def _product_forward(
    out_dtype: jax.typing.DTypeLike,
    target: Target,
    tile: Tile | FragmentTile | None,
    x: jax.Array,
    weight: PackedWeight,
) -> tuple[jax.Array, tuple[jax.Array, PackedWeight]]:
    return _product(out_dtype, target, tile, x, weight), (x, weight)


def _product_backward(
    out_dtype: jax.typing.DTypeLike,
    target: Target,
    tile: Tile | FragmentTile | None,
    saved: tuple[jax.Array, PackedWeight],
    d_y: jax.Array,
) -> tuple[jax.Array, PackedWeight]:
    del tile
    return jax.vjp(lambda x, weight: xla.multiply(PackedMatmulRequest(x, weight, out_dtype, target)), *saved)[1](d_y)


_product.defvjp(_product_forward, _product_backward)


def unsupported_device(target: Target) -> str | None:
    """Return why the Triton kernel does not run on a device at all, or None if it does."""
    return unsupported_target(target, _LEAST_CAPABILITY)


def unsupported_reason(request: PackedMatmulRequest) -> str | None:
    """Return why the Triton kernel cannot compute a matmul with a packed weight, or None if it can."""
    if reason := unsupported_target(request.target, _LEAST_CAPABILITY):
        return reason
    return _unsupported_shape(request)


def unsupported_tiles(x: jax.Array, rows: int, weight: PackedWeight, target: Target) -> str | None:
    """Return why `multiply_tiles` cannot multiply parts of `rows` rows of x with a stack of matrices, or None."""
    if reason := unsupported_target(target, _LEAST_CAPABILITY):
        return reason
    part = jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype)
    return _unsupported_shape(PackedMatmulRequest(part, weight, x.dtype, target))  # type: ignore[arg-type]


def fallback_reason(request: PackedMatmulRequest) -> str | None:
    """Return why a product that the Triton kernel is meant for cannot run in it on this GPU, without its shapes.

    None if it can, and for other GPUs and for formats other than lookup tables and integers of up to 4 bits.
    """
    format_ = request.weight.format
    narrow = isinstance(format_, LookupFormat) or (isinstance(format_, IntegerFormat) and format_.grid.bits <= 4)
    if not narrow or isinstance(format_, RoundedInputFormat) or unsupported_target(request.target, _LEAST_CAPABILITY):
        return None
    if axes := automatic_axes():
        shown = ", ".join(f"{name}={size}" for name, size in axes.items())
        return f"it cannot partition the Triton kernel over a mesh of several devices, {shown}"
    reason = unsupported_format(request.weight) or unsupported_matrix(request)
    return reason and f"the Triton kernel {reason}"


def unsupported_format(weight: PackedWeight) -> str | None:
    """Return why the Triton kernel cannot read a packed weight, whatever its shape, or None if it can."""
    if not isinstance(weight.format, (IntegerFormat, LookupFormat, Float8Format, TwoOfFourFormat)):
        return f"reads integers and FP8 with scales, lookup tables and 2:4 sparsity; the weight is {weight.format}"
    if "zeros" in weight.arrays:
        return "reads integers without zero points; the weight has some"
    return None


def most_rows(weight: PackedWeight) -> int:
    """Return the largest number of rows that the Triton kernel multiplies with a packed weight."""
    return min(MOST_ROWS, MOST_EXACT_ROWS) if isinstance(weight.format, RoundedInputFloat8Format) else MOST_ROWS


def _unsupported_shape(request: PackedMatmulRequest) -> str | None:
    x = request.x
    weight = request.weight
    if reason := unsupported_format(weight):
        return reason
    most = most_rows(weight)
    if not 1 <= x.shape[0] <= most:
        return f"takes 1 to {most} rows; got {x.shape[0]}"
    return unsupported_matrix(request)


def unsupported_matrix(request: PackedMatmulRequest) -> str | None:
    """Return why the Triton kernels cannot read a packed weight of a known format in the dtype of x, or None."""
    x = request.x
    weight = request.weight
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs activations in bfloat16 or float16; got {x.dtype}"
    outputs, inputs = _matrix_shape(weight)
    least = 32 if weight.stack else 128
    if outputs % 16 or inputs % least:
        return f"needs outputs that are a multiple of 16 and inputs of {least}; got {outputs} and {inputs}"
    if isinstance(weight.format, TwoOfFourFormat):
        if weight.stack:
            return "reads one matrix with 2:4 sparsity at a time; the weight is a stack, as of experts"
        dtype = weight.arrays["values"].dtype
        if dtype != x.dtype:
            return f"needs values in the dtype of the activations, {x.dtype}; got {dtype}"
        return fragments.unsupported_reason(request)
    if isinstance(weight.format, LookupFormat):
        together = outputs // weight.arrays["codebook"].shape[-2]
        exponents = weight.arrays.get("exponents")
        if exponents is not None and (inputs % exponents.shape[-1] or inputs // exponents.shape[-1] % 2):
            return f"needs exponents of an even number of inputs; got {exponents.shape[-1]} for {inputs}"
        if together % 16:
            return f"needs tables of a multiple of 16 outputs each; got {together}"
    if isinstance(weight.format, Float8Format) and weight.format.columns and inputs % weight.format.columns:
        return f"needs whole blocks of {weight.format.columns} inputs; got {inputs} inputs"
    groups = weight.arrays["scales"].shape[-1] if "scales" in weight.arrays else 1
    if groups > 1 and inputs // groups % 32:
        return f"needs groups of a multiple of 32 inputs; got {inputs // groups}"
    return None
