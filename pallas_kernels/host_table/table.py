"""`HostTable`: a table in host memory that may be larger than a GPU's memory."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.host_table.pinned import allocate_pinned
from pallas_kernels.target import current_target


class HostTable:
    """A table [rows, D] in host memory (pinned for a GPU), from which `host_gather` copies rows to the device.

    Args:
        rows: number of rows.
        width: D.
        dtype: dtype of the elements; a row must have a multiple of 4 bytes.

    Attributes:
        array: the table as a NumPy array, which may be written while no gather runs. The table must live as long as
            programs that gather from it.

    Raises:
        ValueError: a row does not have a multiple of 4 bytes.
    """

    def __init__(self, rows: int, width: int, dtype: jax.typing.DTypeLike):
        dtype = jnp.dtype(dtype)
        size = width * dtype.itemsize
        if size % 4:
            raise ValueError(f"a row must have a multiple of 4 bytes; {width} elements of {dtype} have {size}")
        self.pinned = current_target().platform == "cuda" and not current_target().declared
        memory = allocate_pinned(rows * size) if self.pinned else np.zeros(rows * size, np.uint8)
        self.array = memory.view(dtype).reshape(rows, width)

    @classmethod
    def of(cls, array: np.ndarray) -> "HostTable":
        """Create a table in host memory with a copy of an array [rows, D]."""
        table = cls(*array.shape, dtype=array.dtype)
        table.array[:] = array
        return table

    @property
    def address(self) -> int:
        """Memory address of the table's first row, for the CPU and for GPUs."""
        return self.array.ctypes.data

    def __str__(self) -> str:
        rows, width = self.array.shape
        return f"[{rows}, {width}] {self.array.dtype.name}{' pinned' * self.pinned}"
