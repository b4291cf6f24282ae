"""The FP8 train step compiled for H200s: every matmul that should be in FP8 is, and FSDP moves FP8 bytes."""

import jax
import pytest

from jaxstack.observe.collectives import Collective, collectives
from jaxstack.observe.what_ran import refuse_fallbacks
from jaxstack.trainer import Trainer
from tests.hopper_steps import compile_step
from tests.small_runs import small_config

pytestmark = pytest.mark.compiles_for_gpu

LAYERS = 2
D = 512
HEADS = 4
KV_HEADS = 2
H = 128
F = 1024
SHAPE = (
    f"model.num_layers={LAYERS}", f"model.hidden_size={D}", f"model.num_heads={HEADS}", "model.vocab_size=4096",
    f"model.num_kv_heads={KV_HEADS}", f"model.head_dim={H}", f"model.intermediate_size={F}",
    "train.sequence_length=256", "train.global_batch_size=8",
)  # fmt: skip
LAYER = 2 * D * HEADS * H + 2 * D * KV_HEADS * H + 3 * D * F
MATMULS = 3 * 7 * LAYERS
BLOCKWISE_MATMULS = MATMULS - 3 * LAYERS  # The gradients of the inputs of q, k, v and of gate, up are one matmul each.
needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")


def compiled(*overrides: str) -> tuple[Trainer, list[Collective]]:
    trainer, program = compile_step(small_config(*SHAPE, *overrides))
    return trainer, collectives(program.as_text() or "", dict(trainer.rules.mesh.shape))


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (("precision.fp8=current", "model.scan_layers=false"), MATMULS),
        pytest.param(
            ("precision.fp8=delayed", "train.gradient_accumulation=2"), 2 * MATMULS, marks=pytest.mark.exhaustive
        ),
        pytest.param(("precision.fp8=blockwise",), BLOCKWISE_MATMULS, marks=[pytest.mark.exhaustive, needs_mosaic]),
    ],
    ids=str,
)
def test_every_matmul_of_the_layers_is_in_fp8(overrides, count):
    ran = compiled(*overrides)[0].describe()["matmuls"]
    assert ran["fp8"] == ran["fp8_expected"] == count < ran["all"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["current", pytest.param("blockwise", marks=needs_mosaic)])
def test_fsdp_gathers_fp8_bytes(recipe):
    """A byte a weight forward and again backward, beside four bytes of a scale for 128 x 128 (blockwise)."""
    trainer, rows = compiled(f"precision.fp8={recipe}", "parallel.fsdp=4")
    ran = trainer.describe()["matmuls"]
    assert ran["fp8"] == ran["fp8_expected"] == (BLOCKWISE_MATMULS if recipe == "blockwise" else MATMULS)
    gathers = [row for row in rows if row.kind == "all-gather"]
    gathered = [row for row in gathers if "f8e4m3fn" in row.dtype]
    assert all("f8e4m3fn" in row.dtype for row in gathers if row.in_loop)
    scales = LAYER // 128**2 * 4 if recipe == "blockwise" else 0
    assert sum(row.payload_bytes * row.calls for row in gathered) == 2 * LAYERS * (LAYER + scales)
    small = [row for row in rows if row.kind == "all-reduce" and row.in_loop]
    assert sum(row.payload_bytes for row in small) < 4 * (3 * D), "maxima of weights, gradients of the norms"


EXPERT_MATMULS = 8 * LAYERS
"""Of a layer: three products, three gradients of weights, one of the input of gate and up, and one of that of down."""


@pytest.mark.exhaustive
@needs_mosaic
@pytest.mark.parametrize(
    "layout",
    [
        (),
        *(
            pytest.param(axes, marks=pytest.mark.exhaustive)
            for axes in (
                ("parallel.expert=4",),
                ("parallel.expert=2", "parallel.tensor=2", "parallel.sequence=true"),
                ("parallel.fsdp=2", "parallel.context=2"),
            )
        ),
    ],
    ids=str,
)
def test_experts_are_in_fp8(layout):
    mixture = "model.moe={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 256}"
    attention = '{path: "attention", fp8: false}'
    trainer, _ = compiled(mixture, "precision.fp8=blockwise", f"precision.fp8_rules=[{attention}]", *layout)
    ran = trainer.describe()
    assert ran["matmuls"]["fp8_expected"] == EXPERT_MATMULS
    # Further rounds of an exchange compute them again.
    rounds = "parallel.expert" in str(layout)
    assert ran["matmuls"]["fp8"] > EXPERT_MATMULS if rounds else ran["matmuls"]["fp8"] == EXPERT_MATMULS
    refuse_fallbacks(trainer.choices)
