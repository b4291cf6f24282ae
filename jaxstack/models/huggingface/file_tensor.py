"""Tensors in safetensors files, whose bytes are read when they are needed.

A file that stays mapped, as `safetensors.safe_open` leaves it, keeps every page that was ever read in the process's
resident memory.
"""

import dataclasses
import json
import math
from pathlib import Path
from types import EllipsisType
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "I8": np.int8,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
}
"""safetensors' name of a dtype -> the dtype, for those that can be read."""
Index: TypeAlias = slice | EllipsisType | tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """Reader of slices of one tensor of a safetensors file: `tensor[0:2, 1:3]` is a new array of NumPy.

    Attributes:
      path: the file.
      begin: offset of the tensor's first byte in the file.
      shape: its shape.
      dtype_name: safetensors' name of its dtype, such as BF16.
    """

    path: Path
    begin: int
    shape: tuple[int, ...]
    dtype_name: str

    @property
    def dtype(self) -> np.dtype:
        """Dtype of its values.

        Raises:
          KeyError: NumPy and JAX have none of this name.
        """
        return np.dtype(DTYPES[self.dtype_name])

    def __getitem__(self, index: Index) -> np.ndarray:
        first, *inner = index if isinstance(index, tuple) else (index,)
        rows = slice(None) if first is ... else first
        uncut = all(range(size)[cut] == range(size) for cut, size in zip(inner, self.shape[1:], strict=False))
        if uncut and rows.step in (None, 1):
            return self._read(rows)
        # Of rows that are cut only the pages that are needed are touched, in a mapping that ends with this call.
        return np.array(np.memmap(self.path, self.dtype, "r", self.begin, self.shape)[rows, *inner])

    def _read(self, rows: slice) -> np.ndarray:
        """Read whole rows; a scalar has one.

        Raises:
          OSError: the file has become shorter.
        """
        start, stop, _ = rows.indices(self.shape[0] if self.shape else 1)
        found = np.empty((max(stop - start, 0), *self.shape[1:]), self.dtype)
        left = memoryview(found.reshape(-1).view(np.uint8))
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.begin + start * math.prod(self.shape[1:]) * self.dtype.itemsize)
            while left:
                count = file.readinto(left)
                if not count:
                    raise OSError(f"{self.path} has become shorter: {len(left)} bytes of a tensor are missing.")
                left = left[count:]
        return found if self.shape else found.reshape(())


def file_tensors(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a safetensors file by name; only its header is read."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: FileTensor(path, 8 + size + said["data_offsets"][0], tuple(said["shape"]), said["dtype"])
        for name, said in header.items()
    }
