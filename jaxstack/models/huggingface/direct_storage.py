"""Reads tensors of safetensors files straight into GPU memory, by NVIDIA's GPUDirect Storage (package kvikio).

Without the kernel module nvidia-fs, kvikio reads through host memory and has no advantage, so it is not used.
"""

import importlib
import math
from pathlib import Path
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.models.huggingface.file_tensor import FileTensor

DRIVER = Path("/proc/driver/nvidia-fs")
"""Exists where the kernel module nvidia-fs is loaded."""
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm] (a variable in jax's stubs)


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
      tensor: the tensor; its dtype is F32, F16 or BF16.
      device: where slices are placed.
      read: reads the bytes.
    """

    def __init__(self, tensor: FileTensor, device: Device, read: ByteReader):
        self._tensor = tensor
        self._device = device
        self._read = read

    def __getitem__(self, index: tuple[slice, ...]) -> jax.Array:
        tensor = self._tensor
        start, stop, _ = index[0].indices(tensor.shape[0])
        row = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        raw = self._read(tensor.path, tensor.begin + start * row, (stop - start) * row, self._device)
        values = lax.bitcast_convert_type(raw.reshape(-1, tensor.dtype.itemsize), tensor.dtype)
        return values.reshape(stop - start, *tensor.shape[1:])[(slice(None), *index[1:])]
