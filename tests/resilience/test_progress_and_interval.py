"""The record for the supervisor, the advice on the interval, what processes must have in common."""

import math
import socket
import time
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxstack.distributed import coordination
from jaxstack.errors import JaxstackError
from jaxstack.observe import nvml
from jaxstack.resilience.config import advise_interval, young_daly_seconds
from jaxstack.resilience.preflight import check_same_devices, check_same_memory, disagreements
from jaxstack.resilience.progress_file import PROGRESS, ProgressFile, Record, read_record


def test_the_record_is_overwritten_in_place(tmp_path):
    path = tmp_path / "progress"
    assert read_record(path) is None
    signs = ProgressFile(path)
    signs.note("compile")
    first = read_record(path)
    for step in range(1, 2000):
        signs.note("train", step=step, saved=1000)
    last = read_record(path)
    assert first is not None and last is not None and path.stat().st_size < 512
    assert (first.phase, last.phase, last.step, last.saved) == ("compile", "train", 1999, 1000)
    assert last.beat == first.beat + 1999 and last.at >= first.at


def test_a_sign_of_life_is_cheap(tmp_path):
    signs = ProgressFile(tmp_path / "progress")
    began = time.process_time()
    for step in range(1000):
        signs.note("train", step=step)
    assert time.process_time() - began < 0.5


def test_waiting_is_not_ones_own_time():
    signs = ProgressFile()
    signs.note("train", step=1)
    time.sleep(0.05)
    with signs.waiting():
        time.sleep(0.2)
        with signs.waiting():
            time.sleep(0.01)
    signs.note("train", step=2)
    assert 0.05 <= signs.record.own_seconds < 0.15
    assert isinstance(signs.record, Record)


def test_a_process_has_one_record_however_many_write_it(tmp_path, monkeypatch):
    """A part of a run that only gives a sign of life must not take away step, phase, limit and checkpoint."""
    path = tmp_path / "progress"
    monkeypatch.setenv(PROGRESS, str(path))
    ProgressFile.of_this_process.cache_clear()
    try:
        run = ProgressFile.of_this_process()
        run.note("train", step=7, saved=5, step_limit=9.0)
        ProgressFile.of_this_process().note()
        known = read_record(path)
        assert known is not None
        assert (known.phase, known.step, known.saved, known.step_limit, known.beat) == ("train", 7, 5, 9.0, 2)
        run.restart()
        known = read_record(path)
        assert known is not None
        assert (known.phase, known.step, known.saved, known.step_limit) == ("start", 0, -1, None) and known.beat == 3
    finally:
        ProgressFile.of_this_process.cache_clear()


def test_the_phase_before_comes_back_after_another_one_even_if_it_failed(tmp_path):
    signs = ProgressFile(tmp_path / "progress")
    signs.note("compile", step=3, step_limit=7.0)
    known = []
    with pytest.raises(ZeroDivisionError), signs.during("check", 20.0):
        known.append(read_record(tmp_path / "progress"))
        raise ZeroDivisionError
    known.append(read_record(tmp_path / "progress"))
    assert [(r.phase, r.step_limit, r.step) for r in known if r] == [("check", 20.0, 3), ("compile", 7.0, 3)]


def test_young_daly():
    assert young_daly_seconds(10, 50_000) == 1000
    every = young_daly_seconds(30, 3600 * 50_700 / 16_384)

    def lost(seconds: float) -> float:
        return 30 / seconds + seconds / 2 / (3600 * 50_700 / 16_384)

    assert all(lost(every) < lost(every * factor) for factor in (0.5, 0.9, 1.1, 2))


def simulated_loss(intervals: np.ndarray, save_seconds: float, gaps: np.ndarray) -> np.ndarray:
    """Fraction of time that is lost at each interval between saves, in a run with these times between failures.

    After a failure the run is back at its last complete save. A failure during a save loses that save too.
    """
    saves = np.array([np.floor(gaps / (interval + save_seconds)).sum() for interval in intervals])
    return 1 - intervals * saves / gaps.sum()


@pytest.mark.parametrize("save_fraction", [1e-5, 1e-4, 1e-3, 1e-2])
def test_young_daly_is_within_five_percent_of_the_optimum_of_a_simulation(save_fraction):
    mean = 3600.0
    gaps = np.random.default_rng(0).exponential(mean, 200_000)
    advised = young_daly_seconds(save_fraction * mean, mean)
    steps = np.linspace(-0.7, 0.7, 41)
    losses = simulated_loss(advised * np.exp(steps), save_fraction * mean, gaps)
    # The minimum is flat: that of a polynomial through all points is less noisy than the lowest point.
    fine = np.linspace(-0.5, 0.5, 1001)
    fitted = np.polyval(np.polyfit(steps, losses, 4), fine)
    assert abs(fine[fitted.argmin()]) < 0.05, "the logarithm of the ratio of the intervals"
    at_advised = simulated_loss(np.array([advised]), save_fraction * mean, gaps)[0]
    assert at_advised <= 1.05 * fitted.min()


def test_advice_names_the_interval_and_its_price():
    text = advise_interval(100, 2.0, 8.0, 60.0, 1024, 50_700)
    best = math.sqrt(2 * 8 * 50_700 * 3600 / 1024)
    assert f"checkpoint.every_steps={round(best / 2)}" in text and "a failure every 50 h" in text
    assert "100 loses 4.1 %" in text and "would lose least, 0.95 % of the time" in text
    assert "checkpoint.every_steps=6755 " in advise_interval(100, 1.0, 1.0, 3600.0, 8, 50_700)
    assert "checkpoint.every_steps=3600 " in advise_interval(100, 1.0, 0.01, 3600.0, 8, 50_700), (
        "not before it is written"
    )


def test_what_differs_is_told_with_its_processes():
    facts = [{"host": f"h{i}", "jax": "0.11.2", "commit": "abc"} for i in range(6)]
    assert disagreements(facts, ignore=("host",)) == []
    facts[4] = {**facts[4], "jax": "0.10.2"}
    assert disagreements(facts, ignore=("host",)) == ["jax: 0.11.2 on 5 processes, 0.10.2 on process 4 (h4)"]


def gpu(number: int, own_gigabytes: float = 0.0) -> Any:
    """Return an H200 of which XLA takes 128.6 GiB at its first use, and of which this process holds some."""
    stats = {"bytes_limit": int(128.6 * 2**30), "pool_bytes": int(own_gigabytes * 2**30)}
    return SimpleNamespace(local_hardware_id=number, device_kind="H200", platform="gpu", memory_stats=lambda: stats)


def hold(monkeypatch, free_gigabytes: dict[int, float]) -> None:
    """Let NVML tell how much of each GPU is free."""
    known = {number: int(free * 2**30) for number, free in free_gigabytes.items()}
    monkeypatch.setattr(
        nvml, "free_bytes", lambda devices: [known.get(getattr(d, "local_hardware_id", None)) for d in devices]
    )


def test_a_device_whose_memory_others_hold_is_named_before_the_run_waits_for_it(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    hold(monkeypatch, {0: 139.1, 1: 21.5, 2: 125})
    gpus = [gpu(0), gpu(1), gpu(2)]
    check_same_memory([gpus[0], gpus[2], *jax.devices("cpu")])
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)
    with pytest.raises(JaxstackError, match="device 1 of node7 has 21.5 GiB of the 128.6 GiB that XLA takes") as error:
        check_same_devices()
    assert error.value.exit_code == 1, "the launcher tries again, as the memory may belong to a process that is ending"


def test_memory_that_this_process_has_taken_is_not_that_of_other_programs(monkeypatch):
    hold(monkeypatch, {0: 10, 1: 139.1})
    check_same_memory([gpu(0, own_gigabytes=128.6), gpu(1)])


def test_devices_of_which_all_have_as_little_are_equal(monkeypatch):
    """XLA itself says then that memory is lacking, on all of them."""
    hold(monkeypatch, {0: 30, 1: 31})
    check_same_memory([gpu(0), gpu(1)])


def test_the_devices_of_all_processes_are_compared(monkeypatch):
    others = [["device 1 of node8", 2**30, 2**37]]
    monkeypatch.setattr(coordination, "all_gather", lambda name, known, seconds: [known, others])
    hold(monkeypatch, {0: 139.1})
    with pytest.raises(JaxstackError, match="device 1 of node8 has 1.0 GiB of the 128.0 GiB that XLA takes"):
        check_same_memory([gpu(0)])


@pytest.mark.parametrize("seconds", [0.0, 2.5])
def test_clock_skew(seconds):
    from jaxstack.resilience.preflight import _skew

    warnings = _skew([{"host": "a", "clock": 100.0}, {"host": "b", "clock": 100.0 + seconds}])
    assert warnings == ([] if not seconds else [warnings[0]]) and (
        not warnings or "clock of b is 2.5 s ahead" in warnings[0]
    )
