"""The table that the compiled loop reads never puts two living values into one entry."""

import pytest

from jaxstack.parallel.pipeline.schedule import (
    EMBEDDING,
    HEAD,
    RUN,
    SCHEDULES,
    WEIGHTS,
    colour_intervals,
    forward_only,
    make_program,
)


def test_intervals_share_an_entry_only_when_apart():
    entries, count = colour_intervals([(0, 2, "a"), (1, 1, "b"), (2, 4, "c"), (3, 3, "d")])
    assert count == 2
    assert entries["a"] != entries["b"] and entries["a"] != entries["c"]
    assert colour_intervals([]) == ({}, 0)


@pytest.mark.parametrize(
    "name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)]
)
@pytest.mark.parametrize("stages, microbatches", [(2, 4), (3, 6), (4, 8), (4, 16)])
def test_replaying_the_table_finds_every_value_where_it_was_put(name, chunks, stages, microbatches):
    schedule = SCHEDULES[name](stages, microbatches, chunks)
    program = make_program(schedule)
    replay = Replay(program.columns, stages, chunks, name == "zero_bubble")
    for tick in range(len(schedule.ticks) + 1):
        replay.tick(tick)
    virtual = range(stages * chunks)
    assert replay.backwards == {(m, k) for m in range(microbatches) for k in virtual}
    assert replay.embedded == set(range(microbatches)) == replay.losses
    if name == "zero_bubble":
        assert replay.weights == replay.backwards
    if name == "1f1b":
        assert program.residuals == min(microbatches, 2 * stages - 1)


def test_evaluation_needs_no_gradients():
    program = make_program(forward_only(4, 8))
    assert (program.gradients, program.residuals, program.weight_gradients) == (0, 0, 0)
    assert (program.columns["ends"] == HEAD).sum() == 8


class Replay:
    """Runs the table with names instead of arrays, in the order of `execute`."""

    def __init__(self, columns, stages, chunks, split):
        self.columns = columns
        self.stages = stages
        self.last = stages * chunks - 1
        self.split = split
        self.buffers = {name: [{} for _ in range(stages)] for name in ("x", "dy", "residual", "pending")}
        self.dx = [None] * stages
        self.backwards = set()
        self.weights = set()
        self.embedded = set()
        self.losses = set()

    def read(self, buffer, stage, column, tick):
        return self.buffers[buffer][stage].get(self.columns[column][tick, stage])

    def tick(self, tick):
        columns = self.columns
        before = list(self.dx)
        self.y = [None] * self.stages
        for stage in range(self.stages):
            self.forward(tick, stage)
        for stage in range(self.stages):  # gradients of the tick before arrive
            entry = columns["arriving_gradient"][tick, stage]
            self.buffers["dy"][stage][entry] = before[(stage + 1) % self.stages]
            role = columns["ends"][tick, stage]
            microbatch = columns["ends_microbatch"][tick, stage]
            if role == HEAD:
                assert self.y[stage] == (microbatch, self.last)
                self.losses.add(microbatch)
                self.buffers["dy"][stage][columns["ends_gradient"][tick, stage]] = (microbatch, self.last + 1)
            if role == EMBEDDING:
                assert before[stage] == (microbatch, 0)
                self.embedded.add(microbatch)
        self.dx = [None] * self.stages
        for stage in range(self.stages):
            self.backward(tick, stage)
            if self.split and columns["slot2"][tick, stage]:
                self.weights.add(self.read("pending", stage, "pending2", tick))
        for stage in range(self.stages):
            self.buffers["x"][stage][columns["arriving"][tick, stage]] = self.y[stage - 1]

    def forward(self, tick, stage):
        columns = self.columns
        if columns["slot0"][tick, stage] == WEIGHTS:
            self.weights.add(self.read("pending", stage, "pending0", tick))
        elif columns["slot0"][tick, stage] == RUN:
            name = columns["microbatch0"][tick, stage], columns["chunk0"][tick, stage] * self.stages + stage
            assert columns["first"][tick, stage] == (name[1] == 0)
            if name[1]:
                assert self.read("x", stage, "activation", tick) == (name[0], name[1] - 1)
            self.buffers["residual"][stage][columns["residual0"][tick, stage]] = name
            self.y[stage] = name

    def backward(self, tick, stage):
        columns = self.columns
        if columns["slot1"][tick, stage] == WEIGHTS:
            self.weights.add(self.read("pending", stage, "pending1", tick))
        elif columns["slot1"][tick, stage] == RUN:
            name = columns["microbatch1"][tick, stage], columns["chunk1"][tick, stage] * self.stages + stage
            assert self.read("dy", stage, "gradient", tick) == (name[0], name[1] + 1)
            assert self.read("residual", stage, "residual1", tick) == name
            self.backwards.add(name)
            self.dx[stage] = name
            if self.split:
                self.buffers["pending"][stage][columns["pending1"][tick, stage]] = name
