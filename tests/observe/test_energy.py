"""Energy and cost of runs, with energy counters that are not there."""

import contextlib
import dataclasses
import json
import time

import jax
import pytest

from jaxstack.observe import energy
from jaxstack.observe.config import ObserveConfig
from jaxstack.observe.energy import (
    FILE,
    EnergyMeter,
    EnergyPrices,
    NvmlCounters,
    Usage,
    read_usage,
    start_energy_meter,
)
from jaxstack.observe.nvml import NoNvmlError, nvml_names
from jaxstack.observe.progress import progress_fields
from jaxstack.observe.run_log import RunLog
from jaxstack.observe.throughput import Meter


class FakeGpus:
    """GPUs of a constant power, and the clock that they run by."""

    def __init__(self, *watts: float, before: float = 1e6):
        self.watts = watts
        self.now = 100.0
        self.before = before
        self.fails = False

    def read(self) -> list[float]:
        if self.fails:
            raise RuntimeError("GPU is lost")
        return [self.before + power * self.now for power in self.watts]

    def clock(self) -> float:
        return self.now

    def meter(self, run_dir=None, **prices: float) -> EnergyMeter:
        return EnergyMeter(run_dir, len(self.watts), self, EnergyPrices(**prices), self.clock, interval=0)


def test_figures_of_a_known_run():
    """One GPU of 690 W at 60,901 tokens/s: the published-style figures of a run of 1e9 tokens."""
    gpus = FakeGpus(690.0)
    meter = gpus.meter(per_gpu_hour=2.5)
    gpus.now += 1e9 / 60_901
    meter.sample()
    values = meter.read(1e9, 60_901)
    assert values["power_watts"] == pytest.approx(690)
    assert values["joules_per_token"] == pytest.approx(11.33e-3, rel=1e-3)
    assert values["total_joules_per_token"] == pytest.approx(11.33e-3, rel=1e-3)
    assert values["energy_kwh"] == pytest.approx(3.147, rel=1e-3)
    assert values["gpu_hours"] == pytest.approx(4.561, rel=1e-3)
    assert values["cost"] == pytest.approx(2.5 * 4.561, rel=1e-3)


def test_pue_multiplies_the_kwh_only():
    gpus = FakeGpus(500.0, 300.0)
    meter = gpus.meter(pue=1.5)
    gpus.now += 3600
    meter.sample()
    values = meter.read(1000, 10.0)
    assert values["energy_kwh"] == pytest.approx(0.8 * 1.5)
    assert values["power_watts"] == pytest.approx(800)
    assert values["gpu_hours"] == pytest.approx(2) and "cost" not in values


def test_overhead_counts_in_the_total_but_not_in_steps():
    """100 s of compiling at 100 W, then 100 s of steps at 400 W."""
    gpus = FakeGpus(100.0)
    meter = gpus.meter()
    gpus.now += 100
    meter.sample()
    meter.read(0, None)
    gpus.watts = (400.0,)
    gpus.before = gpus.before - 300.0 * gpus.now
    gpus.now += 100
    meter.sample()
    values = meter.read(1000, 10.0)
    assert values["joules_per_token"] == pytest.approx(40)
    assert values["total_joules_per_token"] == pytest.approx(50)


def test_sums_are_kept_over_starts(tmp_path):
    """A start that ends without `close`, as after a crash, loses only what came after its last sample."""
    first = FakeGpus(400.0)
    meter = first.meter(tmp_path)
    first.now += 50
    meter.sample()
    first.now += 3  # then it is killed
    second = FakeGpus(400.0, before=0.0)  # another machine, or the same after loading the driver
    meter = second.meter(tmp_path)
    second.now += 50
    meter.close()
    meter.close()
    assert json.loads((tmp_path / FILE).read_text()) == {
        "joules": 40_000.0,
        "gpu_seconds": 100.0,
        "measured_gpu_seconds": 100.0,
    }
    assert meter.read(1000, 20.0)["total_joules_per_token"] == 40.0


def test_usage_that_another_process_has_not_sent_yet_counts_as_ours(tmp_path, monkeypatch):
    """Two processes of one GPU; after a restart the run ends before the other one has sent anything."""
    sent = dict[str, object]()
    monkeypatch.setattr(energy.coordination, "process_position", lambda: (0, 2))
    monkeypatch.setattr(energy.coordination, "try_read", sent.get)

    def start(seconds: float, others: Usage | None) -> dict[str, float]:
        gpus = FakeGpus(400.0)
        meter = EnergyMeter(tmp_path, 1, gpus, EnergyPrices(1.0, 3.6), gpus.clock, interval=0, all_gpus=2)
        sent.clear()
        if others is not None:
            sent["energy/1"] = dataclasses.asdict(others)
        gpus.now += seconds
        meter.close()
        return meter.read(1000, 20.0)

    whole = start(50.0, Usage(20_000.0, 50.0, 50.0))
    assert whole["joules_per_token"] == pytest.approx(40) and whole["total_joules_per_token"] == pytest.approx(40)
    resumed = start(4.0, None)
    assert resumed["power_watts"] == pytest.approx(800) and resumed["joules_per_token"] == pytest.approx(40)
    assert resumed["total_joules_per_token"] == pytest.approx(43.2)
    assert resumed["gpu_hours"] == pytest.approx(108 / 3600) and resumed["cost"] == pytest.approx(0.108)
    late = start(8.0, Usage(1_600.0, 4.0, 4.0))
    assert late["power_watts"] == pytest.approx(800) and late["total_joules_per_token"] == pytest.approx(49.6)
    without = start(8.0, Usage(0.0, 8.0, 0.0))  # the other process cannot measure
    assert "total_joules_per_token" not in without


def test_energy_of_a_part_of_the_run_is_not_shown_as_that_of_the_run(tmp_path):
    gpus = FakeGpus(400.0)
    first = EnergyMeter(tmp_path, 1, None, clock=gpus.clock, interval=0)
    gpus.now += 50
    first.close()
    meter = gpus.meter(tmp_path)
    gpus.now += 50
    meter.sample()
    assert meter.read(1000, 20.0) == {"gpu_hours": pytest.approx(100 / 3600)}


def test_a_counter_that_fails_or_goes_back_adds_nothing():
    gpus = FakeGpus(400.0)
    meter = gpus.meter()
    gpus.now += 10
    meter.sample()
    gpus.before = 0.0  # the driver was loaded again
    gpus.now += 10
    meter.sample()
    assert meter.total.joules == 4000
    gpus.fails = True
    gpus.now += 10
    meter.sample()
    assert meter.total == Usage(4000, 30, 20)


def test_no_new_sample_gives_no_power():
    gpus = FakeGpus(400.0)
    meter = gpus.meter()
    gpus.now += 10
    meter.sample()
    assert "power_watts" in meter.read(1, 1.0)
    assert "power_watts" not in meter.read(2, 1.0)


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"joules": "x"}', '{"joules": -1, "gpu_seconds": 1}', "null", "[" * 9999]
)
def test_a_damaged_file_begins_anew(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert read_usage(tmp_path / FILE) == Usage()


def test_the_thread_reads_by_itself():
    gpus = FakeGpus(400.0)
    meter = EnergyMeter(None, 1, gpus, clock=gpus.clock, interval=0.01)
    gpus.now += 10
    deadline = time.monotonic() + 5
    while not meter.total.joules and time.monotonic() < deadline:
        time.sleep(0.01)
    meter.close()
    assert meter.total.joules == 4000


def test_visible_devices_are_named_as_nvml_names_them():
    assert nvml_names([0, 1], "") == [0, 1]
    assert nvml_names([0, 1], "2, 3") == [2, 3]
    assert nvml_names([1], "GPU-aa,GPU-bb") == ["GPU-bb"]


def test_no_counters_on_a_cpu_is_said_once(tmp_path):
    with pytest.raises(NoNvmlError, match="the devices are cpu"):
        NvmlCounters(jax.local_devices())
    said = []
    meter = start_energy_meter(tmp_path, EnergyPrices(), said.append)
    meter.sample()
    meter.close()
    assert said == ["note: energy is not measured: NVML measures NVIDIA GPUs, and the devices are cpu"]
    assert meter.read(10, 1.0) == {} and not (tmp_path / FILE).exists()


def log_ten_steps(run_dir, gpus: FakeGpus, start: int, monkeypatch) -> dict:
    """Log steps start + 1 ... start + 10 of 100 tokens and one second each, and the end of the run."""
    monkeypatch.setattr(
        "jaxstack.observe.run_log.start_energy_meter",
        lambda run_dir, prices, say: EnergyMeter(run_dir, 1, gpus, prices, gpus.clock, interval=0),
    )
    config = ObserveConfig(log_every=5, trackers=("jsonl",), progress=False, pue=1.2, price_per_gpu_hour=3.6)
    log = RunLog(run_dir, 20, config, say=lambda text: None)
    with contextlib.ExitStack() as stack:
        log.show_progress(stack, start)
        log.open_trackers(stack, start, {})
        gpus.now += 30  # compiles
        meter = Meter(1.0, 1, "fake", gpus.clock)
        log.begin(start, meter, {}, [], {"forecast": {"step_seconds": 0.5}})
        meter.restart()
        for step in range(start + 1, start + 11):
            gpus.now += 1
            log._energy.sample()
            meter.add(100)
            log.log_step(step, {"loss": 1.0}, 100 * step, 0)
        log.end({"state": "stopped", "step": start + 10}, finished=False)
    return log.last_values


def test_a_resumed_run_logs_the_energy_of_all_starts(tmp_path, monkeypatch):
    log_ten_steps(tmp_path, FakeGpus(360.0), 0, monkeypatch)
    last = log_ten_steps(tmp_path, FakeGpus(360.0, before=5.0), 10, monkeypatch)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 5, 10, 15, 20]
    assert [line["gpu_hours"] * 3600 for line in lines] == pytest.approx([31, 35, 40, 75, 80])
    assert [line["joules_per_token"] for line in lines] == pytest.approx([3.6] * 5)
    assert last["total_joules_per_token"] == pytest.approx(80 * 360 / 2000)
    assert last["energy_kwh"] == pytest.approx(80 * 360 / 3.6e6 * 1.2)
    assert last["cost"] == pytest.approx(80 * 0.001)
    page = (tmp_path / "report.html").read_text()
    for text in ("0.0096 kWh", "14.4 J per token, with all overhead", "GPU-hours", "Energy per token", "Cost"):
        assert text in page
    assert "time of a step differs from the forecast by +100 %" in page
    assert json.loads((tmp_path / "environment.json").read_text())["energy"]["cost"] == pytest.approx(0.08)


def test_progress_line_has_energy_and_cost():
    fields = progress_fields({"loss": 1.0, "joules_per_token": 11.3e-3, "cost": 1234.5}, 60)
    assert fields == ["loss 1.0000", "ETA 1m00s", "11.3 mJ/tok", "cost 1,234.50"]
