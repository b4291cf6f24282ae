"""What the benchmark of the recurrent mixers computes, counts and reports."""

import sys

import numpy as np
import pytest

from benchmarks.kernels import recurrent
from benchmarks.kernels.recurrent import Failed, Work
from tests.marks import longer


def test_bytes_are_those_of_inputs_outputs_and_gradients():
    work = Work("delta", 2, 3, keys=1, heads=2, width=8, state=4)
    keys, values, numbers = 2 * 6 * 1 * 4 * 2, 6 * 2 * 8 * 2, 2 * 6 * 2 * 4
    assert recurrent.moved_bytes(work) == (keys + 2 * values + numbers, 3 * (keys + values + numbers) + 2 * values)
    work = Work("ssd", 2, 3, keys=1, heads=2, width=8, state=4)
    inputs = values + 6 * 2 * 4 + 2 * 4 + keys
    assert recurrent.moved_bytes(work) == (inputs + values, 3 * inputs + 2 * values)


@pytest.mark.parametrize("work", [recurrent.TINY[0], *longer(*recurrent.TINY[1:])], ids=lambda work: work.operation)
def test_ours_is_close_to_the_recurrence(work):
    found, exact = (recurrent.results_jax(name, work) for name in ("jaxstack", "exact"))
    assert list(found) == list(exact) and all(array.any() for array in exact.values())
    assert max(recurrent.relative_error(found[name], exact[name]) for name in exact) < 2e-2
    assert recurrent.relative_error(np.full(2, np.nan), np.ones(2)) == float("inf")


def test_peers_compute_what_they_can(monkeypatch, capsys):
    names = ["jaxstack", *recurrent.PEERS]
    delta, ssd = recurrent.TINY
    assert recurrent.ways(delta, names) == ["jaxstack", "flash-linear-attention"]
    assert recurrent.ways(ssd, names) == names
    monkeypatch.setattr(recurrent.importlib.util, "find_spec", lambda name: None)
    assert recurrent.installed(names) == ["jaxstack"]
    assert "no rows of flash-linear-attention, mamba_ssm" in capsys.readouterr().out


@pytest.mark.longer
def test_kernels_of_a_peer_are_imported_without_its_layers(tmp_path, monkeypatch):
    for folder in ("peer", "peer/ops", "peer/ops/rule"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise ImportError('a compiled extension')")
    (tmp_path / "peer/ops/rule/__init__.py").write_text("from peer import __version__\nfrom peer.ops.chunk import run")
    (tmp_path / "peer/ops/chunk.py").write_text("def run():\n    return 7")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(recurrent, "BARE", ("other", "peer", "peer.ops"))
    try:
        module = recurrent.import_kernels("peer.ops.rule")
        assert module.run() == 7 and module.__version__ == ""
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "peer"]:
            del sys.modules[name]


def test_a_refused_backward_and_a_failure_are_reported(monkeypatch, capsys):
    class Answers:
        def ask(self, task, implementation, work):
            if task == "copy":
                return {"bytes_per_second": 1e9}
            if implementation == "mamba_ssm":
                raise Failed("no kernel")
            refused = {"refused": "RuntimeError: wrong"} if implementation in recurrent.PEERS else {"milliseconds": 2.0}
            return {"device": "gpu", "forward_milliseconds": 1.0, **refused}

    processes = dict.fromkeys(("jax", "torch"), Answers())
    ours, peer = recurrent.measure_all(processes, ["jaxstack", *recurrent.PEERS], recurrent.TINY[1:])
    assert ours["milliseconds"] == 2.0 and ours["copy_milliseconds"] > ours["copy_forward_milliseconds"] > 0
    assert peer["refused"] == "RuntimeError: wrong" and "milliseconds" not in peer
    assert "mamba_ssm: no kernel" in capsys.readouterr().out
