"""Allocates page-locked host memory by CUDA's driver library; GPUs read it at the same address as the CPU."""

import ctypes
import weakref

import numpy as np

_PORTABLE = 1
_MAPPED = 2
"""Flags of cuMemHostAlloc: pinned for all contexts, and visible to GPUs."""


def allocate_pinned(size: int) -> np.ndarray:
    """Allocate `size` bytes of page-locked (pinned) host memory as a uint8 array, freed with the array.

    Raises:
        RuntimeError: there is no CUDA driver, or it has too little memory to pin.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"pinned memory needs the CUDA driver: {error}") from None
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    pointer = ctypes.c_void_p()
    _check(cuda.cuInit(0), "cuInit")
    _check(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    _check(cuda.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        status = cuda.cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(size), _PORTABLE | _MAPPED)
        _check(status, f"cuMemHostAlloc of {size:,} bytes")
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    assert pointer.value is not None
    block = (ctypes.c_uint8 * size).from_address(pointer.value)
    weakref.finalize(block, cuda.cuMemFreeHost, pointer)
    return np.frombuffer(block, np.uint8)


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call} failed with CUDA error {status}.")
