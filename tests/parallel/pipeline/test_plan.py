"""Microbatches and schedules that cannot be are refused with what can."""

import pytest

from jaxstack.errors import ConfigError
from jaxstack.parallel import ParallelConfig
from jaxstack.parallel.pipeline.plan import plan_pipeline
from tests.small_runs import small_config


def plan(batch, accumulation=1, **parallel):
    return plan_pipeline(ParallelConfig(**parallel), batch, accumulation)


def test_defaults():
    assert plan(16, pipeline=4).schedule == "1f1b"
    assert plan(16, pipeline=4).microbatches == 8
    assert plan(12, pipeline=4).microbatches == 6
    assert plan(12, pipeline=4, pipeline_virtual_stages=2).microbatches == 4
    assert plan(16, pipeline=2, pipeline_schedule="interleaved").chunks == 2
    assert plan(16, accumulation=16, pipeline=2).microbatches == 16
    assert plan(16, data=2, fsdp=2, pipeline=2).microbatches == 4


@pytest.mark.parametrize(
    "batch, accumulation, parallel, message",
    [
        (16, 1, {"microbatches": 5}, r"must divide the 16 / 1 rows.*nearest: 4 or 8"),
        (16, 4, {"microbatches": 8}, "are one thing in a pipeline"),
        (12, 1, {"microbatches": 6, "pipeline_schedule": "interleaved"}, r"multiple of parallel.pipeline.*4 or 12"),
        (10, 1, {"pipeline_schedule": "interleaved"}, r"nearest train.global_batch_size: 8 or 12"),
        (
            20,
            1,
            {"pipeline": 3, "microbatches": 4, "pipeline_schedule": "interleaved"},
            r"nearest: parallel.microbatches=3 with train.global_batch_size: 18 or 21",
        ),
        (15, 1, {"data": 2, "microbatches": 3}, r"nearest train.global_batch_size: 12 or 18"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(batch, accumulation, parallel, message):
    with pytest.raises(ConfigError, match=message):
        plan(batch, accumulation, **{"pipeline": 4, **parallel})


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["parallel.microbatches=4"], "needs pipeline of 2 or more"),
        (
            ["parallel.pipeline=2", "parallel.pipeline_schedule=1f1b", "parallel.pipeline_virtual_stages=2"],
            "interleaved",
        ),
        (
            [
                "parallel.pipeline=2",
                "parallel.pipeline_schedule=interleaved",
                "parallel.pipeline_virtual_stages=1",
            ],
            "2 or more",
        ),
        (["parallel.pipeline=3"], r"must not exceed the 2 equal groups.*nearest: parallel.pipeline=2"),
        (["parallel.pipeline=2", "parallel.microbatches=3"], "nearest: 2 or 4"),
        (
            ["parallel.pipeline=2", "model.layer_types=[sliding_attention,full_attention]", "model.sliding_window=4"],
            "must not exceed the 1 equal groups",
        ),
    ],
)
def test_the_configuration_says_so_before_anything_runs(overrides, message):
    with pytest.raises(ConfigError, match=message):
        small_config(*overrides)
