"""A row names the commit that it was measured at; rows of other files are refused. Sustained speed is a median."""

import json
import subprocess

import pytest

from benchmarks import rows, sources, sustained
from benchmarks.energy import EnergyCounter, cost_fields, read_joules
from benchmarks.sustained import Block
from benchmarks.training.ablation import compare


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit of two files, which `read_sources` looks at."""
    root = tmp_path / "checkout"
    (root / "benchmarks" / "results").mkdir(parents=True)
    (root / "jaxstack").mkdir()
    (root / "jaxstack" / "a.py").write_text("one\n")
    (root / "benchmarks" / "results" / "x.jsonl").write_text("")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    monkeypatch.setattr(rows, "read_sources", lambda: sources.read_sources(root, tmp_path / "commit.json"))
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "rows")
    monkeypatch.delenv(rows.UNCOMMITTED, raising=False)
    return root


def written(tmp_path):
    return [json.loads(line) for line in (tmp_path / "rows" / "x.jsonl").read_text().splitlines()]


def test_a_row_of_a_commit_is_written_whatever_rows_came_before(checkout, tmp_path):
    (checkout / "benchmarks" / "results" / "x.jsonl").write_text("{}\n")
    rows.append_rows("x", [{"work": "a"}])
    (row,) = written(tmp_path)
    assert len(row["commit"]) == 40 and "uncommitted" not in row


@pytest.mark.parametrize("name", ["jaxstack/a.py", "jaxstack/new.py"])
def test_a_row_of_uncommitted_files_is_refused_unless_asked_for(checkout, tmp_path, monkeypatch, name):
    (checkout / name).write_text("two\n")
    with pytest.raises(SystemExit, match=f"No rows are written.*{name}"):
        rows.append_rows("x", [{"work": "a"}])
    rows.append_rows("tiny/x", [{"work": "a"}])
    monkeypatch.setenv(rows.UNCOMMITTED, "1")
    rows.append_rows("x", [{"work": "a"}])
    assert written(tmp_path)[0]["uncommitted"] == [name]


def test_rows_of_other_code_are_not_taken_for_those_of_a_stopped_command(checkout, monkeypatch):
    monkeypatch.setenv(rows.UNCOMMITTED, "1")
    rows.append_rows("x", [{"work": "a"}])
    assert [row["work"] for row in rows.read_own_rows("x")] == ["a"]
    assert rows.read_own_rows("y") == []
    (checkout / "jaxstack" / "a.py").write_text("two\n")
    assert rows.read_own_rows("x") == []
    rows.append_rows("x", [{"work": "b"}])
    assert [row["work"] for row in rows.read_own_rows("x")] == ["b"]


def test_a_manifest_stands_in_for_git(checkout, tmp_path, monkeypatch):
    sources.seal(tmp_path / "commit.json", checkout)
    commit = sources.read_sources(checkout).commit
    (checkout / ".git").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    rows.append_rows("x", [{"work": "a"}])
    assert written(tmp_path)[0]["commit"] == commit
    (checkout / "jaxstack" / "a.py").write_text("two\n")
    (checkout / "jaxstack" / "new.py").write_text("")
    assert sources.read_sources(checkout, tmp_path / "commit.json").differing == ("jaxstack/a.py", "jaxstack/new.py")
    (tmp_path / "commit.json").unlink()
    with pytest.raises(SystemExit, match="no commit is known"):
        rows.append_rows("x", [{"work": "a"}])


def test_sustained_speed_is_that_of_the_second_half():
    blocks = [Block(2.0, 0.1), Block(4.0, 0.1), Block(10.0, 0.3), Block(16.0, 0.2), Block(20.0, 0.2)]
    found = sustained.summarize_blocks(blocks)
    assert found == {"milliseconds": 200.0, "start_milliseconds": 100.0, "measured_seconds": 20.0}
    assert sustained.energy_fields({"watts": 700.0, "milliseconds": 200.0}, 2) == {"joules_per_step": 280.0}
    assert sustained.energy_fields({"milliseconds": 200.0}, 2) == {}


def test_a_measurement_lasts_as_long_as_asked_on_every_process():
    ran: list[int] = []
    found = sustained.measure_blocks(ran.append, 2, 0.0)
    assert ran == [2, 2, 2] and found["milliseconds"] >= 0.0
    clock = iter(range(1, 100))
    sustained.measure_blocks(ran.append, 1, 50.0, elapsed=lambda passed: 10.0 * next(clock))
    assert len(ran) <= 9, "the agreed time counts, not this process's own"


@pytest.mark.parametrize(("step", "seconds", "expected"), [(0.1, 30.0, 20), (9.0, 30.0, 1), (1e-9, 30.0, 500)])
def test_blocks_are_two_seconds_long(step, seconds, expected):
    assert sustained.block_steps(step, seconds) == expected


def test_energy_is_the_difference_of_the_counter():
    counted = iter([1000.0, 1450.0])
    with EnergyCounter(lambda: next(counted)) as energy:
        pass
    assert energy.joules == 450.0
    fields = cost_fields(energy.joules, tokens=900, tokens_per_second=1e6, dollars_per_gpu_hour=3.6)
    assert fields == pytest.approx(
        {"joules_per_token": 0.5, "dollars_per_gpu_hour": 3.6, "dollars_per_billion_tokens": 1.0}
    )


def test_without_a_driver_a_row_has_no_energy(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert read_joules() is None
    with EnergyCounter() as energy:
        pass
    assert "joules_per_token" not in cost_fields(energy.joules, 1, 1.0, 3.0)


def test_rows_of_the_ablation_are_compared_with_float32_and_with_tf32():
    plain = {"milliseconds": 100.0, "final_loss": 4.0}
    tf32 = {"milliseconds": 50.0, "final_loss": 4.0}
    ours = {"milliseconds": 10.0, "final_loss": 5.0}
    for row in (tf32, ours):
        compare(row, {"float32, nothing else": plain, "TF32 matmuls": tf32})
    assert (tf32["speedup"], tf32["speedup_tf32"]) == (2.0, 1.0)
    assert (ours["speedup"], ours["speedup_tf32"], ours["loss_ratio"], ours["loss_ratio_tf32"]) == (10, 5, 1.25, 1.25)


def test_every_stored_row_has_the_common_fields():
    common = {"work", "implementation", "device", "devices", "versions", "commit", "command", "date"}
    for path in sorted(rows.RESULTS.glob("*.jsonl")):
        missing = [common - json.loads(line).keys() for line in path.read_text().splitlines()]
        assert not any(missing), (path.name, max(missing, key=len))
