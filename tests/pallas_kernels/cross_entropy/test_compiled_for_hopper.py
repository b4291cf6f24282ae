"""What XLA makes of the chunked head and loss for an H200: its matmuls, what travels through memory, its memory."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import linear_cross_entropy, linear_cross_entropy_sum, lowering_platform
from tests.hopper import compile_for_hopper

pytestmark = pytest.mark.compiles_for_gpu

D = 4096
V = 128256
_MATMUL = re.compile(r'custom_call_target="__cublas\$')


@functools.cache
def compiled(form: Any, sequences: int, weight: str, soft_cap: float | None = None, triton: bool = False) -> Any:
    """Loss and gradients of sequences of 4096 tokens, with cuBLAS's matmuls, or with XLA's own by Triton."""
    arrays = (
        jax.ShapeDtypeStruct((sequences, 4096, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((D, V), weight),
        jax.ShapeDtypeStruct((sequences, 4096), jnp.int32),
    )

    def total(*arrays):
        return form(*arrays, soft_cap=soft_cap, implementation="xla").sum()

    with lowering_platform("cuda", compute_capability=(9, 0)):
        gradients = jax.value_and_grad(total, argnums=(0, 1))
        return compile_for_hopper(gradients, *arrays, options={"xla_gpu_enable_triton_gemm": triton})


def extra_bytes(*arguments: Any) -> int:
    return compiled(*arguments).memory_analysis().temp_size_in_bytes


def loops(*arguments: Any) -> list[str]:
    """The text of each computation that has matmuls: the chunks of one size, and those of the other."""
    blocks = re.split(r"\n(?=\S)", compiled(*arguments).as_text())
    return [block for block in blocks if _MATMUL.search(block)]


def test_three_matmuls_a_chunk_and_the_sum_inside_of_one():
    for block in loops(linear_cross_entropy_sum, 8, "bfloat16"):
        matmuls = [line for line in block.splitlines() if _MATMUL.search(line)]
        assert len(matmuls) == 3
        assert sum("output_to_operand_aliasing" in line for line in matmuls) == 1, "the sum of the weight's gradient"
        assert not re.search(rf"= \w+\[{D},{V}\]\S* (add|copy)\(", block)


@pytest.mark.exhaustive
def test_the_per_token_form_computes_the_logits_again():
    counts = [len(_MATMUL.findall(block)) for block in loops(linear_cross_entropy, 8, "bfloat16")]
    assert sum(counts) == 2 * 4, "chunks of two sizes"


@pytest.mark.parametrize("form", [linear_cross_entropy_sum, linear_cross_entropy], ids=["sum", "per_token"])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_less_than_a_gibibyte_beside_inputs_and_outputs(form, soft_cap):
    assert extra_bytes(form, 8, "bfloat16", soft_cap) < 0.85 * 2**30


@pytest.mark.exhaustive
def test_less_than_a_gibibyte_whichever_matmuls_the_autotuner_takes():
    assert extra_bytes(linear_cross_entropy_sum, 8, "bfloat16", None, True) < 0.85 * 2**30


def test_a_float32_weight_costs_its_copy_in_bfloat16_beside():
    assert extra_bytes(linear_cross_entropy_sum, 8, "float32") < 0.85 * 2**30 + 2 * D * V


def test_memory_does_not_grow_with_the_tokens():
    once, twice = (extra_bytes(linear_cross_entropy_sum, sequences, "float32") for sequences in (8, 16))
    assert twice <= once + 2**20 * 64


def test_logits_are_read_twice_and_written_twice():
    """A chunk's matmul writes them, one reduction reads them, and the gradient takes their place; all in bfloat16."""
    text = compiled(linear_cross_entropy_sum, 8, "bfloat16").as_text()
    assert not re.search(rf"= f32\[[\d,]*{V}\]\S* (fusion|custom-call)\(", text)
    for block in loops(linear_cross_entropy_sum, 8, "bfloat16"):
        assert len(re.findall(r" = \(f32\[[\d,]+\]\S* f32\[[\d,]+\]\S* f32\[[\d,]+\]\S*\) fusion\(", block)) == 1
        assert not re.search(rf"= bf16\[[\d,]*{V}\]\S* fusion\(%", block), "in a loop of its own, in place"
