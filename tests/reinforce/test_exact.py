"""`rollout.engine.exact`: log-probabilities of sampled tokens have the same bits in the sampler and in the trainer."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.reinforce.exact import inexact_part
from pallas_kernels.batch_invariant.attention import kernel_problem
from pallas_kernels.target import lowering_platform
from tests.reinforce.conftest import metrics_of
from tests.reinforce.exact_runs import compare, sample, spread
from tests.small_runs import make_trainer, small_config

DENSE = ("model.num_kv_heads=2", "model.qk_norm=true")
MIXTURE = (
    "model.moe={num_experts: 8, num_experts_per_tok: 2, first_k_dense_replace: 1, n_shared_experts: 1}",
    "model.tie_word_embeddings=true",
)


@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_bits_of_sampler_and_trainer_are_equal(dtype, model):
    trainer = spread(make_trainer(small_config(*model), dtype=dtype))
    prompts, answers = sample(trainer, exact=True)
    assert len({len(answer.tokens) for answer in answers}) > 1
    difference, exact = compare(trainer, prompts, answers, exact=True)
    assert difference.size and not difference.any(), np.abs(difference).max()
    usual_difference, usual = compare(trainer, prompts, answers, exact=False)
    assert usual_difference.any(), "without it they differ"
    if dtype == jnp.float32:
        for one, other in zip(jax.tree.leaves(exact), jax.tree.leaves(usual), strict=True):
            assert jnp.linalg.norm(one - other) <= 1e-4 * jnp.linalg.norm(other)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("model.qk_norm=all_heads", "model.qk_norm=all_heads"),
        ("model.attention={name: linear}", "attention.name linear"),
        ("model.moe={num_experts: 4, capacity_factor: 1.5}", "model.moe.capacity_factor"),
        (MIXTURE[0], None),
    ],
)
def test_models_with_other_operations_are_told(setting, part):
    assert inexact_part(small_config(setting).model) == part


@pytest.mark.parametrize(
    ("width", "dtype", "rule"),
    [
        (
            64,
            jnp.float32,
            "needs queries, keys and values in bfloat16 or float16, or keys and values in FP8; got float32 and float32",
        ),
        (48, jnp.bfloat16, "needs a head_dim of 32, 64, 128 or 256; got 48"),
        (64, jnp.bfloat16, None),
    ],
)
def test_a_gpu_refuses_what_its_kernel_does_not_compute(width, dtype, rule):
    """Otherwise a loop that is slower by far would compute it, without a word."""
    pytest.importorskip("jax_triton")
    model = small_config(f"model.head_dim={width}").model
    assert kernel_problem(model.width_per_head, dtype) is None, "on a CPU a loop computes all"
    with lowering_platform("cuda"):
        assert kernel_problem(model.width_per_head, dtype) == rule


@pytest.mark.longer
def test_a_run_has_no_difference(folder):
    """In bfloat16, by the command: the metric is 0 in every step."""
    overrides = (
        "run.name=exact",
        "parallel.fsdp=1",
        "parallel.data=1",
        "precision.compute=bfloat16",
        "rollout.engine.exact=true",
    )
    command = [sys.executable, "-m", "jaxstack.reinforce", "--config", str(folder / "grpo.yaml"), *overrides]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [line for line in metrics_of(folder / "exact") if "reward" in line]
    assert [line["sampler_logprob_difference"] for line in steps] == [0.0] * 4
