"""Processes that compile at the same time measure one by one, and only when no other one compiles."""

import fcntl
import os
import threading

import pytest

from benchmarks.turns import PLACE, VARIABLE, Turn, other_first_gpu, place, run_together, turns


def test_a_measurement_waits_for_compilations_and_other_measurements(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "lock"))
    first = Turn()
    second = Turn()
    measured: list[str] = []

    def measure(name: str, turn: Turn) -> None:
        turn.wait()
        measured.append(name)

    thread = threading.Thread(target=measure, args=("first", first))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not measured  # the second still compiles
    second.end()
    thread.join(10)
    assert measured == ["first"]
    other = os.open(tmp_path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):  # a measurement is under way
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    first.end()
    fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(other)


def test_measurements_come_in_the_order_of_their_places(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "lock"))
    measured: list[str] = []

    def in_place(number: str) -> Turn:
        monkeypatch.setenv(PLACE, number)
        return Turn()

    def measure(name: str, turn: Turn) -> None:
        turn.wait()
        measured.append(name)
        turn.end()

    second = in_place("3")
    first = in_place("1")
    also_second = in_place("3")
    assert first.shared
    threads = [threading.Thread(target=measure, args=one) for one in (("second", second), ("second", also_second))]
    for thread in threads:
        thread.start()
    threads[0].join(0.1)
    assert not measured  # none has compiled what comes first
    measure("first", first)
    for thread in threads:
        thread.join(10)
    assert measured == ["first", "second", "second"]


def test_places_count_from_that_of_the_process(monkeypatch):
    monkeypatch.delenv(PLACE, raising=False)
    assert place(2) == {PLACE: "2"}
    monkeypatch.setenv(PLACE, "10")
    assert place(2) == {PLACE: "12"}


def test_processes_have_different_first_gpus(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    chosen = [other_first_gpu(str(tmp_path / "processes"))["CUDA_VISIBLE_DEVICES"] for _ in range(4)]
    assert chosen == ["4,5,6", "5,6,4", "6,4,5", "4,5,6"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert other_first_gpu(str(tmp_path / "processes")) == {}


def test_a_turn_rotates_the_gpus_before_jax_starts(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "lock"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    first = Turn()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    second = Turn()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
    first.end()
    second.end()


def test_one_process_at_a_time_takes_much_memory(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "lock"))
    first = Turn()
    second = Turn()
    entered = threading.Event()

    def enter() -> None:
        with second.memory():
            entered.set()

    thread = threading.Thread(target=enter)
    with first.memory():
        thread.start()
        assert not entered.wait(0.1)
    assert entered.wait(10)
    thread.join()
    first.end()
    second.end()


def test_without_a_lock_nothing_waits(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    turn = Turn()
    turn.wait()
    assert not turn.shared
    with turns() as environment:
        assert os.path.isdir(os.path.dirname(environment[VARIABLE]))


def test_results_come_with_the_place_of_their_call():
    assert dict(run_together([lambda: "a", lambda: "b"])) == {0: "a", 1: "b"}
