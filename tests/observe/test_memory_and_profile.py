"""Peak memory grows with what is held; a profile holds the steps that were asked for."""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from jaxstack.observe import memory
from jaxstack.observe.memory import peak_memory_bytes
from jaxstack.observe.profile import StepProfiler

GROWING = """
import numpy as np
from jaxstack.observe.memory import peak_memory_bytes
before = peak_memory_bytes()
assert 2**24 < before < 2**40
held = np.ones(before // 8 + 2**23)  # as large as all memory so far
assert peak_memory_bytes() >= before + 2**25
"""


def test_peak_memory_on_cpu_is_the_resident_set():
    """In a process of its own: that of the tests may have held gigabytes before."""
    subprocess.run([sys.executable, "-c", GROWING], check=True, timeout=120)


def test_peak_memory_is_that_of_the_fullest_device(monkeypatch):
    devices = [
        types.SimpleNamespace(memory_stats=lambda peak=peak: {"peak_bytes_in_use": peak, "bytes_in_use": 1})
        for peak in (5, 9, 7)
    ]
    monkeypatch.setattr(memory.jax, "local_devices", lambda: devices)
    assert peak_memory_bytes() == 9


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: made.append(("start", directory)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append(("stop",)))
    return made


def _run(profiler, first, last):
    traced = []
    for step in range(first, last + 1):
        with profiler.step(step):
            traced += [step] if profiler.active else []
        profiler.finish_step(step, jnp.ones(2))
    profiler.close()
    return traced


@pytest.mark.parametrize(
    ("steps", "first", "last", "traced"),
    [
        ((3, 5), 1, 8, [3, 4, 5]),
        ((3, 3), 1, 8, [3]),
        (None, 1, 8, []),
        ((3, 5), 5, 8, [5]),
        ((3, 5), 6, 8, []),
        ((3, 50), 1, 6, [3, 4, 5, 6]),
    ],
)
def test_traced_steps(calls, steps, first, last, traced):
    assert _run(StepProfiler(steps, "where"), first, last) == traced
    assert calls == ([("start", "where"), ("stop",)] if traced else [])


def test_profile_writes_a_trace(tmp_path):
    said = []
    profiler = StepProfiler((2, 2), tmp_path / "profile", said.append)
    step = jax.jit(lambda x: jnp.sin(x).sum())
    for number in (1, 2, 3):
        with profiler.step(number):
            result = step(jnp.ones(8))
        profiler.finish_step(number, result)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert said and str(tmp_path) in said[0]
    assert "jax.profiler.start_server" not in sys.modules
