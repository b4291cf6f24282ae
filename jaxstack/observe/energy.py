"""Measures energy, GPU-hours and cost of a run, summed over restarts.

Energy is read from the counters of the GPUs, not integrated from samples of their power: the power sensors of recent
GPUs sample only a fraction of the time (Yang et al. 2023, arXiv:2312.02741).
"""

import contextlib
import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxstack.distributed import coordination
from jaxstack.files import write_file
from jaxstack.observe.nvml import NoNvmlError, Nvml

FILE = "energy.json"
INTERVAL_SECONDS = 5.0
"""Time between two reads of the counters, which move about every 0.1 s; one read takes some milliseconds per GPU."""
_JOULES_PER_KWH = 3.6e6


class EnergyCounters(Protocol):
    """Interface for reading the energy that the GPUs of this process have used."""

    def read(self) -> Sequence[float]:
        """Return the energy used by each GPU, in joules since a fixed moment."""
        ...


class NvmlCounters:
    """Energy counters of NVIDIA GPUs since Volta, read from NVML.

    Args:
      devices: GPUs of this process.

    Raises:
      NoNvmlError: NVML cannot be asked about the devices, or a GPU has no counter.
    """

    def __init__(self, devices: Sequence[Any]):
        self._nvml = Nvml(devices)
        try:
            self.read()
        except self._nvml.library.NVMLError as error:
            raise NoNvmlError(f"NVML: {error}") from None

    def read(self) -> list[float]:
        """Return the joules of each GPU since the driver was loaded."""
        read = self._nvml.library.nvmlDeviceGetTotalEnergyConsumption
        return [read(handle) / 1e3 for handle in self._nvml.handles]


@dataclasses.dataclass(frozen=True)
class Usage:
    """GPU time and energy used by a run."""

    joules: float = 0.0
    """Energy of the GPUs that were measured."""
    gpu_seconds: float = 0.0
    """Number of GPUs x the time that processes of the run had them."""
    measured_gpu_seconds: float = 0.0
    """The part of `gpu_seconds` in which the energy was measured."""

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.joules + other.joules,
            self.gpu_seconds + other.gpu_seconds,
            self.measured_gpu_seconds + other.measured_gpu_seconds,
        )

    def scaled(self, factor: float) -> "Usage":
        """Return the usage with all values multiplied by `factor`."""
        return Usage(self.joules * factor, self.gpu_seconds * factor, self.measured_gpu_seconds * factor)

    @classmethod
    def from_plain(cls, value: object) -> "Usage":
        """Make a `Usage` from its JSON form; zero if that is missing or damaged."""
        if not isinstance(value, Mapping):
            return cls()
        numbers = {field.name: value.get(field.name) for field in dataclasses.fields(cls)}
        known = {name: float(x) for name, x in numbers.items() if isinstance(x, int | float) and 0 <= x < math.inf}
        return cls(**known) if len(known) == len(numbers) else cls()


@dataclasses.dataclass(frozen=True)
class EnergyPrices:
    """Factors that convert measured energy and time to kWh and cost.

    Attributes:
      pue: power usage effectiveness of the data centre, its energy over that of the machines.
      per_gpu_hour: price of an hour of one GPU, in the user's currency; None if it is not known.
    """

    pue: float = 1.0
    per_gpu_hour: float | None = None


class EnergyMeter:
    """Measures energy and time of a run's GPUs in a background thread.

    Every process measures its own GPUs. The first one adds up all of them, and keeps the sums in `energy.json`, from
    which the next start of the run goes on; a crash loses the last seconds at most. Everything counts from the
    construction on: compiling, saving, evaluating, and steps that are repeated after a crash. Usage that the other
    processes have not sent yet, for some seconds at a start's beginning and end, counts at the mean of what is known.

    Args:
      run_dir: the run directory; None, or a process other than the first: nothing is written.
      gpus: number of GPUs of this process.
      counters: energy counters of these GPUs; None: only the time is measured.
      prices: factors from energy and time to kWh and cost.
      clock: returns seconds.
      interval: seconds between two reads; 0: no thread, the caller calls `sample`.
      all_gpus: number of GPUs of all processes; default: `gpus`, of the only one.
    """

    def __init__(
        self,
        run_dir: Path | None,
        gpus: int,
        counters: EnergyCounters | None,
        prices: EnergyPrices | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval: float = INTERVAL_SECONDS,
        all_gpus: int | None = None,
    ):
        self._path = run_dir / FILE if run_dir is not None else None
        self._gpus = gpus
        self._all_gpus = gpus if all_gpus is None else all_gpus
        self._counters = counters
        self._clock = clock
        self._prices = prices or EnergyPrices()
        self._before = read_usage(self._path)
        self._own = Usage()
        self._others = Usage()
        self._last_joules = self._read_counters()
        self._last_time = clock()
        self._watts_since = (self._last_time, 0.0)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(interval,), daemon=True) if interval else None
        if self._thread is not None:
            self._thread.start()

    def sample(self) -> None:
        """Take a measurement: read the counters, sum usage over all processes, and write `energy.json`."""
        with self._lock:
            now = self._clock()
            joules = self._read_counters()
            seconds = self._gpus * max(0.0, now - self._last_time)
            self._last_time = now
            used = 0.0
            if joules is not None and self._last_joules is not None:
                # A counter goes back if the driver is loaded again.
                used = sum(max(0.0, new - old) for new, old in zip(joules, self._last_joules, strict=True))
            measured = seconds * (joules is not None and self._last_joules is not None)
            self._last_joules = joules
            self._own += Usage(used, seconds, measured)
            self._exchange()
            self._write()

    def read(self, tokens: float, tokens_per_second: float | None) -> dict[str, float]:
        """Return energy, power, GPU-hours and cost for a metrics line.

        Energy and power are left out unless all GPUs of the run were measured at all times.

        Args:
          tokens: number of tokens of the run so far, without steps that are repeated.
          tokens_per_second: recent speed of the run, on all devices.

        Returns:
          `power_watts` (mean of all GPUs since the last call), `joules_per_token` (that, per token of a step),
          `total_joules_per_token` and `energy_kwh` (of the whole run; the latter times the PUE), `gpu_hours`, and
          `cost` if a price is set.
        """
        with self._lock:
            start = self._since_start
            total = self.total
            values: dict[str, float] = {}
            if total.gpu_seconds:
                if total.joules and total.measured_gpu_seconds >= 0.99 * total.gpu_seconds:
                    values = self._power(start.joules, tokens_per_second)
                    values["total_joules_per_token"] = total.joules / max(tokens, 1.0)
                    values["energy_kwh"] = total.joules / _JOULES_PER_KWH * self._prices.pue
                values["gpu_hours"] = total.gpu_seconds / 3600
                if self._prices.per_gpu_hour is not None:
                    values["cost"] = values["gpu_hours"] * self._prices.per_gpu_hour
            return values

    def _power(self, joules: float, tokens_per_second: float | None) -> dict[str, float]:
        """Return {metric: value}: mean power since the last call, energy per token; {} if there is no new sample."""
        since, before = self._watts_since
        if self._last_time <= since:
            return {}
        watts = max(0.0, joules - before) / (self._last_time - since)
        self._watts_since = (self._last_time, joules)
        return {"power_watts": watts} | ({"joules_per_token": watts / tokens_per_second} if tokens_per_second else {})

    @property
    def total(self) -> Usage:
        """Energy and GPU time of the whole run, up to the last measurement."""
        return self._before + self._since_start

    @property
    def _since_start(self) -> Usage:
        """Energy and GPU time of all processes since this start, up to this process's last measurement."""
        known = self._own + self._others
        every = self._own.gpu_seconds * self._all_gpus / max(self._gpus, 1)
        return known.scaled(max(1.0, every / known.gpu_seconds)) if known.gpu_seconds else known

    def close(self) -> None:
        """Measure a last time, and stop the thread. Further calls do nothing."""
        if self._over.is_set():
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=INTERVAL_SECONDS)
        self._try_sample()

    def _watch(self, interval: float) -> None:
        while not self._over.wait(interval):
            self._try_sample()

    def _try_sample(self) -> None:
        # A full disk or a lost coordinator must not end the measurement: the next sample has the same sums and more.
        with contextlib.suppress(OSError, RuntimeError):
            self.sample()

    def _read_counters(self) -> Sequence[float] | None:
        """Read the energy counters of this process's GPUs; None if there are none, or if they cannot be read."""
        try:
            return None if self._counters is None else list(self._counters.read())
        except Exception:  # NVML has an exception class for each error; a GPU that fell off the bus ends the run itself
            return None

    def _exchange(self) -> None:
        index, count = coordination.process_position()
        if count == 1:
            return
        if index:
            coordination.publish(f"energy/{index}", dataclasses.asdict(self._own))
            return
        found = (coordination.try_read(f"energy/{other}") for other in range(1, count))
        self._others = sum(map(Usage.from_plain, found), Usage())

    def _write(self) -> None:
        if self._path is not None and self._gpus:
            write_file(self._path, (json.dumps(dataclasses.asdict(self.total)) + "\n").encode(), durable=False)


def read_usage(path: Path | None) -> Usage:
    """Read the energy and GPU time that a run used before a restart from `energy.json`; zero if missing or damaged."""
    try:
        return Usage.from_plain(json.loads(path.read_text(encoding="utf-8"))) if path is not None else Usage()
    except (OSError, ValueError, RecursionError):
        return Usage()


def start_energy_meter(run_dir: Path | None, prices: EnergyPrices, say: Callable[[str], None]) -> EnergyMeter:
    """Start an `EnergyMeter` for this process's GPUs; without energy counters it measures time only and reports why.

    Args:
      run_dir: directory of `energy.json`; None: nothing is written.
      prices: factors from energy and time to kWh and cost.
      say: reports the reason why energy is not measured.
    """
    devices = jax.local_devices()
    gpus = _count_gpus(devices)
    try:
        counters = NvmlCounters(devices)
    except NoNvmlError as error:
        say(f"note: energy is not measured: {error}")
        counters = None
    return EnergyMeter(run_dir, gpus, counters, prices, all_gpus=_count_gpus(jax.devices()))


def _count_gpus(devices: Sequence[Any]) -> int:
    return sum(device.platform in ("gpu", "cuda") for device in devices)
