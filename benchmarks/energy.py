"""Energy of the visible GPUs, from the driver's counters (NVML), which miss no short peak as samples of power do."""

import ctypes
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class EnergyCounter:
    """Counts the joules that the GPUs of CUDA_VISIBLE_DEVICES take within the context; afterwards `joules` has them.

    `joules` is None where there is no NVIDIA driver, or a GPU has no counter.

    Args:
        read: Returns the joules counted so far; default: `read_joules`.
    """

    def __init__(self, read: Callable[[], float | None] | None = None) -> None:
        self.joules: float | None = None
        self._read = read or read_joules
        self._before: float | None = None

    def __enter__(self) -> Self:
        self._before = self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        after = self._read()
        if self._before is not None and after is not None:
            self.joules = after - self._before


def read_joules() -> float | None:
    """Return the energy that the visible GPUs have taken since the driver was loaded; None where it is not known."""
    try:
        library: Any = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2():
        return None
    try:
        counted = [_millijoules(library, name) for name in _visible(library)]
    finally:
        library.nvmlShutdown()
    return None if not counted or None in counted else sum(filter(None, counted)) / 1e3


def _visible(library: Any) -> list[str]:
    """Return the index or UUID of each visible GPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    count = ctypes.c_uint()
    return [] if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) else [str(index) for index in range(count.value)]


def _millijoules(library: Any, name: str) -> int | None:
    handle = ctypes.c_void_p()
    energy = ctypes.c_ulonglong()
    if name.isdigit():
        failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
    else:
        failed = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    failed = failed or library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy))
    return None if failed else energy.value


def cost_fields(
    joules: float | None, tokens: int, tokens_per_second: float, dollars_per_gpu_hour: float
) -> dict[str, float]:
    """Return a row's `joules_per_token`, where the energy is known, and `dollars_per_billion_tokens`.

    Args:
        joules: Energy of the measured steps on all devices, or None.
        tokens: Tokens of these steps.
        tokens_per_second: Sustained speed of one device.
        dollars_per_gpu_hour: Price of an hour of one GPU.
    """
    dollars = dollars_per_gpu_hour * 1e9 / tokens_per_second / 3600
    cost = {"dollars_per_gpu_hour": dollars_per_gpu_hour, "dollars_per_billion_tokens": dollars}
    return cost if joules is None else {"joules_per_token": joules / tokens, **cost}
