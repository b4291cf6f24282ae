"""A plan says, without devices, what the run then does on them."""

import json
import math

import jax
import numpy as np
import pytest

from jaxstack.parallel.mesh import device_grid, format_number_ranges, split_panels
from jaxstack.plan.__main__ import main
from jaxstack.plan.draw import describe_plan, draw_mesh, draw_plan
from jaxstack.plan.rehearsal import can_compile, device_memory, rehearse
from jaxstack.run_config import load_config
from tests.small_runs import SMALL, make_trainer, small_config

LAYOUTS = [
    ("parallel.data=2", "parallel.fsdp=2", "parallel.tensor=2"),
    ("parallel.pipeline=2", "parallel.fsdp=2", "parallel.data=2", "parallel.zero=1"),
    ("parallel.tensor=8", "model.scan_layers=false"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plan_is_where_the_arrays_really_lie(layout):
    config = small_config(*layout, "train.global_batch_size=16")
    plan = describe_plan(config)["sharding"]
    trainer = make_trainer(config)
    order = {device: number for number, device in enumerate(trainer.rules.mesh.devices.flat)}
    rows = {row["parameter"]: row for row in plan["parameters"]}
    for path, array in jax.tree_util.tree_leaves_with_path(trainer.abstract_state.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        row = rows.get(name) or rows[name.replace("layers/0", "layers/*").replace("layers/1", "layers/*")]
        assert tuple(row["shape"]) == array.shape
        grid = device_grid(plan["mesh"], row["mesh_axes"])
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            starts = [part.start or 0 for part in index]
            part = tuple(start // size for start, size in zip(starts, row["device_shape"], strict=True))
            assert order[device] in grid[part]
        assert sum(map(len, grid.flat)) == len(order)
    assert trainer.describe_sharding() == plan


def test_bytes_are_those_of_a_device():
    config = small_config("parallel.fsdp=2", "train.global_batch_size=4", "model.num_layers=1")
    held = describe_plan(config)["sharding"]["device_bytes"]
    state = make_trainer(config).state
    for name, tree in (("parameters", state.params), ("optimizer", state.optimizer)):
        assert held[name] == sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.longer
def test_a_degree_that_divides_no_dim_is_told():
    """Nothing is refused: the results are the same, but the memory is not that of a split state."""
    plain = ("train.global_batch_size=12", "model.num_layers=1")
    for layout, axis in (("parallel.fsdp=3", "fsdp"), ("parallel.data=3 parallel.zero=1", "data")):
        plan = describe_plan(small_config(*plain, *layout.split(), "model.intermediate_size=64"))
        assert plan["sharding"]["unsplit"][axis]["share"] > 0.9
        assert f"parallel.{axis} (3) divides no dim of " in draw_plan(plan)
    plan = describe_plan(small_config(*plain, "parallel.fsdp=3", "model.hidden_size=48"))
    assert plan["sharding"]["unsplit"] == {}
    assert "divides no dim" not in draw_plan(plan)


def test_cluster_need_not_be_there(tmp_path, capsys):
    file = tmp_path / "big.yaml"
    file.write_text("model: {preset: llama3-70b}\nparallel: {fsdp: -1, tensor: 8}\ntrain: {global_batch_size: 2048}\n")
    assert main(["--config", str(file), "--devices", "1024", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["sharding"]["mesh"] == {"fsdp": 128, "tensor": 8}
    total = 4 * plan["parameters_total"]  # all matrices are split over all devices, vectors over none
    assert total / 1024 <= plan["sharding"]["device_bytes"]["parameters"] < 1.02 * total / 1024
    tokens = 2048 * 256
    assert plan["tokens_per_step"] == tokens
    flops = 6 * plan["parameters_total"] * tokens / 1024
    assert plan["model_flops_per_step_and_device"] == pytest.approx(flops, rel=0.03)


def test_a_server_keeps_keys_of_each_token_and_states_of_each_text():
    layers = ["model.layer_types=[delta,full_attention]", "model.num_layers=4", "precision.compute=bfloat16"]
    delta = {"num_heads": 4, "head_dim": 8, "num_key_heads": 2, "key_head_dim": 16}
    config = load_config(None, [*SMALL, *layers, f"model.delta={delta}", "model.num_heads=4", "model.num_kv_heads=2"])
    plan = describe_plan(config)
    width = config.model.hidden_size // 4
    assert plan["cache_bytes_per_token"] == 2 * 2 * 2 * width * 2
    assert plan["cache_bytes_per_text"] == 2 * (4 * 16 * 8 * 4 + 3 * (2 * 2 * 16 + 4 * 8) * 2)
    assert "a server keeps" in draw_plan(plan) and "KiB per text, whatever its length" in draw_plan(plan)


@pytest.mark.longer
def test_command_draws_mesh_shardings_and_schedule(tmp_path, capsys):
    file = tmp_path / "drawn.yaml"
    file.write_text("model: {preset: tiny}\ntrain: {global_batch_size: 8}\nparallel: {pipeline: 2, fsdp: 2}\n")
    assert main(["--config", str(file)]) == 0
    short = capsys.readouterr().out
    assert "mesh: pipeline 2 x fsdp 2" in short and "1f1b, 2 stages, 4 microbatches; 25.0 %" in short
    assert "stage 1  ...F0 B0" in short and "mlp/up_proj" not in short
    assert main(["--config", str(file), "--show-sharding"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(short.rstrip()) and "layers / pipeline, embed / fsdp, mlp" in shown
    assert "| 0 | 1 |" in shown and "| 2 | 3 |" in shown and "| 0-3 |" in shown


def test_mistakes_get_one_message(tmp_path, capsys):
    file = tmp_path / "rest.yaml"
    file.write_text("model: {preset: tiny}\nparallel: {fsdp: -1}\n")
    assert main(["--config", str(file)]) == 2
    assert "give --devices N" in capsys.readouterr().err
    assert main(["--config", str(file), "--devices", "3"]) == 2
    assert "nearest" in capsys.readouterr().err
    assert main(["--config", str(file), "--devices", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_vocabulary_of_a_byte_tokenizer(tmp_path):
    plan = describe_plan(load_config(None, [*SMALL, "model.vocab_size=null", "data.tokenizer.name=byte"]))
    row = next(row for row in plan["sharding"]["parameters"] if row["parameter"] == "embedding/table")
    assert row["shape"][0] == 320 and not plan["vocabulary_assumed"]  # 257 ids, up to a multiple of 64


def test_pictures_of_a_large_mesh_say_what_they_leave_out():
    lines = draw_mesh({"data": 64, "fsdp": 32})
    assert len(lines) == 18 and "and 48 more rows" in lines[-1] and lines[1].split()[-1] == "..."
    parameters = {"arrays": 1, "shape": [4096, 8], "logical_axes": ["vocab", None], "parameter": "table"}
    row = {**parameters, "mesh_axes": [["data", "fsdp"], []], "device_shape": [2, 8], "device_bytes": 64}
    assert split_panels(row, {"data": 64, "fsdp": 32}).shape == (1, 1, 2048)
    held = {"parameters": 64, "optimizer": 0, "other": 0}
    sharding = {"mesh": {"data": 64, "fsdp": 32}, "parameters": [row], "device_bytes": held}
    sizes = {"tokens_per_step": 1, "model_flops_per_step": 1.0, "model_flops_per_step_and_device": 1.0}
    plan = {"name": "big", "devices": 2048, "parameters_total": 1, "vocabulary_assumed": False, **sizes}
    assert "(1 x 1 x 2048 parts in all)" in draw_plan({**plan, "sharding": sharding}, show_sharding=True)


def test_number_ranges():
    assert format_number_ranges([0, 1, 2, 3, 8, 12, 13]) == "0-3, 8, 12, 13"


def test_device_grid_counts_as_numpy_does():
    mesh = {"data": 2, "fsdp": 3, "tensor": 4}
    grid = device_grid(mesh, [["tensor"], ["data", "fsdp"]])
    numbers = np.arange(math.prod(mesh.values())).reshape(2, 3, 4)
    expected = numbers.transpose(2, 0, 1).reshape(4, 6)
    assert [[cell[0] for cell in row] for row in grid] == expected.tolist()


def test_a_rehearsal_is_the_compilers_account():
    if not can_compile():
        pytest.skip("needs the CUDA plugin of JAX: pip install 'jaxstack[cuda]'")
    layout = ("parallel.context=2", "model.remat=offload", "model.num_layers=3", "train.sequence_length=64")
    config = small_config(*layout, "train.global_batch_size=2")
    found = rehearse(config)
    held = describe_plan(config)["sharding"]["device_bytes"]
    assert 0 <= found["arguments_bytes"] - sum(held.values()) < 2**14  # the batch, and what is aligned
    results = found["predicted_bytes"] - found["arguments_bytes"] - found["temporary_bytes"]
    assert 0 <= results < 2**10 and found["fits"]
    inputs = config.model.num_layers * 2 * 32 * config.model.hidden_size
    assert found["host_bytes"] == 2 * inputs  # in bfloat16
    assert found["usable_bytes"] == int(0.92 * device_memory("h200"))
    text = draw_plan({**describe_plan(config), "rehearsal": found})
    assert "it fits" in text and "in host memory" in text and "--rehearse" not in text
    assert "it does NOT fit" in draw_plan({**describe_plan(config), "rehearsal": {**found, "fits": False}})
