"""The composed configuration: presets, shipped files, combinations that cannot be, the JSON schema."""

import json
from pathlib import Path

import pytest
import yaml

from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, count_parameters, preset_names
from jaxstack.run.setting import with_training_layout
from jaxstack.run_config import config_schema, load_config

REPOSITORY = Path(__file__).resolve().parents[1]
SHIPPED = sorted((REPOSITORY / "configs").glob("*.yaml"))


def refusal(*overrides: str, devices: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        config = load_config(None, overrides)
        with_training_layout(config, devices or 1)
    return str(caught.value)


PUBLISHED = {
    "gpt2-124m": 124e6, "gpt2-350m": 355e6, "llama3-8b": 8.03e9, "llama3-70b": 70.55e9, "qwen2.5-7b": 7.62e9,
    "qwen3-8b": 8.19e9, "mistral-7b": 7.24e9, "gemma2-2b": 2.61e9, "llama3-1b": 1.236e9 + 128256 * 2048,
    "mixtral-8x7b": 46.7e9, "qwen3-30b-a3b": 30.5e9, "smollm3-3b": 3.08e9, "granite3-8b": 8.17e9, "olmo2-7b": 7.3e9,
    "olmo3-7b": 7.3e9, "gpt-oss-20b": 20.9e9, "gpt-oss-120b": 116.8e9, "deepseek-v2-lite": 15.7e9, "deepseek-v3": 671e9,
    "deepseek-v3.2": 671.9e9,
    "kimi-k2": 1.03e12, "phi4-mini": 3.84e9, "llama4-scout": 107.8e9, "gemma3-4b": 3.88e9, "glm-4.5-air": 106.85e9,
    "glm-4.7-flash": 29.9e9, "gemma4-31b": 30.7e9, "gemma4-26b-a4b": 25.2e9, "gemma4-e2b": 4.65e9, "gemma4-e4b": 7.5e9,
    "qwen3-next-80b-a3b": 79.67e9, "qwen3.5-4b": 4.206e9, "qwen3.5-35b-a3b": 34.66e9, "mamba2-2.7b": 2.7e9,
    "granite4-h-tiny": 6.94e9, "nemotron3-nano-30b-a3b": 31.6e9, "kimi-linear-48b-a3b": 49.1e9,
    "olmo-hybrid-7b": 7.43e9,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_presets_have_their_published_size(name):
    model = load_config(None, [f"model.preset={name}"]).model
    assert count_parameters(model).total == pytest.approx(PUBLISHED[name], rel=0.01)


def test_every_preset_builds_and_is_known_here():
    assert set(preset_names()) == set(PUBLISHED) | {"tiny", "tiny-moe"}
    for name in preset_names():
        assert load_config(None, [f"model.preset={name}"]).model.preset == name


def test_keys_beside_a_preset_win():
    overrides = ["model.preset=llama3-8b", "model.num_layers=2", "model.rope_scaling={factor: 2.0}"]
    model = load_config(None, overrides).model
    assert model.num_layers == 2 and model.hidden_size == 4096
    assert model.rope_scaling.factor == 2.0 and model.rope_scaling.rope_type == "llama3"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_load_and_match_the_schema(path):
    config = load_config(path)
    assert config.run.name == path.stem
    check(yaml.safe_load(path.read_text()) or {}, config_schema())


def check(value, schema, whole=None, where="config"):
    """A small part of JSON schema: types, properties, references, unions, choices."""
    whole = whole or schema
    if "$ref" in schema:
        return check(value, whole["$defs"][schema["$ref"].rsplit("/", 1)[1]], whole, where)
    if "anyOf" in schema or "oneOf" in schema:
        problems = []
        for choice in schema.get("anyOf", schema.get("oneOf")):
            try:
                return check(value, choice, whole, where)
            except AssertionError as error:
                problems.append(str(error))
        raise AssertionError(f"{where}: {problems}")
    kinds = {
        "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
        "null": type(None),
    }  # fmt: skip
    if "type" in schema:
        assert isinstance(value, kinds[schema["type"]]), f"{where} is no {schema['type']}"
    if "enum" in schema:
        assert value in schema["enum"], where
    if "const" in schema:
        assert value == schema["const"], where
    if isinstance(value, dict) and "properties" in schema:
        for key, inner in value.items():
            assert key in schema["properties"], f"{where}.{key} is unknown"
            check(inner, schema["properties"][key], whole, f"{where}.{key}")
        assert set(schema.get("required", ())) <= set(value), where
    if isinstance(value, list) and "items" in schema:
        for inner in value:
            check(inner, schema["items"], whole, where)
    return None


def test_schema_refuses_what_the_loader_refuses():
    schema = json.loads(json.dumps(config_schema()))
    check({"checkpoint": {"async": False}, "optimizer": {"learning_rate": 1.0}}, schema)
    for wrong in ({"modle": {}}, {"train": {"steps": "x"}}, {"optimizer": {"name": "adam"}}):
        with pytest.raises(AssertionError):
            check(wrong, schema)


def test_schema_tells_what_keys_mean():
    steps = config_schema()["$defs"]["TrainConfig"]["properties"]["steps"]
    assert "Optimizer steps" in steps["description"]


@pytest.mark.parametrize(
    ("overrides", "devices", "said"),
    [
        (["model.hidden_size=100", "model.num_heads=3"], 1, ["hidden_size (100)", "num_heads (3)", "2 or 4"]),
        (["model.num_heads=6", "model.num_kv_heads=4", "model.hidden_size=96"], 1, ["num_kv_heads (4)", "3 or 6"]),
        (["model.head_dim=7"], 1, ["head_dim (7)", "even"]),
        (["model.positions=learned"], 1, ["max_position_embeddings"]),
        (["model.layer_types=[sliding_attention]"], 1, ["sliding_window"]),
        (["model.layer_types=[chunked_attention]"], 1, ["attention_chunk_size"]),
        (["train.sequence_length=2048", "model.preset=gpt2-124m"], 1, ["2048", "1024"]),
        (["train.gradient_accumulation=3"], 1, ["(8)", "(3)", "6 or 9"]),
        (["schedule.warmup_steps=20", "train.steps=10"], 1, ["warmup_steps (20)", "train.steps (10)"]),
        (["parallel.data=2"], 8, ["data=2", "(8)", "nearest: data=8", "parallel.simulate_devices=2"]),
        (["parallel.data=4", "parallel.tensor=4"], 8, ["nearest: data=2"]),
        (["parallel.fsdp=-1", "parallel.data=3"], 8, ["data=3", "2 or 4"]),
        (["parallel.fsdp=-1", "parallel.data=-1"], 8, ["only one degree may be -1"]),
        (["parallel.data=0"], 8, ["data=0"]),
        (["parallel.tensor=8"], 8, ["num_heads (4)", "1, 2, 4"]),
        (["parallel.tensor=4", "model.intermediate_size=1001"], 4, ["1001", "1000 or 1004"]),
        (["parallel.data=3", "parallel.simulate_devices=3"], 3, ["global_batch_size (8)", "6 or 9"]),
        (["parallel.sequence=true"], 1, ["sequence", "tensor"]),
        (["parallel.sequence=true", "parallel.tensor=2", "train.sequence_length=15"], 2, ["(15)", "14 or 16"]),
        (["parallel.pipeline=5"], 5, ["5 x 1", "4 equal groups", "nearest: parallel.pipeline=4"]),
        (
            ["parallel.context=8", "train.sequence_length=1000"],
            8,
            ["sequence_length 1000 must be divisible by 2 x context parallel degree (8)", "992 or 1008"],
        ),
        (
            ["parallel.context=3", "parallel.context_method=all_to_all", "train.sequence_length=12"],
            3,
            ["(4)", "1, 2, 4"],
        ),
        (["parallel.context=8", "model.attention.name=linear"], 8, ["num_heads (4)", "linear", "1, 2, 4"]),
        (
            ["parallel.context=2", "parallel.context_method=ring", "model.attention.name=performer"],
            2,
            ["performer needs whole sequences", "all_to_all", "softmax"],
        ),
        (
            ["parallel.context=2", "model.attention.name=projected", "model.attention.block_size=48"],
            2,
            ["block_size (48) must divide the chunk of a device (64)"],
        ),
        (["parallel.context_method=ring"], 1, ["context_method (ring)", "context is 1"]),
        (
            ["parallel.context=2", "parallel.tensor=2", "parallel.sequence=true", "train.sequence_length=18"],
            4,
            ["2 x context parallel degree (2)", "16 or 20"],
        ),
        (["parallel.expert=2"], 2, ["parallel.expert (2)", "model.moe", "use data or fsdp"]),
        (["parallel.zero=3"], 1, ["zero cannot be 3", "'0', '1', '2'"]),
        (["parallel.zero=1"], 1, ["zero: 1", "data to 2 or more", "fsdp"]),
        (["precision.fp8_rules=[{path: q_proj, fp8: false}]"], 1, ["fp8_rules", "fp8 is none"]),
        (["precision.fp8=current", "precision.fp8_rules=[{path: '(', fp8: false}]"], 1, ["'('", "regular expression"]),
        (["train.eval_batch_size=3", "parallel.data=2"], 2, ["eval_batch_size (3)", "2 or 4"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_impossible_combinations_name_the_way_out(overrides, devices, said):
    found = refusal(*overrides, devices=devices)
    assert all(part in found for part in said), found


@pytest.mark.parametrize(("devices", "fsdp"), [(2, 1), (8, 4), (6, 3)])
def test_minus_one_takes_the_rest(devices, fsdp):
    config = load_config(None, ["parallel.fsdp=-1", "parallel.data=2", "train.global_batch_size=24"])
    assert with_training_layout(config, devices).parallel.fsdp == fsdp


@pytest.mark.parametrize("devices", range(1, 13))
@pytest.mark.parametrize("degrees", [(3, 1, 1), (2, 2, 3), (5, -1, 1), (1, 1, 2)])
def test_the_repair_that_a_message_names_works(degrees, devices):
    """Whatever degrees and devices: resolved to the devices, or refused with degrees that fit."""
    config = load_config(None, [
        *(f"parallel.{axis}={d}" for axis, d in zip(("data", "fsdp", "tensor"), degrees, strict=True)),
        "train.global_batch_size=27720", "model.num_heads=12", "model.hidden_size=48", "model.intermediate_size=144",
    ])  # fmt: skip
    try:
        resolved = config.parallel.resolve(devices)
    except ConfigError as error:
        assert "nearest" in str(error)
    else:
        product = 1
        for degree in resolved.degrees.values():
            product *= degree
        assert product == devices


def test_model_config_is_independent_of_the_run():
    assert ModelConfig(hidden_size=64).feed_forward_size == 192
