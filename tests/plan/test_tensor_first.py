"""Megatron-LM's published layouts, by the planner's policy that tries tensor parallelism first."""

import json
from pathlib import Path

import pytest

from jaxstack.cost_model.cluster import Cluster, parse_cluster
from jaxstack.cost_model.forecast import LayoutModel
from jaxstack.cost_model.layouts import enumerate_layouts, parse_restrictions
from jaxstack.errors import ConfigError
from jaxstack.models import count_parameters
from jaxstack.plan.__main__ import main
from jaxstack.plan.tensor_first import tensor_first, tensor_first_layout
from jaxstack.run_config import load_config

TABLE = json.loads((Path(__file__).parent / "data" / "megatron_table1.json").read_text())["rows"]
FEWER_STAGES = {529.6: 21}
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


def settings_of(row) -> dict[str, int]:
    """Return the published settings that are no degrees; Megatron-LM of 2021 has no sequence parallelism."""
    text = f"zero=0,remat=full,sequence=0,microbatch_size={row['microbatch_size']}"
    if layers := row["layers_of_virtual_stage"]:
        text += f",virtual_stage_layers={layers}"
    return parse_restrictions(text)


def chosen_by_planner(row, cluster):
    """Return the forecast of the layout that the planner chooses with the row's published settings."""
    return tensor_first_layout(load_config(None, overrides_of(row)), cluster, settings_of(row))


def degrees_of(row, cluster):
    """Return the (tensor, pipeline) degrees of this layout."""
    parallel = chosen_by_planner(row, cluster).config.parallel
    return parallel.tensor, parallel.pipeline


@rows_of_table
def test_parameters_are_those_of_the_table(row):
    model = load_config(None, overrides_of(row)).model
    assert count_parameters(model).total / 1e9 == pytest.approx(row["params_b"], rel=0.03)


@rows_of_table
def test_layouts_of_megatrons_table_1(row):
    expected = (row["t"], FEWER_STAGES.get(row["params_b"], row["p"]))
    assert degrees_of(row, cluster_of(row)) == expected


@pytest.mark.longer
@pytest.mark.parametrize("gigabytes", [66, 72])
@rows_of_table
def test_all_layouts_of_the_table_with_less_memory(row, gigabytes):
    assert degrees_of(row, cluster_of(row, memory_bytes=gigabytes * 10**9)) == (row["t"], row["p"])


def test_four_bytes_more_a_parameter_are_what_the_tenth_layout_differs_by():
    """In a pipeline a parameter takes 16 bytes here; Megatron-LM stores float16 weights and gradients besides."""
    (row,) = (row for row in TABLE if row["params_b"] in FEWER_STAGES)
    cluster = cluster_of(row)
    usable = LayoutModel(load_config(None, overrides_of(row)), cluster).usable_bytes
    fewer = chosen_by_planner(row, cluster)
    published = chosen_by_planner(row, cluster_of(row, memory_bytes=70 * 10**9))
    for found, stages, fits in ((fewer, FEWER_STAGES[row["params_b"]], False), (published, row["p"], True)):
        assert found.config.parallel.pipeline == stages
        more = 4 * row["params_b"] * 1e9 / (row["t"] * stages)
        assert found.memory_bytes <= usable
        assert (found.memory_bytes + more <= usable) == fits


def test_settings_that_only_a_restriction_tries():
    config = load_config(None, ["model.preset=gpt2-124m", "train.global_batch_size=24", "train.sequence_length=512"])
    layouts, _ = enumerate_layouts(config, 8, only=parse_restrictions("tensor=2,pipeline=2,chunks=3"))
    assert set(layouts["chunks"]) == {3} and set(layouts["sequence"]) == {1}
    layouts, _ = enumerate_layouts(config, 8, only=parse_restrictions("tensor=2,pipeline=2,sequence=0"))
    assert len(layouts) and set(layouts["sequence"]) == {0}
    layouts, _ = enumerate_layouts(config, 8, only=parse_restrictions("virtual_stage_layers=1"))
    stages = layouts["pipeline"] * layouts["chunks"]
    assert {int(number) for number in stages[layouts["pipeline"] > 1]} == {12}
    assert layouts.schedule_in("interleaved").any() and (layouts["pipeline"] == 1).any()
    config = load_config(None, ["model.preset=gpt2-124m", "parallel.pipeline=2", "parallel.pipeline_virtual_stages=2"])
    layouts, _ = enumerate_layouts(config, 8, only=parse_restrictions("pipeline=2,virtual_stage_layers=1"))
    assert set(layouts["chunks"]) == {6}  # not those of the configuration


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
