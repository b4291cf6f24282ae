"""Tokens per second, model FLOP/s, MFU and peak memory of training steps.

The caller gives model FLOPs per token (6 x matmul parameters + causal attention), which do not count recomputation. MFU
is relative to the device's dense bfloat16 peak, for FP8 runs too.
"""

import re
import resource
import sys
import time
from collections.abc import Callable

import jax

# Dense bfloat16 tensor-core TFLOP/s from NVIDIA's data sheets (half of the rates that are printed for 2:4 sparsity).
# The first pattern found in jax's `device_kind` wins, so that special boards precede their family.
DENSE_BF16_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"GB300", 2500.0),
    (r"GB200", 2500.0),
    (r"B300", 2250.0),
    (r"B200", 2250.0),
    (r"GH200", 989.0),
    (r"H200 NVL", 835.0),
    (r"H200", 989.0),
    (r"H100 PCIe", 756.0),
    (r"H100 NVL", 835.0),
    (r"H100", 989.0),
    (r"H800", 989.0),
    (r"H20", 148.0),
    (r"A100", 312.0),
    (r"A800", 312.0),
    (r"A40", 150.0),
    (r"A30", 165.0),
    (r"A10", 125.0),
    (r"L40S", 362.0),
    (r"L40", 181.0),
    (r"L4", 121.0),
)


def dense_bf16_peak(device_kind: str) -> float | None:
    """Return the dense bfloat16 peak in TFLOP/s for jax's name of a device; None for CPUs and unknown devices."""
    for name, tflops in DENSE_BF16_TFLOPS:
        if re.search(rf"\b{name}\b", device_kind):
            return tflops
    return None


def throughput(
    tokens: float, seconds: float, devices: int, flops_per_token: float, device_kind: str, steps: int = 1
) -> dict[str, float | None]:
    """Compute tokens per second, model FLOP/s, MFU and step time, under their names in `metrics.jsonl`.

    Args:
      tokens: number of tokens on all devices.
      seconds: duration of the steps.
      devices: number of devices.
      flops_per_token: model FLOPs per token.
      device_kind: name of the device in jax.
      steps: number of steps.

    Returns:
      The values by key. `mfu` is a fraction of 1, None if the peak of `device_kind` is unknown.
    """
    seconds = max(seconds, 1e-9)
    tflops = tokens * flops_per_token / seconds / devices / 1e12
    peak = dense_bf16_peak(device_kind)
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_device": tokens / seconds / devices,
        "step_time_seconds": seconds / max(steps, 1),
        "model_tflops_per_device": tflops,
        "mfu": tflops / peak if peak else None,
    }


class Meter:
    """Measures the throughput of training steps between reads. Never touches a device.

    Time that is not training (evaluation, a blocking save) is taken out with `exclude`.
    """

    def __init__(
        self,
        flops_per_token: float,
        devices: int,
        device_kind: str,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._flops_per_token = flops_per_token
        self._devices = devices
        self._device_kind = device_kind
        self._clock = clock
        self.step_seconds: float | None = None
        """Duration of a step at the recent pace."""
        self.total_seconds = 0.0
        """Duration of all steps that were read."""
        self.restart()

    def restart(self) -> None:
        """Discard the steps that were added since the last read, and measure from now on, e.g. after compiling."""
        self._began = self._ended = self._clock()
        self._steps = 0
        self._tokens = 0.0
        self._waited = 0.0
        self._excluded = 0.0

    def add(self, tokens: float, waited_seconds: float = 0.0, at: float | None = None) -> None:
        """Add one completed training step to the current measurement.

        Args:
          tokens: number of tokens on all devices.
          waited_seconds: time that the loop waited for the step's data.
          at: time of completion; default: now.
        """
        self._ended = self._clock() if at is None else at
        self._steps += 1
        self._tokens += tokens
        self._waited += waited_seconds

    def exclude(self, seconds: float) -> None:
        """Exclude `seconds`, such as those of an evaluation, from the current measurement."""
        self._excluded += seconds

    @property
    def unread_seconds(self) -> float:
        """Duration of the steps that were added since the last read."""
        return max(self._ended - self._began - self._excluded, 0.0) if self._steps else 0.0

    def read(self) -> dict[str, float | None]:
        """Return throughput and the fraction of time spent waiting for data since the last read, and reset the meter.

        Empty if no step was added.
        """
        if not self._steps:
            return {}
        seconds = max(self.unread_seconds, 1e-9)
        values = throughput(self._tokens, seconds, self._devices, self._flops_per_token, self._device_kind, self._steps)
        values["data_wait_fraction"] = min(1.0, self._waited / seconds)
        self.total_seconds += seconds
        step_seconds = seconds / self._steps
        # The estimate follows a change of pace within a few windows; a single slow window changes it little.
        self.step_seconds = step_seconds if self.step_seconds is None else 0.7 * self.step_seconds + 0.3 * step_seconds
        self._began = self._ended
        self._steps = 0
        self._tokens = 0.0
        self._waited = 0.0
        self._excluded = 0.0
        return values

    def forget_pace(self) -> None:
        """Ignore the steps read so far in the estimate of the remaining time, e.g. a first step that loaded kernels."""
        self.step_seconds = None

    def eta_seconds(self, steps_left: float) -> float | None:
        """Return the seconds for `steps_left` more steps at the recent pace; None before the first read."""
        return None if self.step_seconds is None else max(0, steps_left) * self.step_seconds


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
