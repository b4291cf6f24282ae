"""Peak memory grows with what is held; a profile holds the steps that were asked for."""

import gzip
import json
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxstack.distributed import coordination
from jaxstack.models import ModelConfig, Transformer
from jaxstack.observe import throughput
from jaxstack.observe.profile import StepProfiler
from jaxstack.observe.throughput import peak_memory_bytes

GROWING = """
import numpy as np
from jaxstack.observe.throughput import peak_memory_bytes
before = peak_memory_bytes()
assert 2**24 < before < 2**40
held = np.ones(before // 8 + 2**23)  # as large as all memory so far
assert peak_memory_bytes() >= before + 2**25
"""


@pytest.mark.exhaustive
def test_peak_memory_on_cpu_is_the_resident_set():
    """In a process of its own: that of the tests may have held gigabytes before."""
    subprocess.run([sys.executable, "-c", GROWING], check=True, timeout=120)


def test_peak_memory_is_that_of_the_fullest_device(monkeypatch):
    devices = [
        types.SimpleNamespace(memory_stats=lambda peak=peak: {"peak_bytes_in_use": peak, "bytes_in_use": 1})
        for peak in (5, 9, 7)
    ]
    monkeypatch.setattr(throughput.jax, "local_devices", lambda: devices)
    assert peak_memory_bytes() == 9


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: made.append(("start", directory)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append(("stop",)))
    monkeypatch.setattr(jax.profiler, "save_device_memory_profile", lambda file: made.append(("memory", file)))
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
    assert calls == ([("start", "where"), ("stop",), ("memory", "where/memory.pb.gz")] if traced else [])


def test_processes_write_no_files_of_one_another(calls, monkeypatch):
    monkeypatch.setattr(coordination, "process_position", lambda: (3, 4))
    said = []
    _run(StepProfiler((1, 1), "where", said.append), 0, 2)
    assert said == ["profile of steps 1 to 1: where/process-3"]


def test_profile_opens_in_perfetto_and_xprof_with_the_layers_by_name(tmp_path):
    said = []
    profiler = StepProfiler((2, 2), tmp_path / "profile", said.append)
    model = Transformer(ModelConfig(hidden_size=16, num_layers=1, num_heads=2, vocab_size=32), nnx.Rngs(0))
    graph, state = nnx.split(model)
    step = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens).sum())
    for number in (1, 2, 3):
        with profiler.step(number):
            result = step(state, jnp.zeros((1, 8), jnp.int32))
        profiler.finish_step(number, result)

    (trace,) = (tmp_path / "profile").rglob("*.trace.json.gz")  # what Perfetto reads
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("name") == "train"]
    assert [event["args"]["step_num"] for event in steps] == ["2"]

    (planes,) = (tmp_path / "profile").rglob("*.xplane.pb")  # what xprof reads
    data = jax.profiler.ProfileData.from_file(str(planes))
    assert any(event.name == "train" for plane in data.planes for line in plane.lines for event in line.events)
    operations = planes.read_bytes()  # the program is part of it, with the scope of every operation
    within = rb"layers/(?:[\w()]+/)?"  # a layer may be a function of its own
    for scope in (rb"embedding/", within + rb"attention/", within + rb"mlp/", rb"final_norm/"):
        assert re.search(scope, operations), scope

    memory = gzip.decompress((tmp_path / "profile" / "memory.pb.gz").read_bytes())
    assert b"space" in memory and b"bytes" in memory  # the units of pprof's table
    assert said and str(tmp_path) in said[0]
    assert "jax.profiler.start_server" not in sys.modules
