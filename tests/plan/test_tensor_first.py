"""Megatron-LM's published layouts, by the policy that tries tensor parallelism first."""

import json
from pathlib import Path

import pytest

from jaxstack.cost_model.cluster import parse_cluster
from jaxstack.plan.tensor_first import GptJob, tensor_first, tensor_first_layout
from jaxstack.run_config import load_config

TABLE = json.loads((Path(__file__).parent / "data" / "megatron_table1.json").read_text())["rows"]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['params_b']}B")
def test_layouts_of_megatrons_table_1(row):
    names = ("layers", "hidden", "heads", "gpus", "batch", "layers_of_virtual_stage")
    job = GptJob(**{name: row[name] for name in names})
    assert job.layout(68e9) == (row["t"], row["p"])


def test_parameters_are_those_of_the_table():
    for row in TABLE:
        job = GptJob(row["layers"], row["hidden"], row["heads"], row["gpus"], row["batch"])
        state = job.gpu_bytes(1, 1, 1) - job.gpu_bytes(1, 1, 0)
        assert state / 1e9 == pytest.approx(row["params_b"], rel=0.03)


def test_tensor_degrees_come_before_pipelines():
    assert tensor_first(lambda t, p: t * p >= 4, most_tensor=8, most_pipeline=64) == (4, 1)
    assert tensor_first(lambda t, p: t * p >= 24, most_tensor=8, most_pipeline=64) == (8, 3)
    assert tensor_first(lambda t, p: t <= 2 and t * p >= 6, most_tensor=8, most_pipeline=64) == (2, 3)
    assert tensor_first(lambda t, p: False, most_tensor=8, most_pipeline=4) is None


def test_policy_on_the_trainers_own_layouts():
    config = load_config(None, ["model.preset=llama3-8b", "train.global_batch_size=16", "train.sequence_length=4096"])
    small = tensor_first_layout(config, parse_cluster("1 x 8 h200")).config.parallel
    assert (small.tensor, small.pipeline, small.data) == (1, 1, 8)
    tight = parse_cluster("1 x 8 h200").model_copy(update={"memory_bytes": 2**35})
    degrees = tensor_first_layout(config, tight).config.parallel
    assert degrees.tensor > 1 and degrees.pipeline == 1 and degrees.fsdp == 1
