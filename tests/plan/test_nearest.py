"""The nearest layout of a number of devices: what a refusal names can be used as it stands."""

import re

import pytest

from jaxstack.errors import ConfigError
from jaxstack.parallel.config import nearest_degrees
from jaxstack.run.setting import with_training_layout
from jaxstack.run_config import load_config


@pytest.mark.parametrize(
    "wanted, devices, nearest",
    [
        ({"data": 4, "tensor": 4}, 8, "data=2, tensor=4"),
        ({"data": 1, "context": 2}, 16, "data=8, context=2"),
        ({"data": 1, "pipeline": 4}, 6, "pipeline=6"),
        ({"data": 1, "tensor": 3}, 3, "tensor=3"),
        ({"data": -1, "tensor": 4}, 6, "data=2, tensor=3"),
        ({"data": 2, "tensor": 2}, 1, "all degrees 1"),
    ],
)
def test_replicas_change_first_then_the_least(wanted, devices, nearest):
    assert nearest_degrees(wanted, devices) == nearest


def test_only_what_fits_is_named():
    assert nearest_degrees({"data": 1, "tensor": 3}, 6, lambda d: d["tensor"] <= 2) == "data=3, tensor=2"
    assert nearest_degrees({"data": 1, "tensor": 3}, 7, lambda d: 7 not in d.values()) is None


@pytest.mark.parametrize(
    "overrides, devices",
    [
        (["parallel.tensor=3", "parallel.data=2"], 6),
        (["parallel.fsdp=5", "parallel.context=2", "train.sequence_length=250"], 10),
        (["parallel.context=2"], 16),
        (["parallel.pipeline=6"], 6),
        (["parallel.expert=4", "parallel.fsdp=-1"], 8),
        (["parallel.data=2", "parallel.zero=2", "parallel.tensor=2", "parallel.sequence=true"], 8),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_layout_that_a_refusal_names_is_accepted(overrides, devices):
    overrides = ["train.global_batch_size=10", "model.num_layers=5", *overrides]
    with pytest.raises(ConfigError) as refusal:
        with_training_layout(load_config(None, overrides), devices)
    (named,) = re.findall(r"fit with parallel ([\w=, ]+)\.$", str(refusal.value))
    kept = [o for o in overrides if not re.match(r"parallel\.\w+=-?\d+$", o) or "zero" in o]
    accepted = with_training_layout(
        load_config(None, [*kept, *(f"parallel.{part}" for part in named.split(", "))]), devices
    )
    assert accepted.parallel.tensor in (1, 2, 4)
