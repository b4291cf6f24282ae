"""The FP8 train step compiled for H200s: every matmul that should be in FP8 is, and FSDP moves FP8 bytes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.feed import abstract_batch
from jaxstack.loss import language_model_loss
from jaxstack.models import Transformer, in_fp8
from jaxstack.observe.collectives import Collective, collectives
from jaxstack.parallel import make_mesh, make_rules
from jaxstack.trainer import Trainer
from pallas_kernels import lowering_platform
from tests.compilation import fully_optimized
from tests.hopper import hopper_topology
from tests.small_runs import small_config

LAYERS, D, HEADS, KV_HEADS, H, F = 2, 512, 4, 2, 128, 1024
SHAPE = (
    f"model.num_layers={LAYERS}", f"model.hidden_size={D}", f"model.num_heads={HEADS}", "model.vocab_size=4096",
    f"model.num_kv_heads={KV_HEADS}", f"model.head_dim={H}", f"model.intermediate_size={F}",
    "train.sequence_length=256", "train.global_batch_size=8",
)  # fmt: skip
LAYER = 2 * D * HEADS * H + 2 * D * KV_HEADS * H + 3 * D * F
MATMULS = 3 * 7 * LAYERS
needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")


@fully_optimized()
def compiled(*overrides: str) -> tuple[Trainer, list[Collective]]:
    config = small_config(*SHAPE, *overrides)
    mesh = make_mesh(config.parallel, hopper_topology(math.prod(config.parallel.degrees.values())).devices)
    trainer = Trainer(
        lambda rngs: in_fp8(Transformer(config.model, rngs, dtype=jnp.bfloat16), config.precision),
        language_model_loss,
        lambda step: None,
        optimizer=config.optimizer,
        schedule=config.schedule,
        mesh=make_rules(mesh),
        train=config.train,
    )
    rows, length = config.train.global_batch_size, config.train.sequence_length
    host = {name: np.zeros((rows, length), np.int32) for name in ("tokens", "labels", "segment_ids")}
    with lowering_platform("cuda", compute_capability=(9, 0)):
        text = trainer.compile(abstract_batch(host, trainer.rules, rows)).as_text()
    return trainer, collectives(text or "", dict(mesh.shape))


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (("precision.fp8=current", "model.scan_layers=false"), MATMULS),
        pytest.param(("precision.fp8=delayed", "train.gradient_accumulation=2"), 2 * MATMULS, marks=pytest.mark.slow),
        pytest.param(("precision.fp8=blockwise",), MATMULS, marks=[pytest.mark.slow, needs_mosaic]),
    ],
    ids=str,
)
def test_every_matmul_of_the_layers_is_in_fp8(overrides, count):
    ran = compiled(*overrides)[0].describe()["matmuls"]
    assert ran["fp8"] == ran["fp8_expected"] == count < ran["all"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", pytest.param("blockwise", marks=needs_mosaic)])
def test_fsdp_gathers_fp8_bytes(recipe):
    """A byte a weight forward and again backward, beside four bytes of a scale for 128 x 128 (blockwise)."""
    trainer, rows = compiled(f"precision.fp8={recipe}", "parallel.fsdp=4")
    ran = trainer.describe()["matmuls"]
    assert ran["fp8"] == ran["fp8_expected"] == MATMULS
    gathers = [row for row in rows if row.kind == "all-gather"]
    gathered = [row for row in gathers if "f8e4m3fn" in row.dtype]
    assert all("f8e4m3fn" in row.dtype for row in gathers if row.in_loop)
    scales = LAYER // 128**2 * 4 if recipe == "blockwise" else 0
    assert sum(row.payload_bytes * row.calls for row in gathered) == 2 * LAYERS * (LAYER + scales)
    small = [row for row in rows if row.kind == "all-reduce" and row.in_loop]
    assert sum(row.payload_bytes for row in small) < 4 * (3 * D), "maxima of weights, gradients of the norms"
