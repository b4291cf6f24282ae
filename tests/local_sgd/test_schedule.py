"""How a fragment of streaming DiLoCo is sent beside a step: the program compiled for H200s."""

import re

import pytest

from jaxstack.observe.collectives import bytes_over_axis, collectives, matmuls
from jaxstack.parallel.config import WORKERS
from tests.hopper_steps import compile_step
from tests.parallel.test_gather_schedule import matmuls_meanwhile
from tests.small_runs import small_config

SHAPE = (
    "model.num_layers=2", "model.hidden_size=1024", "model.num_heads=8", "model.head_dim=128",
    "model.intermediate_size=4096", "model.vocab_size=8192", "model.scan_layers=false", "model.remat=none",
    "train.sequence_length=2048", "train.global_batch_size=8", "parallel.workers=2",
)  # fmt: skip


@pytest.mark.exhaustive
def test_a_fragment_is_sent_by_asynchronous_collectives_beside_the_step():
    trainer, step = compile_step(small_config(*SHAPE, "local_sgd={name: streaming, every: 4, fragments: 1}"))
    axes = dict(trainer.rules.mesh.shape)
    assert bytes_over_axis(step.as_text(), axes, WORKERS) == 0
    text = trainer.wrapper._beside[0].as_text()
    rows = [row for row in collectives(text, axes) if WORKERS in row.axes]
    assert all(row.asynchronous for row in rows)
    assert sum(row.payload_bytes for row in rows) == 4 * trainer.count_parameters()
    # All run at once, during most of the backward pass, which has two thirds of the matmuls.
    meanwhile = matmuls_meanwhile(text[text.index("\nENTRY ") :], "all-reduce")
    assert len(meanwhile) == len(rows)
    assert min(meanwhile) >= 0.4 * matmuls(text), (meanwhile, matmuls(text))


@pytest.mark.exhaustive
def test_most_of_a_fragment_is_sent_during_the_scans_over_the_layers():
    overrides = ("model.scan_layers=true", "local_sgd={name: streaming, every: 4, fragments: 1}")
    trainer, _ = compile_step(small_config(*SHAPE, *overrides))
    text = trainer.wrapper._beside[0].as_text()
    lines = text[text.index("\nENTRY ") :].splitlines()
    loops = [number for number, line in enumerate(lines) if " while(" in line]
    begun = re.findall(r"%([\w.-]+) = [^=]* all-reduce-start\(", "\n".join(lines[: loops[0]]))
    ended = next(number for number, line in enumerate(lines) if " all-reduce-done(" in line)
    assert ended > loops[-1]
    sizes = {row.name: row.payload_bytes for row in collectives(text, dict(trainer.rules.mesh.shape))}
    assert sum(sizes[name] for name in begun) >= 0.8 * sum(sizes.values())
