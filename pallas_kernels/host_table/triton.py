"""Gathers rows of a table in host memory by a Triton kernel that reads pinned memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.host_table.request import HostGatherRequest
from pallas_kernels.host_table.table import HostTable
from pallas_kernels.triton_support import triton_call, unsupported_target

_LEAST_CAPABILITY = (8, 0)
_TILE = 2048
"""Words of 4 bytes that a program copies: many programs with few reads each keep the bus busy."""
_WIDEST = 1024


@dataclasses.dataclass(frozen=True)
class GatherPlan:
    """Compile-time constants of the Triton kernel that gathers rows of a table in host memory.

    Attributes:
        count: number of rows to gather.
        rows: number of rows of the table.
        words: words of 4 bytes in a row.
    """

    count: int
    rows: int
    words: int

    @property
    def block(self) -> int:
        """Number of 32-bit words of a row that a Triton program copies, a power of two."""
        return min(_WIDEST, 1 << (self.words - 1).bit_length())

    @property
    def block_rows(self) -> int:
        """Number of rows that a Triton program copies, a power of two."""
        return _TILE // self.block

    @property
    def grid(self) -> tuple[int, int]:
        """Number of Triton programs along the rows, and along the words of a row."""
        return -(-self.count // self.block_rows), -(-self.words // self.block)


def unsupported_reason(request: HostGatherRequest) -> str | None:
    """Return why the Triton kernel cannot compute a gather, or None if it can."""
    if reason := unsupported_target(request.target, _LEAST_CAPABILITY):
        return reason
    if request.table.array.dtype.itemsize > 4:
        return f"copies dtypes of at most 4 bytes; the table has {request.table.array.dtype}"
    if not (request.table.pinned or request.target.declared):
        return "needs a table in pinned memory: make it after the GPU is initialised"
    return None


def make_plan(table: HostTable, count: int) -> GatherPlan:
    """Return the Triton kernel's compile-time constants for a gather of `count` rows of a table."""
    rows, width = table.array.shape
    return GatherPlan(count, rows, width * table.array.dtype.itemsize // 4)


def address_words(table: HostTable) -> np.ndarray:
    """Split the table's 64-bit address into two words for the kernel, uint32 [2], the low one first."""
    return np.array([table.address & 0xFFFFFFFF, table.address >> 32], np.uint32)


def gather(request: HostGatherRequest) -> jax.Array:
    """Gather rows of the table by the Triton kernel, [N, D]."""
    from pallas_kernels.host_table.triton_kernel import gather_rows_kernel

    plan = make_plan(request.table, request.ids.shape[0])
    dtype = request.table.array.dtype
    width = request.table.array.shape[1]
    if not plan.count:
        return jnp.zeros((0, width), dtype)
    major, minor = request.target.compute_capability or (0, 0)
    words = triton_call(
        jnp.asarray(address_words(request.table)),
        request.ids,
        kernel=gather_rows_kernel,
        out_shape=jax.ShapeDtypeStruct((plan.count, plan.words), jnp.int32),
        grid=plan.grid,
        name="host_gather",
        num_warps=4,
        num_stages=1,
        compute_capability=10 * major + minor,
        plan=plan,
    )
    found = jax.lax.bitcast_convert_type(words, dtype)  # of narrower dtypes several per word, in a separate dim
    return found.reshape(plan.count, width)
