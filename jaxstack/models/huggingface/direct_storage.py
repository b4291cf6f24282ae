"""Reads tensors of safetensors files straight into GPU memory, by NVIDIA's GPUDirect Storage (package kvikio).

Without the kernel module nvidia-fs, kvikio reads through host memory and has no advantage, so it is not used.
"""

import importlib
import json
import math
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

DRIVER = Path("/proc/driver/nvidia-fs")
"""Exists where the kernel module nvidia-fs is loaded."""
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm] (a variable in jax's stubs)
_DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


class ByteReader(Protocol):
    """Function that reads bytes of a file into the memory of a device."""

    def __call__(self, path: Path, offset: int, count: int, device: Device) -> jax.Array:
        """Return `count` bytes of the file from `offset` on, as uint8 [count] on the device."""
        ...


def why_unavailable() -> str | None:
    """Return why GPUDirect Storage cannot be used in this process, or None if it can."""
    if jax.default_backend() != "gpu":
        return f"JAX runs on {jax.default_backend()}"
    if not DRIVER.exists():
        return "the kernel module nvidia-fs is not loaded"
    try:
        importlib.import_module("cupy")
        driver = importlib.import_module("kvikio.cufile_driver")
    except ImportError as error:
        return f"kvikio or cupy cannot be imported ({error}); pip install kvikio-cu13"
    return None if driver.get("is_gds_available") else "cuFile finds no storage that supports it"


def read_by_kvikio(path: Path, offset: int, count: int, device: Device) -> jax.Array:
    """Return bytes of a file in the memory of a GPU, uint8 [count], read without a copy in host memory.

    The buffer belongs to cupy, outside of the memory that XLA manages, and is freed with the array.

    Raises:
      OSError: fewer bytes were read.
    """
    cupy = importlib.import_module("cupy")
    kvikio = importlib.import_module("kvikio.cufile")
    with cupy.cuda.Device(device.local_hardware_id):
        buffer = cupy.empty(count, cupy.uint8)
        with kvikio.CuFile(str(path), "r") as file:
            found = file.read(buffer, size=count, file_offset=offset)
    if found != count:
        raise OSError(f"{path}: read {found} of {count} bytes at {offset}")
    return jnp.from_dlpack(buffer)


class DirectTensor:
    """Reader of slices of one tensor of a safetensors file: `tensor[0:2, 1:3]` is a jax.Array on the device.

    The bytes of the chosen rows (dim 0) are read; other dims are cut on the device.

    Args:
      path: the file.
      name: the tensor's name in it; its dtype is F32, F16 or BF16.
      device: where slices are placed.
      read: reads the bytes.
    """

    def __init__(self, path: Path, name: str, device: Device, read: ByteReader):
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))[name]
        self._path = path
        self._device = device
        self._read = read
        self._shape: tuple[int, ...] = tuple(header["shape"])
        self._dtype = jnp.dtype(_DTYPES[header["dtype"]])
        self._begin = 8 + size + header["data_offsets"][0]

    def __getitem__(self, index: tuple[slice, ...]) -> jax.Array:
        start, stop, _ = index[0].indices(self._shape[0])
        row = math.prod(self._shape[1:]) * self._dtype.itemsize
        raw = self._read(self._path, self._begin + start * row, (stop - start) * row, self._device)
        values = lax.bitcast_convert_type(raw.reshape(-1, self._dtype.itemsize), self._dtype)
        return values.reshape(stop - start, *self._shape[1:])[(slice(None), *index[1:])]
