"""The tuning command, with a stand-in for the measuring: what is tried, chosen, written and read again."""

import dataclasses
import threading

import jax
import pytest

from pallas_kernels import tune
from pallas_kernels.attention import mosaic, tilings, tuning
from pallas_kernels.attention.tiling_tables import VARIABLE, load
from pallas_kernels.attention.tilings import choose_tiling

SHAPE = "4,4096,32,8,128"


@dataclasses.dataclass(frozen=True)
class Small:
    """`whole` is an alternative to `half`, which runs only where it has 0 queries."""

    forward_keys: int = tilings._block(128, 64, 256)
    forward_stages: int = tilings._block(2, 3)
    whole_queries: int = tilings._block(64, 0)
    whole_stages: int = tilings._block(1, 2)
    half_keys: int = tilings._block(64, 32)


@pytest.fixture(autouse=True)
def small_kernels(monkeypatch, tmp_path):
    for module in (tilings, tuning, tune):
        monkeypatch.setattr(module, "Tiling", Small)
    for module in (tilings, tuning):
        monkeypatch.setattr(module, "RUNS_WITH", {"half": {"whole_queries": 0}})
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "device_kind", lambda: "NVIDIA H200")


def stand_in(seconds):
    """A stopwatch that asks `seconds(kernel, tiling)`; it notes what it was asked."""
    asked = []

    def stopwatch(work):
        def measure(kernel, tiling):
            asked.append((kernel, tiling))
            return seconds(kernel, tiling)

        return measure

    return stopwatch, asked


def some_times(kernel, tiling):
    if kernel == "forward":
        if tiling.forward_keys == 256:
            raise ValueError("the kernel exceeds available shared memory: 300000 > 232448\nat line 3")
        return 1e-3 * (tiling.forward_keys / 64 + tiling.forward_stages)
    if tiling.whole_queries:
        return 5e-3
    return 4e-3 if tiling.half_keys == 32 else 6e-3


def test_the_fastest_blocks_are_written_merged_and_read_again(tmp_path, capsys):
    stopwatch, asked = stand_in(some_times)
    assert tune.main(["--shape", SHAPE], stopwatch) == 0
    assert choose_tiling(128, "causal", 4096, "NVIDIA H200") == Small(64, 2, 0, 1, 32)
    rows = {row.kernel: row for row in load(tmp_path / "jaxstack" / "tilings.json")}
    assert rows["forward"].blocks == {"keys": 64, "stages": 2}
    assert (rows["forward"].device, rows["forward"].mask, rows["forward"].length) == ("H200", "causal", 4096)
    assert "3.000 ms" in rows["forward"].measured and f"jax {jax.__version__}" in rows["forward"].measured
    said = capsys.readouterr().out
    assert "forward keys 256 stages 3: skipped, ValueError: the kernel exceeds available shared memory" in said
    assert "at line 3" not in said
    # The alternative is tuned first and with the other off, which then is compared with the best of it.
    assert asked[0] == ("half", Small(whole_queries=0))
    assert [t.half_keys for name, t in asked if name == "whole"] == [32] * 3, "0 queries are tried once"
    # Another shape is added, the same one replaced.
    slower, _ = stand_in(lambda kernel, tiling: -some_times(kernel, tiling) if kernel == "forward" else 1.0)
    assert tune.main(["--shape", SHAPE, "--shape", "1,8192,8,8,64", "--kernel", "forward"], slower) == 0
    rows = [row for row in load(tmp_path / "jaxstack" / "tilings.json") if row.kernel == "forward"]
    assert [(row.head_dim, row.length, row.blocks["stages"]) for row in rows] == [(64, 8192, 3), (128, 4096, 3)]
    assert choose_tiling(128, "causal", 4096, "NVIDIA H200").whole_queries == 0, "the other rows stay"


def test_masks_and_another_table(tmp_path):
    stopwatch, _ = stand_in(some_times)
    path = tmp_path / "shipped.json"
    for options in (["--full"], ["--window", "1024"], ["--documents", "8"], ["--causal"]):
        assert tune.main(["--shape", SHAPE, "--kernel", "half", "--table", str(path), *options], stopwatch) == 0
    assert [row.mask for row in load(path)] == ["causal", "full", "packed", "windowed"]
    assert not (tmp_path / "jaxstack").exists()


def test_the_table_that_the_environment_names_need_not_exist(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    assert tune.main(["--shape", SHAPE], stand_in(some_times)[0]) == 0
    assert choose_tiling(128, "causal", 4096, "NVIDIA H200").forward_keys == 64


def test_where_no_candidate_runs_nothing_is_written_and_the_status_is_1(tmp_path, capsys):
    def fails(kernel, tiling):
        raise RuntimeError("ptxas not found")

    path = tmp_path / "table.json"
    assert tune.main(["--shape", SHAPE, "--table", str(path)], stand_in(fails)[0]) == 1
    assert load(path) == []
    assert "none of 6 candidates runs" in capsys.readouterr().out


def test_an_interruption_keeps_what_was_found(tmp_path):
    def interrupted(kernel, tiling):
        if kernel == "whole" or (tiling.forward_keys, tiling.forward_stages) == (64, 3):
            raise KeyboardInterrupt
        return some_times(kernel, tiling)

    with pytest.raises(KeyboardInterrupt):
        tune.main(["--shape", SHAPE, "--kernel", "forward"], stand_in(interrupted)[0])
    assert choose_tiling(128, "causal", 4096, "NVIDIA H200").forward_keys == 64


def test_the_time_is_shared_out(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(tuning.time, "monotonic", lambda: now[0])

    def takes_a_minute(kernel, tiling):
        now[0] += 60.0
        return some_times(kernel, tiling)

    stopwatch, asked = stand_in(takes_a_minute)
    assert tune.main(["--shape", SHAPE, "--minutes", "5.5"], stopwatch) == 0
    # Shares of 11/6 minutes, in which a second candidate can start: it may be late for the next one.
    assert [kernel for kernel, _ in asked] == ["half", "half", "forward", "forward", "whole", "whole"]
    assert "whole: time is out, 1 of 3 candidates not measured" in capsys.readouterr().out
    assert {row.kernel for row in load(tmp_path / "jaxstack" / "tilings.json")} == {"half", "forward", "whole"}


def test_a_candidate_that_hangs_ends_the_process(tmp_path, monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(tune, "_LONGEST_CANDIDATE", 0.01)
    monkeypatch.setattr(tune.os, "_exit", lambda status: ended.set())

    def hangs(kernel, tiling):
        assert ended.wait(10)
        return 1.0

    tune.main(["--shape", SHAPE, "--kernel", "half"], stand_in(hangs)[0])
    assert "half {'keys': 64} takes longer than 0.01 seconds" in capsys.readouterr().err


def test_a_dry_run_lists_and_writes_nothing(tmp_path, capsys):
    assert tune.main(["--shape", SHAPE, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "forward: 6 candidates" in said and "  keys 256 stages 3" in said and "half: 2 candidates" in said
    assert not list(tmp_path.iterdir())


def test_without_a_hopper_gpu_one_clear_message(capsys, tmp_path):
    assert tune.main(["--shape", SHAPE]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be tuned for 4, 4096, 32/8, 128 causal" in line
    assert ("Hopper" if jax.__version_info__ >= (0, 11) else "jax 0.11") in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "4,4096,32,8"], "batch,length,heads,kv_heads,head_dim"),
        (["--shape", "4,4096,32,7,128"], "multiple of kv_heads"),
        (["--shape", SHAPE, "--window", "0"], "at least 1, got '0'"),
        (["--shape", SHAPE, "--minutes", "0"], "a number of minutes above 0, got '0'"),
        (["--shape", SHAPE, "--kernel", "backwards"], "invalid choice"),
        ([], "--shape"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        tune.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_broken_table_is_not_overwritten(tmp_path, capsys):
    path = tmp_path / "table.json"
    path.write_text("not json")
    assert tune.main(["--shape", SHAPE, "--table", str(path)], stand_in(some_times)[0]) == 2
    assert "is no table of block sizes" in capsys.readouterr().err and path.read_text() == "not json"


@pytest.mark.interpreted_kernel
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
@pytest.mark.exhaustive
def test_the_stopwatch_runs_the_kernel_and_refuses_a_wrong_result(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    monkeypatch.setattr(tuning, "median_seconds", lambda function, *arguments: 1.0)
    stopwatch = tuning.Stopwatch(tuning.Work(1, 128, 1, 1, 64, documents=2))
    tiling = choose_tiling(64, "packed", 128)
    assert stopwatch("forward", tiling) == 1.0
    assert stopwatch("fused", tiling) == stopwatch("fused", dataclasses.replace(tiling, fused_queries=0)) == 1.0
    monkeypatch.setattr(tuning, "_LARGEST_DIFFERENCE", -1.0)
    with pytest.raises(ValueError, match="differs by 0 of its size"):
        stopwatch("forward", tiling)


def test_seconds_are_those_of_one_call():
    calls = []

    def function(x):
        calls.append(x)
        return x

    assert 0 < tuning.median_seconds(function, 1.0) < 1e-3
    assert len(calls) > 9
