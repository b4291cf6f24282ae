"""Who is stuck and who is slow, and how often to start again: plain data."""

import pytest

from jaxstack.launch.child import Limits, arrange_stacks, find_straggler, find_stuck, name_limit
from jaxstack.launch.supervisor import RestartBudget
from jaxstack.resilience.progress_file import Record

LIMITS = Limits(step=10, start=100, save=50)


def test_each_phase_has_its_limit():
    for phase, limit in (
        ("start", 100),
        ("check", 10),
        ("restore", 100),
        ("compile", 100),
        ("tasks", 100),
        ("evaluate", 10),
        ("save", 50),
        ("train", 10),
    ):
        record = {0: Record(phase, at=1000.0)}
        assert find_stuck(record, LIMITS, 1000.0 + limit - 1) is None
        assert find_stuck(record, LIMITS, 1000.0 + limit + 1) == 0
        assert name_limit(record[0]) == {10: "--step-seconds", 50: "--save-seconds", 100: "--start-seconds"}[limit]


def test_a_process_without_a_record_may_be_silent_but_not_suspended():
    """Such as a server that waits for requests, or the compression of a large model."""
    record = {0: Record("other", at=0.0)}
    assert find_stuck(record, LIMITS, 1e9) is None
    assert find_stuck(record, LIMITS, 11, suspended={0: lambda: True}) == 0


def test_a_rank_that_never_begins_is_named_before_those_that_wait_for_it():
    records = {0: Record("start", beat=3, at=20.0), 1: Record("other", at=0.0)}
    assert find_stuck(records, LIMITS, 99.0) is None and find_stuck(records, LIMITS, 101.0) == 1


def test_a_run_sets_the_limit_of_its_steps():
    record = {0: Record("train", at=1000.0, step_limit=30.0)}
    assert find_stuck(record, LIMITS, 1029.0) is None and find_stuck(record, LIMITS, 1031.0) == 0
    assert name_limit(record[0]) == "resilience.step_seconds"
    compiling = {0: Record("compile", at=1000.0, step_limit=30.0)}
    assert find_stuck(compiling, LIMITS, 1031.0, suspended={0: lambda: True}) == 0
    assert find_stuck(compiling, LIMITS, 1031.0, suspended={0: lambda: False}) is None


def test_the_first_that_fell_silent_is_named():
    """The others wait for it in a collective."""
    records = {
        0: Record("train", step=7, at=100.4),
        1: Record("train", step=6, at=100.1),
        2: Record("train", 7, at=100.5),
    }
    assert find_stuck(records, LIMITS, 111) == 1


def test_the_one_that_is_a_step_behind_is_named():
    """It fell silent later than the other, which had run ahead, and waits for it."""
    records = {
        0: Record("train", step=10, at=100.0),
        1: Record("train", step=9, at=100.3),
        2: Record("save", step=8, at=99.0),
    }
    assert find_stuck(records, LIMITS, 110.1) == 1
    assert find_stuck(records, LIMITS, 109.9) is None
    same = {0: Record("train", step=10, beat=31, at=100.0), 1: Record("train", step=10, beat=30, at=100.3)}
    assert find_stuck(same, LIMITS, 110.1) == 1


def test_stacks_begin_with_the_main_thread():
    """faulthandler writes it last; workers that wait are written once."""
    worker = 'Thread 0x{}1 (most recent call first):\n  File "a.py", line 1 in _worker\n\n'
    main = 'Current thread 0x9 (most recent call first):\n  File "b.py", line 2 in main\n'
    arranged = arrange_stacks(worker.format(1) + worker.format(2) + main).splitlines()
    assert arranged[0].startswith("Current thread") and "b.py" in arranged[1]
    assert arranged[2].endswith("and 1 alike:") and len(arranged) == 4
    assert arrange_stacks("Process 1: python") == "Process 1: python"


def test_silence_of_a_job_that_was_suspended_does_not_count():
    records = {0: Record("train", at=100.0), 1: Record("train", at=3000.0)}
    assert find_stuck(records, LIMITS, 3005, since=3000) is None
    assert find_stuck(records, LIMITS, 3011, since=3000) == 0


def test_a_suspended_process_has_the_limit_of_a_step_in_every_phase():
    records = {0: Record("save", at=100.0), 1: Record("start", at=100.0)}
    suspended = {0: lambda: False, 1: lambda: True}
    assert find_stuck(records, LIMITS, 109, suspended=suspended) is None
    assert find_stuck(records, LIMITS, 111) is None
    assert find_stuck(records, LIMITS, 111, suspended=suspended) == 1


def test_a_straggler_spends_time_on_its_own_host():
    def look(at: float, step: int, *own: float) -> dict[int, Record]:
        return {rank: Record("train", step, at=at, own_seconds=seconds) for rank, seconds in enumerate(own)}

    before = look(0, 0, 0, 0, 0)
    found = find_straggler(before, look(20, 100, 0.2, 5.2, 0.4))
    assert found is not None and found.rank == 1
    assert (found.own, found.others, found.step) == pytest.approx((0.052, 0.003, 0.2))
    assert find_straggler(before, look(20, 100, 0.2, 1.5, 0.4)) is None, "less than a tenth of a step"
    assert find_straggler(before, look(20, 2, 0.2, 5.2, 0.4)) is None, "too few steps to tell"
    assert find_straggler(look(0, 0, 0), look(20, 100, 9)) is None, "nobody waits for a process that is alone"


def test_progress_refills_the_budget():
    budget = RestartBudget(2)
    assert budget.spend(-1) and budget.spend(-1) and not budget.spend(-1)
    budget = RestartBudget(2)
    assert budget.spend(100) and budget.spend(100)
    assert budget.spend(200), "a newer checkpoint"
    assert budget.left == 1
    assert budget.spend(200) and not budget.spend(200)


def test_waits_longer_from_failure_to_failure():
    budget = RestartBudget(8)
    delays = []
    while budget.spend(-1):
        delays.append(budget.delay_seconds)
    assert delays == [1, 2, 4, 8, 16, 30, 30, 30]
