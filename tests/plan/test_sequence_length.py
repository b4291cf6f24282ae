"""Longest sequences by the memory of the compiled step: context parallelism against tensor parallelism.

Li et al. 2021 (arXiv:2105.13120): a ring, and Linformer's projection over it, take sequences three times as long as
tensor parallelism does in the same memory, as tensor parallelism keeps the residual stream whole on every device.
"""

import functools

import jax
import pytest

from jaxstack.observe.what_ran import compiler_memory_estimate
from jaxstack.run_config import load_config
from tests.hopper_steps import compile_step

DEVICES = 8
LENGTH = 65536
MODEL = (
    "model.num_layers=32", "model.hidden_size=1024", "model.num_heads=16", "model.intermediate_size=2752",
    "model.vocab_size=8192", "model.remat=full", "train.global_batch_size=1", "data.packing=false",
    "precision.compute=bfloat16",
)  # fmt: skip
LAYOUTS = {
    "tensor": (f"parallel.tensor={DEVICES}",),
    "ring": (f"parallel.context={DEVICES}", "parallel.context_method=ring"),
    "projected": (f"parallel.context={DEVICES}", "model.attention={name: projected}"),
}


@functools.cache
def step_bytes(layout: str, length: int) -> int:
    """Bytes of a device for everything in a step on one sequence of this length."""
    sizes = (f"train.sequence_length={length}", f"model.max_position_embeddings={length}")
    _, compiled = compile_step(load_config(None, [*MODEL, *LAYOUTS[layout], *sizes]))
    return compiler_memory_estimate(compiled)["predicted_bytes"]


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
@pytest.mark.parametrize("layout", ["ring", "projected"])
def test_sequences_are_three_times_as_long_in_the_memory_of_tensor_parallelism(layout):
    assert step_bytes(layout, 3 * LENGTH) <= step_bytes("tensor", LENGTH)
