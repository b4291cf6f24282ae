"""Throughput numbers by hand, and the meter on a clock that the test moves."""

import pytest

from jaxstack.observe.throughput import Meter, dense_bf16_peak, throughput


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", 148),
        ("cpu", None),
        ("NVIDIA GeForce RTX 9999", None),
        ("NVIDIA L400", None),
    ],
)
def test_peaks(kind, tflops):
    assert dense_bf16_peak(kind) == tflops


def test_throughput_of_eight_devices():
    values = throughput(8_000_000, 10.0, devices=8, flops_per_token=6e9, device_kind="NVIDIA H200", steps=20)
    assert values == pytest.approx(
        {
            "tokens_per_second": 800_000,
            "tokens_per_second_per_device": 100_000,
            "step_time_seconds": 0.5,
            "model_tflops_per_device": 600.0,
            "mfu": 600 / 989,
        }
    )
    assert throughput(1, 1.0, 1, 1.0, "cpu")["mfu"] is None


def _meter():
    now = [100.0]
    return now, Meter(1e9, devices=2, device_kind="NVIDIA L4", clock=lambda: now[0])


def test_meter_gives_each_window_its_own_mean():
    now, meter = _meter()
    assert meter.read() == {} and meter.eta_seconds(10) is None
    for _ in range(4):
        now[0] += 0.5
        meter.add(tokens=1000, waited_seconds=0.05)
    now[0] += 60  # reading late does not count: the window ends with the last step
    values = meter.read()
    assert values["tokens_per_second"] == pytest.approx(2000)
    assert values["step_time_seconds"] == pytest.approx(0.5)
    assert values["data_wait_fraction"] == pytest.approx(0.1)
    assert values["mfu"] == pytest.approx(1.0 / 121)
    assert meter.eta_seconds(10) == pytest.approx(5.0)
    meter.restart()
    now[0] += 2.0
    meter.add(tokens=1000)
    assert meter.read()["tokens_per_second"] == pytest.approx(500)
    assert 5.0 < meter.eta_seconds(10) < 20.0


def test_meter_leaves_evaluation_out():
    now, meter = _meter()
    now[0] += 10
    meter.exclude(9)
    meter.add(tokens=500)
    assert meter.read()["tokens_per_second"] == pytest.approx(500)
    now[0] += 1
    meter.add(tokens=500)
    assert meter.read()["tokens_per_second"] == pytest.approx(500)


def test_meter_takes_completion_times():
    _, meter = _meter()
    meter.add(tokens=100, at=101.0)
    meter.add(tokens=100, at=104.0)
    assert meter.read()["tokens_per_second"] == pytest.approx(50)
