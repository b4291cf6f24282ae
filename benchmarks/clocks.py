"""Clock and power of the GPUs during a measurement: under load they lower their clocks."""

import os
import subprocess
from collections import defaultdict
from types import TracebackType
from typing import Self

EVERY_MILLISECONDS = 100
FIELDS = "index,clocks.sm,power.draw.instant"


class GpuClocks:
    """Samples `nvidia-smi` within the context; afterwards `row` has the means.

    The GPUs are those of CUDA_VISIBLE_DEVICES. `row` is empty if there is no `nvidia-smi`, or no sample was taken.
    """

    def __init__(self) -> None:
        self.row: dict[str, float] = {}
        self._asking: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits", f"-lms={EVERY_MILLISECONDS}"]
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            command.append(f"--id={visible}")
        try:
            self._asking = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
            )
        except OSError:
            self._asking = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._asking is not None:
            self._asking.terminate()
            self.row = read_samples(self._asking.communicate()[0])


def read_samples(text: str) -> dict[str, float]:
    """Parse lines of index, MHz, watts into means over time: `sm_mhz` of the slowest GPU, `watts` of an average GPU."""
    clocks = defaultdict(list)
    watts = defaultdict(list)
    for line in text.splitlines():
        try:
            index, clock, power = (float(value) for value in line.split(","))
        except ValueError:
            continue  # a truncated line, or a value that this GPU does not report
        clocks[index].append(clock)
        watts[index].append(power)
    if not clocks:
        return {}

    def mean(values):
        return sum(values) / len(values)

    return {"sm_mhz": min(map(mean, clocks.values())), "watts": mean([mean(values) for values in watts.values()])}
