"""Layouts of runs that go on with fewer devices, as plain data."""

import pytest

from jaxstack.config.sections import TrainConfig
from jaxstack.errors import ConfigError
from jaxstack.parallel.config import ParallelConfig
from jaxstack.parallel.fewer_devices import describe_change, fit_fewer_devices

TRAIN = TrainConfig(global_batch_size=48, sequence_length=32)


def degrees(parallel: ParallelConfig) -> dict[str, int]:
    return {axis: degree for axis, degree in parallel.degrees.items() if degree > 1}


@pytest.mark.parametrize(
    ("layout", "devices", "wanted", "accumulation"),
    [
        ({"data": 4}, 2, {"data": 2}, 2),
        ({"data": 4}, 3, {"data": 3}, 2),
        ({"fsdp": 8}, 4, {"fsdp": 4}, 2),
        ({"data": 2, "fsdp": 4}, 4, {"fsdp": 4}, 2),
        ({"data": 2, "fsdp": 4}, 2, {"fsdp": 2}, 4),
        ({"data": 4, "fsdp": 2}, 6, {"data": 3, "fsdp": 2}, 2),
        ({"fsdp": 4, "tensor": 2}, 2, {"tensor": 2}, 4),
    ],
)
def test_data_and_fsdp_shrink_and_the_batch_stays(layout, devices, wanted, accumulation):
    parallel, train = fit_fewer_devices(ParallelConfig(**layout), TRAIN, devices)
    assert degrees(parallel) == wanted and train.global_batch_size == 48
    assert train.gradient_accumulation == accumulation
    replicas = parallel.data * parallel.fsdp
    assert 48 % (replicas * train.gradient_accumulation) == 0
    assert 48 / (replicas * train.gradient_accumulation) <= 48 / (layout.get("data", 1) * layout.get("fsdp", 1))
    assert train.eval_batch_size is not None and train.eval_batch_size % replicas == 0


def test_zero_needs_replicas():
    parallel, _ = fit_fewer_devices(ParallelConfig(data=2, zero=2), TRAIN, 1)
    assert parallel.zero == 0
    assert fit_fewer_devices(ParallelConfig(data=4, zero=2), TRAIN, 2)[0].zero == 2


def test_a_pipeline_takes_more_microbatches():
    before = ParallelConfig(data=4, pipeline=2, microbatches=6)
    parallel, train = fit_fewer_devices(before, TRAIN, 4)
    assert (parallel.data, parallel.pipeline, parallel.microbatches, train.gradient_accumulation) == (2, 2, 12, 1)
    said = describe_change((before, TRAIN), (parallel, train))
    assert said == "data 4 -> 2, parallel.microbatches 6 -> 12"


@pytest.mark.parametrize(
    ("layout", "devices", "said"),
    [
        ({"data": 2, "tensor": 4}, 6, "take 4"),
        ({"data": 2, "tensor": 4}, 2, "take 4"),
        ({"data": 8}, 5, "must divide the 48 sequences"),
    ],
)
def test_what_cannot_be_divided_is_refused(layout, devices, said):
    with pytest.raises(ConfigError, match=said):
        fit_fewer_devices(ParallelConfig(**layout), TRAIN, devices)
