"""Megatron-LM's published layouts, by the planner's policy that tries tensor parallelism first."""

import json
from pathlib import Path

import pytest

from jaxstack.cost_model.cluster import Cluster, parse_cluster
from jaxstack.cost_model.layouts import parse_restrictions
from jaxstack.errors import ConfigError
from jaxstack.models import count_parameters
from jaxstack.plan.__main__ import main
from jaxstack.plan.tensor_first import tensor_first, tensor_first_layout
from jaxstack.run_config import load_config

TABLE = json.loads((Path(__file__).parent / "data" / "megatron_table1.json").read_text())["rows"]
FEWER_STAGES = {310.1: 12, 529.6: 21, 1008.0: 32}
"""Pipeline degrees on GPUs of 80 GB where they are not the published ones, by billions of parameters."""
rows_of_table = pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['params_b']}B")


def overrides_of(row):
    """Return the overrides of a row's model and batch."""
    return [
        "model.preset=gpt2-124m",
        "model.vocab_size=51200",
        f"model.hidden_size={row['hidden']}",
        f"model.intermediate_size={4 * row['hidden']}",
        f"model.num_heads={row['heads']}",
        f"model.num_layers={row['layers']}",
        "model.max_position_embeddings=2048",
        "train.sequence_length=2048",
        f"train.global_batch_size={row['batch']}",
    ]


def cluster_of(row, **changes) -> Cluster:
    return parse_cluster(f"{row['gpus'] // 8} x 8 a100").model_copy(update=changes)


def degrees_of(row, cluster):
    """Return the (tensor, pipeline) degrees that the planner chooses with the row's published settings."""
    only = parse_restrictions(f"zero=0,remat=full,microbatch_size={row['microbatch_size']}")
    parallel = tensor_first_layout(load_config(None, overrides_of(row)), cluster, only).config.parallel
    return parallel.tensor, parallel.pipeline


@rows_of_table
def test_parameters_are_those_of_the_table(row):
    model = load_config(None, overrides_of(row)).model
    assert count_parameters(model).total / 1e9 == pytest.approx(row["params_b"], rel=0.03)


@rows_of_table
def test_layouts_of_megatrons_table_1(row):
    # A parameter takes 20 bytes in Megatron-LM, 16 in a pipeline here: the largest models need fewer stages.
    expected = (row["t"], FEWER_STAGES.get(row["params_b"], row["p"]))
    assert degrees_of(row, cluster_of(row)) == expected


@pytest.mark.longer
@rows_of_table
def test_all_layouts_of_the_table_with_less_memory(row):
    assert degrees_of(row, cluster_of(row, memory_bytes=58 * 10**9)) == (row["t"], row["p"])


@pytest.mark.longer
def test_command_with_restrictions(tmp_path, capsys):
    path = tmp_path / "empty.yaml"
    path.write_text("model: {preset: gpt2-124m}\n")
    arguments = ["--config", str(path), "--cluster", "16 x 8 a100", "--policy", "tensor-first", "--json"]
    arguments += overrides_of(TABLE[2])
    assert main([*arguments, "--only", "zero=0, remat=full, microbatch_size=16"]) == 0
    (best,) = json.loads(capsys.readouterr().out)["layouts"]
    assert best["layout"] == "data 32 x tensor 4, remat full"
    assert main([*arguments, "--only", "zero=0,remat=full,microbatch_size=7"]) == 2
    assert "microbatch_size other than 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zeros=1", "did you mean 'zero'"),
        ("remat=most", "remat must be one of none"),
        ("zero=", "zero=1"),
        ("zero=0,zero=1", "has zero twice"),
    ],
)
def test_restrictions_that_are_none(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_restrictions(text)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only", "fp8=delayed"], "--only fp8 needs FP8 tensor cores, which A100"),
        (["--only", "fsdp=2", "--policy", "tensor-first"], "--policy tensor-first has fsdp 1"),
    ],
)
def test_restrictions_that_fit_neither_device_nor_policy(tmp_path, capsys, more, message):
    path = tmp_path / "run.yaml"
    path.write_text("model: {preset: gpt2-124m}\n")
    assert main(["--config", str(path), "--cluster", "1 x 4 a100", *more]) == 2
    assert message in capsys.readouterr().err


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
