"""When islands communicate: the schedule of the programs, compiled for H200s."""

import pytest

from jaxstack.island_trainer import bytes_between_islands
from jaxstack.observe.collectives import collectives
from jaxstack.parallel.config import ISLANDS
from tests.hopper_steps import compile_step
from tests.parallel.test_gather_schedule import matmuls_meanwhile
from tests.small_runs import small_config

SHAPE = (
    "model.num_layers=4", "model.hidden_size=1024", "model.num_heads=8", "model.head_dim=128",
    "model.intermediate_size=4096", "model.vocab_size=8192", "model.scan_layers=false", "model.remat=none",
    "train.sequence_length=2048", "train.global_batch_size=8", "parallel.islands=2",
)  # fmt: skip


@pytest.mark.exhaustive
def test_a_fragment_travels_while_the_next_step_computes():
    trainer, step = compile_step(small_config(*SHAPE, "islands={name: streaming, every: 4, fragments: 2}"))
    assert bytes_between_islands(step, dict(trainer.rules.mesh.shape)) == 0
    sent = 0
    for program in trainer._beside.values():
        text = program.as_text()
        rows = [row for row in collectives(text, dict(trainer.rules.mesh.shape)) if ISLANDS in row.axes]
        assert all(row.asynchronous for row in rows)
        sent += sum(row.payload_bytes for row in rows)
        meanwhile = matmuls_meanwhile(text[text.index("\nENTRY ") :], "all-reduce")
        assert len(meanwhile) == len(rows)
        # Forward and backward of four layers have more than 80 matmuls and kernels.
        assert min(meanwhile) > 40, meanwhile
    assert sent == 4 * trainer.count_parameters()
