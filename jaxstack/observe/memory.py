"""Peak memory of this process's devices."""

import resource
import sys

import jax


def peak_memory_bytes() -> int:
    """Return the peak memory of this process in bytes so far; on accelerators the maximum over the local devices.

    The CPU backend has no such statistics. There it is the peak resident set of the whole process (all simulated
    devices, Python and the compiler included), as the operating system reports it.
    """
    peaks = [
        stats["peak_bytes_in_use"]
        for stats in (device.memory_stats() for device in jax.local_devices())
        if stats and "peak_bytes_in_use" in stats
    ]
    return max(peaks) if peaks else _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes
