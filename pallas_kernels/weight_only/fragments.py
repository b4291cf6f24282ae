"""Plans and launches the kernels of `triton_fragments`: 2:4 sparse weights (1 to 64 rows) and int4 (1 to 16 rows)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.target import multiprocessors
from pallas_kernels.triton_support import triton_call
from pallas_kernels.weight_only.formats import TwoOfFourFormat
from pallas_kernels.weight_only.request import PackedMatmulRequest

_ROWS = 8
"""Rows of x of one instruction of the tensor cores, whose other operand is 16 outputs."""
_WARPS = 16
"""Warps that a multiprocessor should have, so that enough loads are under way."""
_MOST_ROWS = 16
"""Rows that are multiplied with integers at most: with more, activations are loaded too often."""


@dataclasses.dataclass(frozen=True)
class FragmentTile:
    """Part of a product that each Triton program computes.

    Attributes:
        blocks: blocks of 16 outputs.
        warps: number of warps of a program, which take neighbouring parts of the inputs and add their sums.
        ranges: number of programs that share the inputs of an output; their sums are added by XLA.
    """

    blocks: int
    warps: int
    ranges: int = 1


@dataclasses.dataclass(frozen=True)
class FragmentPlan:
    """Compile-time constants of the kernels.

    Attributes:
        rows: rows of x.
        inputs, outputs: dims of the matrix.
        sparse: whether the weight has 2:4 sparsity; it has integers of 4 bits otherwise.
        tile: see `FragmentTile`.
        groups: scales of an output; 1 for 2:4 sparsity.
        float16: whether the activations are in float16; they are in bfloat16 otherwise.
    """

    rows: int
    inputs: int
    outputs: int
    sparse: bool
    tile: FragmentTile
    groups: int = 1
    float16: bool = False

    @property
    def blocks(self) -> int:
        """Number of blocks of 16 outputs that a program computes."""
        return self.tile.blocks

    @property
    def warps(self) -> int:
        """Number of warps of a program."""
        return self.tile.warps

    @property
    def step_inputs(self) -> int:
        """Number of inputs that a warp multiplies in a step."""
        return 256 if self.sparse else 128

    @property
    def steps(self) -> int:
        """Number of steps of a program."""
        return self.inputs // (self.step_inputs * self.tile.warps * self.tile.ranges)

    @property
    def columns(self) -> int:
        """Number of blocks of 8 rows of x."""
        return -(-self.rows // _ROWS)

    @property
    def lane_rows(self) -> int:
        """Number of rows of a block that are in the arranged x: all 8, or of a single block those that there are."""
        return min(self.rows, _ROWS)

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        return self.inputs // self.groups


def unsupported_reason(request: PackedMatmulRequest) -> str | None:
    """Return why these kernels cannot compute a product that `triton_kernel` or they compute, or None if they can."""
    weight = request.weight
    inputs = math.prod(weight.inputs)
    if isinstance(weight.format, TwoOfFourFormat):
        return f"needs inputs that are a multiple of 256; got {inputs}" if inputs % 256 else None
    if weight.stack or not {"q", "scales"} <= {*weight.arrays} or weight.arrays["q"].dtype != jnp.int4:
        return "reads one matrix of integers of 4 bits with scales"
    if request.x.dtype != jnp.bfloat16:
        return f"needs activations in bfloat16; got {request.x.dtype}"
    if request.x.shape[0] > _MOST_ROWS:
        return f"takes at most {_MOST_ROWS} rows; got {request.x.shape[0]}"
    groups = weight.arrays["scales"].shape[-1]
    if inputs % 128 or groups > 1 and (inputs % groups or inputs // groups % 128):
        return f"needs groups of a multiple of 128 inputs; got {groups} of {inputs}"
    return None


def make_plan(request: PackedMatmulRequest, tile: FragmentTile | None = None) -> FragmentPlan:
    """Return the constants of a call, with tile sizes chosen for it unless given."""
    arrays = request.weight.arrays
    sparse = isinstance(request.weight.format, TwoOfFourFormat)
    plan = FragmentPlan(
        request.x.shape[0],
        math.prod(request.weight.inputs),
        math.prod(request.weight.outputs),
        sparse,
        tile or FragmentTile(1, 1),
        groups=1 if sparse else arrays["scales"].shape[-1],
        float16=request.x.dtype == jnp.float16,
    )
    return plan if tile is not None else dataclasses.replace(plan, tile=_default_tile(plan))


def _default_tile(plan: FragmentPlan) -> FragmentTile:
    """Choose tile sizes for a product whose shape has not been measured: enough warps for all multiprocessors."""
    parts = plan.inputs // plan.step_inputs
    enough = _WARPS * multiprocessors()
    warps = next(count for count in (8, 4, 2, 1) if parts % count == 0)
    while warps > 2 and plan.outputs // 16 * (warps // 2) >= enough:
        warps //= 2
    ranges = 1
    while plan.outputs // 16 * warps * ranges < enough and parts % (2 * warps * ranges) == 0:
        ranges *= 2
    return FragmentTile(1, warps, ranges)


def tile_problem(plan: FragmentPlan) -> str | None:
    """Return why the tile sizes of a plan do not fit its shapes, or None if they do."""
    tile = plan.tile
    if plan.outputs % (16 * tile.blocks):
        return f"{tile.blocks} blocks of 16 do not divide {plan.outputs} outputs"
    if plan.inputs % (plan.step_inputs * tile.warps * tile.ranges):
        return f"{tile.ranges} ranges of {tile.warps} warps do not divide {plan.inputs} inputs by {plan.step_inputs}"
    return None


def arrange(x: Float[Array, "rows in"], plan: FragmentPlan) -> Int32[Array, "words 1"]:
    """Return the activations in the order in which threads load them, two of 16 bits in a word.

    Dims of the reshaped array are one or two bits of the number of an input. For a 2:4 sparse matrix these are, from
    the highest: half of the step, load, two bits of the position of four inputs in an instruction, of which the lower
    one is a thread's, word of the load, half of the four inputs, which is a thread's too, and place in a word. For
    integers of 4 bits they are thread, word of its load, which of two numbers 4 apart in a register, and two bits of
    the register.
    """
    x = jnp.pad(x, ((0, plan.columns * plan.lane_rows - plan.rows), (0, 0)))
    dims = (2, 2, 2, 2, 4, 2, 2) if plan.sparse else (4, 4, 2, 2, 2)
    order = (2, 0, 3, 7, 1, 6, 8, 4, 5, 9) if plan.sparse else (2, 0, 4, 1, 3, 6, 7, 5)
    arranged = x.reshape(plan.columns, plan.lane_rows, plan.inputs // plan.step_inputs, *dims).transpose(order)
    return jax.lax.bitcast_convert_type(arranged.reshape(-1, 1, 2), jnp.int32)


def multiply(request: PackedMatmulRequest, tile: FragmentTile) -> Float[Array, "rows out"]:
    """Multiply x with the transposed packed matrix."""
    from pallas_kernels.weight_only.triton_fragments import dense_fragment_kernel, sparse_fragment_kernel

    plan = make_plan(request, tile)
    arrays = request.weight.arrays
    if plan.sparse:
        values = jax.lax.bitcast_convert_type(arrays["values"], jnp.int8).reshape(plan.outputs, -1)
        kernel, operands = sparse_fragment_kernel, (values, _bytes_of_halves(arrays["kept"]))
    else:
        kernel, operands = dense_fragment_kernel, (_bytes_of_halves(arrays["q"]), arrays["scales"])
    major, minor = request.target.compute_capability or (0, 0)
    shape = (plan.rows, plan.outputs)
    ranges = tile.ranges
    y = triton_call(
        arrange(request.x, plan),
        *operands,
        kernel=kernel,
        out_shape=jax.ShapeDtypeStruct(
            *((shape, request.out_dtype) if ranges == 1 else ((ranges, *shape), jnp.float32))
        ),
        grid=(plan.outputs // (16 * tile.blocks), ranges),
        name="packed_matmul",
        num_warps=tile.warps,
        num_stages=1,
        compute_capability=10 * major + minor,
        plan=plan,
    )
    return y if ranges == 1 else jnp.sum(y, 0).astype(request.out_dtype)


def _bytes_of_halves(numbers: jax.Array) -> jax.Array:
    """Return the bytes of numbers of 4 bits, a change of the type alone: XLA stores those at even places low."""
    return jax.lax.bitcast_convert_type(numbers.reshape(numbers.shape[0], -1, 2), jnp.int8)
