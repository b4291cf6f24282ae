"""The search: what it offers passes the trainer's own checks, fits, is ranked, and says what was refused."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxstack.cost_model.cluster import parse_cluster
from jaxstack.cost_model.forecast import LayoutModel, compute_optimal, forecast, training_budget
from jaxstack.cost_model.layouts import count_tokens, enumerate_layouts, layout_table_of
from jaxstack.cost_model.model_shape import optimizer_bytes
from jaxstack.cost_model.search import faster_part, search_layouts
from jaxstack.errors import ConfigError
from jaxstack.run.setting import with_training_layout
from jaxstack.run_config import config_from_tree, load_config

DENSE = ["model.preset=llama3-8b", "train.global_batch_size=32", "train.sequence_length=4096"]
MIXTURE = ["model.preset=qwen3-30b-a3b", "train.global_batch_size=32", "train.sequence_length=4096"]


def config_of(*overrides):
    return load_config(None, list(overrides), report=lambda _: None)


@pytest.mark.parametrize("overrides", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_every_offered_layout_passes_the_trainers_checks(overrides):
    config = config_of(*overrides)
    layouts, refused = enumerate_layouts(config, 8)
    assert len(layouts) > 500
    for row in range(0, len(layouts), 29):
        one = layouts.configuration(row, config)
        assert not one.layout_problems()
        assert with_training_layout(one, 8) == one
        assert config_from_tree(one.model_dump(mode="json", by_alias=True)) == one
        columns = layout_table_of(one)
        assert all(columns[name][0] == layouts[name][row] for name in layouts.columns)
    rules = " ".join(refused)
    if overrides is DENSE:
        assert "but this model has none" in rules and (layouts["expert"] == 1).all()
    else:
        assert (layouts["expert"] > 1).any()


@settings(max_examples=15, deadline=None)
@given(
    heads=st.sampled_from([4, 6, 8]),
    layers=st.integers(1, 9),
    batch=st.sampled_from([4, 6, 12, 16]),
    devices=st.sampled_from([1, 2, 4, 6, 8]),
    experts=st.sampled_from([None, 4, 6]),
)
def test_small_models_of_any_shape(heads, layers, batch, devices, experts):
    moe = {"moe": {"num_experts": experts}} if experts else {}
    model = {"vocab_size": 512, "hidden_size": 32 * heads, "num_heads": heads, "num_layers": layers, **moe}
    config = config_from_tree({"model": model, "train": {"global_batch_size": batch, "sequence_length": 96}})
    layouts, _ = enumerate_layouts(config, devices)
    seconds = LayoutModel(config, parse_cluster(f"{devices} h200")).seconds(layouts) if len(layouts) else {}
    for row in range(0, len(layouts), max(1, len(layouts) // 5)):
        assert not layouts.configuration(row, config).layout_problems()
    assert all(np.isfinite(part).all() and (part >= 0).all() for part in seconds.values())


@pytest.mark.longer
def test_thousands_of_layouts_within_seconds():
    config = config_of("model.preset=llama3-70b", "train.global_batch_size=1024", "train.sequence_length=8192")
    began = time.process_time()
    found = search_layouts(config, parse_cluster("64 x 8 h200"), top=5)
    assert time.process_time() - began < 5
    assert found.tried > 100_000 and 0 < found.fitting < found.tried
    times = [one.step_seconds for one in found.forecasts]
    assert len(times) == 5 and times == pytest.approx(sorted(times), rel=2e-3)
    model = LayoutModel(config, parse_cluster("64 x 8 h200"))
    assert all(one.memory_bytes <= model.usable_bytes and one.devices == 512 for one in found.forecasts)
    assert sum(n for rule, n in found.refused.items() if rule.startswith("memory")) == found.tried - found.fitting


def test_the_layout_depends_on_model_and_memory():
    dense = search_layouts(config_of(*DENSE), parse_cluster("8 h200")).best.config
    assert dense.parallel.expert == 1
    small = config_of("model.preset=gpt2-124m", "train.global_batch_size=64", "train.sequence_length=1024")
    parallel = search_layouts(small, parse_cluster("8 h200")).best.config.parallel
    assert parallel.data * parallel.fsdp == 8 and small.model.remat == "none"
    tight = parse_cluster("8 h200").model_copy(update={"memory_bytes": 24 * 2**30})
    assert search_layouts(config_of(*DENSE), tight).best.config.model.remat != "none"


def test_a_model_that_fits_nowhere_gets_a_way_out():
    config = config_of("model.preset=llama3-70b", "train.global_batch_size=256", "train.sequence_length=4096")
    with pytest.raises(ConfigError, match=r"needs .* on each GPU \(.*optimizer.*usable.*It fits \d+ x 8 L40S"):
        search_layouts(config, parse_cluster("8 l40s"))
    odd = config_of("model.preset=gpt2-124m", "train.global_batch_size=5", "train.sequence_length=1024")
    with pytest.raises(ConfigError, match="has 13 devices.*train.global_batch_size.*; 12 would do"):
        search_layouts(odd, parse_cluster("13 h200"))
    with pytest.raises(ConfigError, match="It fits 1 x 4 L40S"):
        search_layouts(config_of(*DENSE), parse_cluster("1 l40s"))


def test_a_part_of_the_cluster_that_is_faster_is_found():
    config = config_of("model.preset=gpt2-124m", "train.global_batch_size=8", "train.sequence_length=1024")
    best = search_layouts(config, parse_cluster("8 x 8 h200"), top=1).best
    part = faster_part(config, best)
    assert part is not None and part.devices < 64 and part.step_seconds < best.step_seconds
    assert part.cluster.devices == part.devices
    large = config_of(*DENSE, "train.global_batch_size=64")
    assert faster_part(large, search_layouts(large, parse_cluster("8 h200"), top=1).best) is None


def test_adapters_need_little_beyond_the_weights():
    rules = "adapters.rules=[{path: attention|mlp, rank: 16}]"
    full, adapted = (LayoutModel(config_of(*DENSE, *more), parse_cluster("h200")) for more in ((), (rules,)))
    share = adapted.time.trained
    # Each of the seven matrices of a layer, [in, out], has 16 (in + out) more parameters.
    added = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert share * full.shape.total == pytest.approx(added, rel=1e-3) and full.time.trained == 1
    layout = layout_table_of(config_of(*DENSE, "parallel.fsdp=8"))
    memory, frozen = ({name: part[0] for name, part in one.memory(layout).items()} for one in (full, adapted))
    assert frozen["optimizer"] == pytest.approx(share * memory["optimizer"])
    assert frozen["weights"] - memory["weights"] == pytest.approx(4 * added / 8, rel=1e-3)  # float32, on 8 devices
    assert 0.6 < adapted.seconds(layout)["matmul"][0] / full.seconds(layout)["matmul"][0] < 0.7
    frozen_table = config_of(*DENSE, "optimizer.groups=[{path: embedding, frozen: true}]")
    table = 128256 * 4096
    assert LayoutModel(frozen_table, parse_cluster("h200")).time.trained == pytest.approx(1 - table / 8.03e9, rel=1e-3)


def test_a_reference_costs_a_forward_pass_and_a_copy_of_the_weights():
    rules = "adapters.rules=[{path: attention|mlp, rank: 16}]"
    loss = "preference.loss"
    layout = layout_table_of(config_of(*DENSE, "parallel.fsdp=8"))
    kinds = ((f"{loss}=simpo",), (f"{loss}=dpo",), (f"{loss}=simpo", rules), (f"{loss}=dpo", rules))
    models = [LayoutModel(config_of(*DENSE, *more), parse_cluster("h200")) for more in kinds]
    memory = [sum(part[0] for part in model.memory(layout).values()) for model in models]
    matmul = [model.seconds(layout)["matmul"][0] for model in models]
    assert memory[1] - memory[0] == pytest.approx(2 * models[0].shape.total / 8, rel=1e-3)
    assert memory[3] == memory[2]  # the model without its adapters is its own reference
    assert matmul[1] / matmul[0] == pytest.approx(4 / 3, rel=0.02) and 1.45 < matmul[3] / matmul[2] < 1.5
    # Both sequences of a pair are counted, for KTO also that of the drift.
    assert [count_tokens(config_of(*DENSE, *more)) for more in ((), *kinds[:2], (f"{loss}=kto",))] == [
        factor * models[0].time.tokens // 2 for factor in (1, 2, 2, 3)
    ]


def test_forecasts_scale_as_they_should():
    def seconds(cluster, *overrides):
        return forecast(config_of(*DENSE, "model.remat=full", *overrides), parse_cluster(cluster)).seconds

    one = seconds("8 h200", "parallel.fsdp=8")
    half = seconds("4 h200", "parallel.fsdp=4")
    assert half["matmul"] == pytest.approx(2 * one["matmul"], rel=0.01)
    assert seconds("8 x 1 h200", "parallel.fsdp=8")["exposed_communication"] > 3 * one["exposed_communication"]
    none = seconds("8 h200", "parallel.fsdp=8", "model.remat=none")
    assert none["matmul"] < 0.9 * one["matmul"]
    # A scan that gathers weights again in the backward pass repeats elementwise operations under `none` too.
    dots = ("8 h200", "parallel.fsdp=8", "model.remat=save_dots")
    assert none["elementwise"] == pytest.approx(seconds(*dots)["elementwise"])
    unrolled = seconds("8 h200", "parallel.fsdp=8", "model.remat=none", "model.scan_layers=false")
    assert unrolled["elementwise"] < 0.9 * seconds(*dots, "model.scan_layers=false")["elementwise"]
    pipeline = seconds("8 h200", "parallel.pipeline=8", "parallel.microbatches=32")
    # Only layers are in the bubble: the head has slots of its own, in which all stages wait.
    layers = seconds("8 h200", "parallel.pipeline=8", "parallel.microbatches=32", "model.vocab_size=256")
    assert layers["bubble"] == pytest.approx(pipeline["bubble"], rel=0.01)
    assert layers["bubble"] > 7 / 32 * layers["matmul"]


def test_optimizer_state_is_that_of_the_optimizers():
    shape = LayoutModel(config_of(*DENSE), parse_cluster("8 h200")).shape

    def state(name):
        return optimizer_bytes(config_of(f"optimizer.name={name}").optimizer, shape)

    assert state("adamw") == pytest.approx(8, rel=1e-3) and state("lion") == pytest.approx(4, rel=1e-3)
    assert state("sgd") == pytest.approx(4, rel=1e-3) and state("adafactor") < 0.1
    assert 4 < state("muon") < 5  # two moments for embedding and head only


def test_budgets():
    config = config_of(*DENSE, "parallel.fsdp=8")
    one = forecast(config, parse_cluster("8 h200"))
    budget = training_budget(one, 1e12)
    assert budget.gpu_hours == pytest.approx(8 * 24 * budget.days)
    assert budget.days * 86400 * one.tokens_per_second == pytest.approx(1e12)
    assert budget.cost == pytest.approx(budget.gpu_hours * 3.5)
    assert budget.kilowatt_hours == pytest.approx(budget.gpu_hours * 0.7)
    # Chinchilla itself: 70B parameters on 1.4T tokens use 5.9e23 FLOPs.
    parameters, tokens = compute_optimal(5.88e23)
    assert parameters == pytest.approx(70e9, rel=0.01) and tokens == pytest.approx(1.4e12, rel=0.01)


@pytest.mark.parametrize("ours", ["llama3-1b", "gpt2-124m"])
def test_measured_steps_of_one_h200(ours):
    """Sustained steps of docs/performance.md: 528.4 ms for llama3-1b, 107.3 ms for gpt2-124m, unrolled, bfloat16."""
    batch, length, measured = {"llama3-1b": (4, 8192, 0.5284), "gpt2-124m": (64, 1024, 0.1073)}[ours]
    shape = [f"train.global_batch_size={batch}", f"train.sequence_length={length}", "model.scan_layers=false"]
    found = forecast(config_of(f"model.preset={ours}", *shape), parse_cluster("1 h200"))
    assert found.step_seconds == pytest.approx(measured, rel=0.08)


def exposed(*overrides: str, gpus: int) -> float:
    config = config_of(*overrides, "model.remat=none")
    return forecast(config, parse_cluster(f"{gpus} h200")).seconds["exposed_communication"]


def test_attention_over_context_pays_for_the_method_that_it_chooses():
    """Short sequences gather all keys, long ones pass them round a ring, many heads on many devices exchange them.

    In the step compiled for two H200s, GPT-2 124M on 64 sequences of 1024 tokens sends 4.83 GB more from each GPU with
    `context` than with `fsdp`: keys and values twice in bfloat16, their gradients once in float32, in 12 layers.
    """
    gpt2 = ["model.preset=gpt2-124m", "train.global_batch_size=64", "train.sequence_length=1024"]
    gathered = exposed(*gpt2, "parallel.context=2", gpus=2) - exposed(*gpt2, "parallel.fsdp=2", gpus=2)
    assert gathered == pytest.approx(4.83e9 / (0.68 * 450e9), rel=0.03)
    llama = ["model.preset=llama3-8b", "train.global_batch_size=4"]

    def beside_fsdp(length: int) -> float:
        sizes = [*llama, f"train.sequence_length={length}"]
        return exposed(*sizes, "parallel.context=4", gpus=4) - exposed(*sizes, "parallel.fsdp=4", gpus=4)

    short = beside_fsdp(2048) / 2048
    long = beside_fsdp(65536) / 65536
    assert 0 < long < 0.3 * short, "a ring hides its transfers behind attention"
    sizes = ["model.preset=llama3-8b", "model.num_layers=12", "model.num_heads=8", "model.num_kv_heads=8"]
    many = [*sizes, "model.head_dim=128", "train.global_batch_size=64", "train.sequence_length=4096"]
    exchanged = exposed(*many, "parallel.context=8", gpus=8) - exposed(*many, "parallel.fsdp=8", gpus=8)
    keys = 64 * 4096 * 2 * 1024 / 8
    assert 0 < exchanged < 12 * 8 * keys * 7 / (0.68 * 450e9), "less than all-gathers send"


def test_attention_over_context_sends_latents_where_they_arrive_earlier():
    """DeepSeek V2 Lite: 576 numbers a token, not 2 x 16 x 192, and the expansion of 512 to 16 x 256 on arrival."""
    sizes = ["model.preset=deepseek-v2-lite", "model.num_layers=4", "model.moe.first_k_dense_replace=4"]
    sizes += ["train.global_batch_size=16", "train.sequence_length=4096"]
    added = exposed(*sizes, "parallel.context=2", gpus=2) - exposed(*sizes, "parallel.fsdp=2", gpus=2)
    tokens = 4 * 16 * 2048  # of the other device, in four layers
    transfer = tokens * (2 * 2 + 4) * 576 / (0.68 * 450e9)
    expansion = tokens * 4 * 2 * 512 * 16 * 256 / 600e12
    assert transfer < added < transfer + 2 * expansion
    assert added < 0.4 * tokens * (2 * 2 + 4) * 2 * 16 * 192 / (0.68 * 450e9), "than keys and values would take"


RECURRENT = {
    "delta": ["model.layer_types=[delta]", "model.delta={num_heads: 16, num_key_heads: 8}"],
    "ssd": ["model.layer_types=[ssd]", "model.ssd={num_heads: 16, n_groups: 8}"],
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrences_over_context_send_what_their_mixers_choose(kind):
    """Heads of short sequences, by all-to-all, and states of long ones, in float32 and twice (with their gradients)."""
    sizes = ["model.vocab_size=512", "model.hidden_size=1024", "model.num_layers=4", "model.num_heads=8"]
    sizes += ["train.global_batch_size=8", *RECURRENT[kind]]

    def added(length: int, method: str) -> float:
        lengths = [*sizes, f"train.sequence_length={length}"]
        context = exposed(*lengths, "parallel.context=4", f"parallel.context_method={method}", gpus=4)
        return context - exposed(*lengths, "parallel.fsdp=4", gpus=4)

    for length, chosen in ((256, "all_to_all"), (32768, "all_gather")):
        assert added(length, "auto") == added(length, chosen)
    other = added(32768, "all_to_all")
    numbers = {"delta": 2 * 1024 + 16 * (2 * 128 + 2), "ssd": 2 * 1024 + 16 * (2 * 64 + 1)}[kind]
    tokens = 4 * 8 * 32768 / 4
    assert other == pytest.approx(2 * tokens * 2 * numbers * 3 / 4 / (0.68 * 450e9), rel=0.02)
    assert added(32768, "auto") < other


@pytest.mark.parametrize(
    ("chosen", "share"),
    [
        ({}, 0.5),  # the first and the last of four layers
        ({"precision": {"fp8_rules": [{"path": "_proj", "fp8": True}]}}, 1.0),
        ({"model": {"unscanned_end_layers": 0}}, 1.0),  # the scan runs all layers alike
        ({"model": {"unscanned_end_layers": 0, "scan_layers": False}}, 0.5),
        ({"parallel": {"pipeline": 2, "microbatches": 2}}, 1.0),
        ({"model": {"unscanned_end_layers": 1}, "parallel": {"pipeline": 2, "microbatches": 2}}, 0.5),
    ],
)
def test_the_forecast_of_fp8_counts_the_layers_that_training_runs_in_it(chosen, share):
    """A model without a head to speak of, on a cluster where FP8 matmuls take no time."""
    model = {"vocab_size": 512, "hidden_size": 4096, "num_heads": 32, "num_layers": 4, "intermediate_size": 14336}
    train = {"global_batch_size": 8, "sequence_length": 2048}
    cluster = parse_cluster("1 x 2 h200")
    fast = cluster.model_copy(update={"peak_tflops": cluster.peak_tflops.model_copy(update={"float8": 1e9})})

    def matmul_seconds(recipe: str) -> float:
        precision = {"fp8": recipe, **(chosen.get("precision", {}) if recipe != "none" else {})}
        sections = {**chosen, "model": {**model, **chosen.get("model", {})}, "train": train, "precision": precision}
        config = config_from_tree(sections)
        layouts = layout_table_of(config)
        return float(LayoutModel(config, fast).seconds(layouts)["matmul"][0])

    assert matmul_seconds("current") / matmul_seconds("none") == pytest.approx(1 - share, abs=0.05)


@pytest.mark.parametrize("experts", [None, 8])
def test_the_forecast_of_fp8_includes_the_experts(experts):
    moe = {"moe": {"num_experts": experts, "num_experts_per_tok": 2}} if experts else {}
    model = {
        "vocab_size": 512,
        "hidden_size": 4096,
        "num_heads": 32,
        "num_layers": 32,
        "intermediate_size": 14336,
        **moe,
    }
    train = {"global_batch_size": 8, "sequence_length": 2048}

    def matmul_seconds(recipe: str) -> float:
        config = config_from_tree({"model": model, "train": train, "precision": {"fp8": recipe}})
        layouts, _ = enumerate_layouts(config, 8)
        return float(LayoutModel(config, parse_cluster("8 h200")).seconds(layouts)["matmul"][0])

    assert matmul_seconds("none") / matmul_seconds("current") > 1.45
