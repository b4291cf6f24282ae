"""Schedules are complete and in order; simulated, they take the time that the papers give."""

import dataclasses

import pytest

from jaxstack.parallel.pipeline.schedule import SCHEDULES, Task, describe_schedule, forward_only, simulate, validate


def cases():
    for stages in (2, 3, 4, 6, 8):
        for microbatches in (1, 2, 3, 4, 5, 8, 12, 16, 24):
            for name in SCHEDULES:
                for chunks in (2, 3, 4) if name == "interleaved" else (1,):
                    if name != "interleaved" or microbatches % stages == 0:
                        yield name, stages, microbatches, chunks


@pytest.mark.parametrize("name, stages, microbatches, chunks", list(cases()))
def test_every_task_once_and_after_what_it_needs(name, stages, microbatches, chunks):
    schedule = SCHEDULES[name](stages, microbatches, chunks)
    validate(schedule)
    kinds = 3 if name == "zero_bubble" else 2
    assert sum(1 for _ in schedule.tasks()) == kinds * stages * chunks * microbatches
    assert schedule.splits_backward == (name == "zero_bubble")


@pytest.mark.parametrize("name, stages, microbatches, chunks", list(cases()))
def test_the_bubble_is_the_published_one(name, stages, microbatches, chunks):
    """(p-1)/m for GPipe and 1F1B, (p-1)/(m v) interleaved (Narayanan et al. 2021), (p-1)(F+B-W) for ZB-H1 (Qi et al.
    2023), which needs 2p - 1 microbatches to fill its gaps."""
    found = simulate(SCHEDULES[name](stages, microbatches, chunks))
    bubble = (stages - 1) / (microbatches * chunks)
    if name != "zero_bubble":
        assert found.bubble == pytest.approx(bubble)
        assert found.makespan == pytest.approx((microbatches + (stages - 1) / chunks) * 3)
    elif microbatches >= 2 * stages - 1:
        assert found.makespan == pytest.approx(3 * microbatches + (stages - 1) * (1 + 1 - 1))
    else:
        assert found.bubble <= bubble + 1e-9


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_activations_are_bounded_by_the_stages_except_in_gpipe(stages):
    few = 2 * stages
    many = 8 * stages
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
        assert (
            simulate(SCHEDULES[name](stages, few, chunks)).in_flight
            == simulate(SCHEDULES[name](stages, many, chunks)).in_flight
        )
    assert simulate(SCHEDULES["1f1b"](stages, many, 1)).in_flight == tuple(2 * (stages - s) - 1 for s in range(stages))
    assert simulate(SCHEDULES["gpipe"](stages, many, 1)).in_flight == (many,) * stages
    waiting = simulate(SCHEDULES["zero_bubble"](stages, many, 1)).waiting
    assert waiting == tuple(stages + s for s in range(stages))


def test_recomputation_and_communication_can_be_priced():
    schedule = SCHEDULES["1f1b"](4, 16, 1)
    assert simulate(schedule, {"F": 1, "B": 3, "W": 0}).makespan == (16 + 3) * 4


def test_interleaved_needs_full_rounds():
    with pytest.raises(ValueError, match=r"microbatches \(6\) in multiples of the stages \(4\)"):
        SCHEDULES["interleaved"](4, 6, 2)


def test_validation_finds_a_missing_and_a_misplaced_task():
    schedule = SCHEDULES["1f1b"](2, 2, 1)
    missing = dataclasses.replace(schedule, ticks=schedule.ticks[:-1])
    with pytest.raises(ValueError, match="missing"):
        validate(missing)
    late = list(schedule.ticks)
    late[0], late[1] = late[1], late[0]
    with pytest.raises(ValueError, match="needs"):
        validate(dataclasses.replace(schedule, ticks=tuple(late)))
    before = ((Task("F", 0), None), (Task("B", 0), None))
    with pytest.raises(ValueError, match="missing"):
        validate(dataclasses.replace(schedule, ticks=(before, *schedule.ticks[1:])))


def test_evaluation_runs_the_forward_half():
    schedule = forward_only(4, 8)
    validate(schedule)
    assert len(schedule.ticks) == 8 + 3
    assert {task.kind for _, _, _, task in schedule.tasks()} == {"F"}


def test_the_description_is_plain_and_says_what_is_lost():
    found = describe_schedule(SCHEDULES["interleaved"](4, 8, 2))
    assert found["bubble_of_work"] == pytest.approx(3 / 16)
    assert found["virtual_stages"] == 2
    assert len(found["spans"]) == 2 * 4 * 2 * 8
    stage, start, end, kind, microbatch, chunk = found["spans"][0]
    assert (stage, start, end, kind, microbatch, chunk) == (0, 0.0, 0.5, "F", 0, 0)
