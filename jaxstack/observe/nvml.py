"""NVML's handles of the GPUs of this process, for what JAX does not tell: energy, and memory that others hold."""

import os
from collections.abc import Sequence
from typing import Any


class NoNvmlError(Exception):
    """Raised when NVML cannot be asked about the devices; the message gives the reason."""


class Nvml:
    """NVML, NVIDIA's library for the state of GPUs, and its handles of some devices.

    Args:
      devices: GPUs of this process.

    Attributes:
      library: the module `pynvml`.
      handles: NVML's handle of each device.

    Raises:
      NoNvmlError: a device is no NVIDIA GPU, or the package nvidia-ml-py or the driver's library is missing.
    """

    def __init__(self, devices: Sequence[Any]):
        if any(device.platform not in ("gpu", "cuda") for device in devices):
            raise NoNvmlError(f"NVML measures NVIDIA GPUs, and the devices are {devices[0].platform}")
        try:
            import pynvml  # pyright: ignore[reportMissingImports] - part of jaxstack[cuda]
        except ImportError:
            raise NoNvmlError("the package nvidia-ml-py is not installed: pip install 'jaxstack[cuda]'") from None
        self.library = pynvml
        try:
            pynvml.nvmlInit()
            self.handles = [self._find(name) for name in nvml_names([_local_number(device) for device in devices])]
        except pynvml.NVMLError as error:
            raise NoNvmlError(f"NVML: {error}") from None

    def _find(self, name: int | str) -> Any:
        if isinstance(name, int):
            return self.library.nvmlDeviceGetHandleByIndex(name)
        return self.library.nvmlDeviceGetHandleByUUID(name)


def free_bytes(devices: Sequence[Any]) -> list[int | None]:
    """Return the bytes of each device that no program holds; None of devices that NVML does not know."""
    known = [device for device in devices if device.platform in ("gpu", "cuda")]
    try:
        nvml = Nvml(known)
        found = {id(device): int(nvml.library.nvmlDeviceGetMemoryInfo(handle).free)
                 for device, handle in zip(known, nvml.handles, strict=True)}  # fmt: skip
    except Exception:  # a driver without this query (NVML has a class of exceptions for each error), or none
        found = {}
    return [found.get(id(device)) for device in devices]


def available_bytes(devices: Sequence[Any]) -> list[int | None]:
    """Return the bytes of each device that this process holds or can still get; None where that is not known.

    XLA's own limit does not tell what other programs hold: it is the same before and after XLA found too little.
    """
    found: list[int | None] = []
    for device, free in zip(devices, free_bytes(devices), strict=True):
        stats = device.memory_stats() or {}
        held = stats.get("pool_bytes", stats.get("bytes_in_use", 0))
        found.append(None if free is None or "bytes_limit" not in stats else free + held)
    return found


def _local_number(device: Any) -> int:
    number = device.local_hardware_id
    return device.id if number is None else int(number)


def nvml_names(numbers: Sequence[int], visible: str | None = None) -> list[int | str]:
    """Return NVML's names (indices or UUIDs) of this process's GPUs `numbers`, following CUDA_VISIBLE_DEVICES.

    Args:
      numbers: the process's own numbers, which count visible GPUs.
      visible: the variable CUDA_VISIBLE_DEVICES; default: that of this process.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if visible is None else visible
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    names = [entries[number] if number < len(entries) else str(number) for number in numbers]
    return [int(name) if name.isdigit() else name for name in names]
