"""Layouts that nobody chose: drawn at random, each trains as one device does, or is refused with a way out."""

import contextlib
import random
import re

import pytest

from jaxstack.errors import ConfigError
from tests.compilation import fully_optimized
from tests.parallel.test_layouts import assert_trains_as_one_device
from tests.small_runs import small_config

pytestmark = pytest.mark.exhaustive

ROWS = 24
HEADS = 12
SIZES = (
    f"train.global_batch_size={ROWS}", "train.sequence_length=24", "model.hidden_size=32", f"model.num_heads={HEADS}",
    "model.head_dim=4", "model.intermediate_size=48",
    "optimizer.learning_rate=0.002",  # a larger one turns rounding into another choice of an expert within ten steps
)  # fmt: skip
DENSE = {
    "dense": ("model.num_layers=4",),
    "windows, grouped queries, soft caps, tied": (
        "model.num_layers=5", "model.num_kv_heads=3", "model.layer_types=[sliding_attention,full_attention]",
        "model.sliding_window=5", "model.attn_logit_softcapping=20", "model.final_logit_softcapping=10",
        "model.tie_word_embeddings=true", "model.vocab_size=61", "model.post_norms=true",
    ),
    "learned positions, biases": (
        "model.num_layers=6", "model.positions=learned", "model.max_position_embeddings=24", "model.norm=layer_norm",
        "model.mlp=plain", "model.mlp_bias=true", "model.qkv_bias=true", "model.output_bias=true",
        "model.num_kv_heads=1", "train.z_loss=0.001",
    ),
}  # fmt: skip
MIXTURES = {
    "mixture": (
        "model.num_layers=4", "model.num_kv_heads=6", "model.qk_norm=true",
        "model.moe={num_experts: 12, num_experts_per_tok: 3, moe_intermediate_size: 24, router_aux_loss_coef: 0.01}",
    ),
    "mixture after a dense layer": (
        "model.num_layers=5",
        "model.moe={num_experts: 6, num_experts_per_tok: 2, moe_intermediate_size: 24, n_shared_experts: 1, "
        "scoring_func: sigmoid, balance_bias: true, first_k_dense_replace: 1, router_z_loss_coef: 0.001}",
    ),
}  # fmt: skip


def factors(number: int) -> list[int]:
    return next(([p, *factors(number // p)] for p in range(2, number + 1) if number % p == 0), [])


def draw(seed: int) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """(layout, shape of the model, whether documents are packed)."""
    pick = random.Random(seed)
    name, shape = pick.choice([*DENSE.items(), *MIXTURES.items()])
    axes = ["data", "fsdp", "tensor", "context", "pipeline", *(["expert"] if name in MIXTURES else [])]
    degrees = dict.fromkeys(axes, 1)
    for factor in factors(pick.choice([8, 8, 8, 6, 6, 3])):
        degrees[pick.choice(axes)] *= factor
    layout = [f"parallel.{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
    rows = ROWS // (degrees["data"] * degrees["fsdp"] * degrees.get("expert", 1))
    pieces = [m for m in range(1, rows + 1) if rows % m == 0]
    if degrees["data"] > 1:
        layout.append(f"parallel.zero={pick.randrange(3)}")
    if degrees["tensor"] > 1 and pick.random() < 0.5:
        layout.append("parallel.sequence=true")
    if degrees["context"] > 1:
        layout.append(f"parallel.context_method={pick.choice(['auto', 'ring', 'all_gather', 'all_to_all'])}")
    if degrees["pipeline"] > 1:
        schedule = pick.choice(["gpipe", "1f1b", "interleaved", "zero_bubble"])
        fits = [m for m in pieces if schedule != "interleaved" or m % degrees["pipeline"] == 0]
        layout += [f"parallel.pipeline_schedule={schedule}", f"parallel.microbatches={pick.choice(fits or [1])}"]
    else:
        layout.append(f"train.gradient_accumulation={pick.choice(pieces[:3])}")
    layout.append(f"model.remat={pick.choice(['none', 'full', 'save_attention', 'save_dots', 'offload'])}")
    scan = "true" if pick.random() < 0.7 else "false"
    return tuple(layout), (*SIZES, *shape, f"model.scan_layers={scan}"), pick.random() < 0.8


@pytest.mark.parametrize("seed", range(60))
def test_a_random_layout_trains_as_one_device_or_is_refused_with_a_way_out(seed):
    layout, shape, packed = draw(seed)
    try:
        small_config(*shape, *layout)
    except ConfigError as refusal:
        assert re.search(r"nearest|that fit|leave|; use|; set", str(refusal)), str(refusal)
        return
    # In a mixture a rounding can choose another expert. Compiled as in a run layouts round more alike.
    with fully_optimized() if any("model.moe" in setting for setting in shape) else contextlib.nullcontext():
        assert_trains_as_one_device(*layout, shape=shape, packed=packed)
