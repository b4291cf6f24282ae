"""What the peers are told to run, and how what they print is read."""

import pytest

from benchmarks.peers import maxtext_step, torchtitan_step
from benchmarks.training import train_step
from jaxstack.run_config import load_config

LINES = "\n".join(
    f"completed step: {step}, seconds: {seconds}, TFLOP/s/device: 1.0, Tokens/s/device: 2.0, total_weights: 8, "
    f"loss: {loss}, lm_loss: 0.000"
    for step, (seconds, loss) in enumerate([("24.9", "9.0"), *[("0.500", "8.0")] * 4, *[("0.250", "7.5")] * 5])
)


def config_of(work):
    return load_config(None, train_step.WORKS[work])


def settings_of(arguments):
    return dict(argument.removeprefix("--").split("=", 1) for argument in arguments if "=" in argument)


def test_steps_of_maxtext_after_its_warm_up():
    found = maxtext_step.read_log(LINES)
    assert found["milliseconds"] == found["start_milliseconds"] == 250.0 and found["measured_seconds"] == 1.25
    assert (found["first_loss"], found["last_loss"]) == (9.0, 7.5)
    with pytest.raises(SystemExit, match="printed 0 steps"):
        maxtext_step.read_log("out of memory")


def test_maxtext_runs_the_same_work():
    settings = settings_of(maxtext_step.arguments_of(config_of("llama3-8b fsdp4 fp8"), "folder", 20))
    assert settings["per_device_batch_size"] == "2.0" and settings["ici_fsdp_parallelism"] == "4"
    assert settings["base_mlp_dim"] == "14336" and settings["quantization"] == "fp8"
    assert settings["remat_policy"] == "minimal" and settings["scan_layers"] == "True"
    settings = settings_of(maxtext_step.arguments_of(config_of("llama3-1b bf16"), "folder", 20))
    assert settings["remat_policy"] == "none" and settings["head_dim"] == "64" and settings["quantization"] == ""
    with pytest.raises(SystemExit, match="MaxText peer covers"):
        maxtext_step.arguments_of(config_of("qwen3-30b-a3b of 6 layers bf16"), "folder", 20)


def test_maxtext_has_the_options_of_its_recipe_unless_some_are_set(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert "--xla_gpu_enable_triton_gemm=false" in maxtext_step.environment()["XLA_FLAGS"].split()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    assert maxtext_step.environment()["XLA_FLAGS"] == "--xla_gpu_autotune_level=4"


def test_maxtext_runs_long_enough():
    one, four = (maxtext_step.steps_of(config_of(work), 30) for work in ("llama3-1b bf16", "llama3-8b fsdp4 bf16"))
    assert one >= 5 + 30 * 50_000 / 32768 and four >= 5 + 30 * 4 * 9000 / 32768
    assert maxtext_step.steps_of(config_of("llama3-1b bf16"), 0.1) == 20


def test_torchtitan_runs_the_same_work():
    settings = settings_of(torchtitan_step.arguments_of(config_of("llama3-8b context4 65536 bf16")))
    assert settings["parallelism.context_parallel_degree"] == "4" and settings["training.local_batch_size"] == "1"
    assert settings["activation_checkpoint.mode"] == "full" and settings["training.seq_len"] == "65536"
    arguments = torchtitan_step.arguments_of(config_of("llama3-8b fsdp4 fp8"))
    assert "--quantize.linear.float8.enable_fsdp_float8_all_gather" in arguments
    assert settings_of(arguments)["activation_checkpoint.mode"] == "selective"
    with pytest.raises(SystemExit, match="torchtitan peer covers"):
        torchtitan_step.arguments_of(config_of("gpt2-124m bf16"))


@pytest.mark.parametrize(
    ("work", "recompute", "rows", "context"),
    [
        ("llama3-8b fsdp2 bf16", "none", "1", "1"),
        ("llama3-8b fsdp2 fp8", "none", "1", "1"),
        ("llama3-8b context2 65536 bf16", "full", "1", "2"),
    ],
)
def test_torchtitan_runs_the_same_work_on_two_gpus(work, recompute, rows, context):
    arguments = torchtitan_step.arguments_of(config_of(work))
    settings = settings_of(arguments)
    assert settings["activation_checkpoint.mode"] == recompute and settings["training.local_batch_size"] == rows
    assert settings["parallelism.data_parallel_shard_degree"] == "-1"
    assert settings["parallelism.context_parallel_degree"] == context
    assert ("--quantize.linear.float8.enable_fsdp_float8_all_gather" in arguments) == ("fp8" in work)


def test_torchtitan_has_a_mixture_of_the_same_shape():
    family, sizes = torchtitan_step.model_arguments(config_of("qwen3-30b-a3b of 6 layers bf16").model)
    assert family == "qwen3" and sizes["n_layers"] == 6 and sizes["moe_inter_dim"] == 768 and sizes["head_dim"] == 128
    experts = sizes["moe_args"]
    assert (experts["num_experts"], experts["top_k"], experts["route_norm"]) == (128, 8, True)
    settings = settings_of(torchtitan_step.arguments_of(config_of("qwen3-30b-a3b of 6 layers expert2 bf16")))
    assert settings["parallelism.expert_parallel_degree"] == "2" and settings["training.local_batch_size"] == "4"
    shared = load_config(None, [*train_step.WORKS["qwen3-30b-a3b of 6 layers bf16"], "model.moe.n_shared_experts=1"])
    with pytest.raises(SystemExit, match="no shared experts"):
        torchtitan_step.arguments_of(shared)


def test_torchtitan_has_deepseek_of_the_same_shape():
    family, sizes = torchtitan_step.model_arguments(config_of("deepseek-v2-lite of 4 layers bf16").model)
    assert family == "deepseek_v3" and sizes["n_layers"] == 4 and sizes["n_dense_layers"] == 1
    assert (sizes["dim"], sizes["inter_dim"], sizes["moe_inter_dim"]) == (2048, 10944, 1408)
    assert (sizes["q_lora_rank"], sizes["kv_lora_rank"]) == (0, 512)
    assert (sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"], sizes["v_head_dim"]) == (128, 64, 128)
    experts = sizes["moe_args"]
    assert (experts["num_experts"], experts["num_shared_experts"], experts["top_k"]) == (64, 2, 6)
    assert not experts["route_norm"] and not experts["gate_bias"] and "num_expert_groups" not in experts


def test_torchtitan_has_gpt_oss_of_the_same_shape():
    family, sizes = torchtitan_step.model_arguments(config_of("gpt-oss-20b of 4 layers bf16").model)
    assert family == "gpt_oss" and sizes["n_layers"] == 4 and sizes["vocab_size"] == 201088
    assert (sizes["dim"], sizes["moe_inter_dim"], sizes["sliding_window_size"]) == (2880, 2880, 128)
    assert (sizes["n_heads"], sizes["n_kv_heads"], sizes["head_dim"]) == (64, 8, 64)
    experts = sizes["moe_args"]
    assert (experts["num_experts"], experts["top_k"]) == (32, 4)
    assert experts["route_norm"] and experts["gate_bias"]
    work = train_step.WORKS["gpt-oss-20b of 4 layers bf16"]
    with pytest.raises(SystemExit, match="window in every second layer"):
        torchtitan_step.model_arguments(load_config(None, [*work, "model.layer_types=[full_attention]"]).model)
    with pytest.raises(SystemExit, match="gpt-oss on one device"):
        torchtitan_step.arguments_of(load_config(None, [*work, "parallel.expert=2"]))


def test_torchtitan_multiplies_experts_in_fp8_and_falls_back_where_that_fails():
    settings = settings_of(torchtitan_step.arguments_of(config_of("deepseek-v2-lite of 4 layers fp8")))
    assert settings["model.converters"] == "quantize.linear.float8,quantize.grouped_mm.float8"
    assert settings["quantize.grouped_mm.float8.fqns"] == "moe.experts", "not those of moe.shared_experts"
    assert "router.gate" in settings["quantize.linear.float8.filter_fqns"].split(",")
    lines = "Traceback (most recent call last):\n{}\ntorch.distributed.elastic.ChildFailedError: \n"
    full = lines.format("[rank0]: torch.OutOfMemoryError: CUDA out of memory.")
    broken = lines.format("[rank0]: RuntimeError: no such kernel")
    tried = []

    def attempt(way):
        tried.append(str(way))
        if len(tried) < 3:
            raise torchtitan_step.PeerError(full if len(tried) == 1 else broken)
        return {"milliseconds": 1.0}

    row = torchtitan_step.first_way(torchtitan_step.best_way(config_of("gpt-oss-20b of 4 layers fp8")), attempt)
    assert tried == ["recompute none, experts in FP8", "recompute full, experts in FP8", "recompute full"]
    assert [text.partition(": ")[2] for text in row["failed"]] == [
        "torch.OutOfMemoryError: CUDA out of memory.", "RuntimeError: no such kernel",
    ]  # fmt: skip
    with pytest.raises(torchtitan_step.PeerError, match="no such kernel"):
        torchtitan_step.first_way(torchtitan_step.Way("none"), lambda _: attempt_that_fails(broken))


def attempt_that_fails(output):
    raise torchtitan_step.PeerError(output)


def test_peers_that_are_not_installed_are_named(monkeypatch, capsys):
    monkeypatch.setattr(train_step.importlib.util, "find_spec", lambda name: True if name == "torch" else None)
    assert train_step.peers_of("llama3-1b bf16", list(train_step.PEERS)) == ["torch"]
    assert "no rows of torchtitan, maxtext" in capsys.readouterr().out
    assert train_step.peers_of("qwen3-30b-a3b of 6 layers bf16", ["torch", "maxtext"]) == []
    assert capsys.readouterr().out == ""
