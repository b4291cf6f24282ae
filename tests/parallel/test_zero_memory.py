"""ZeRO's table of bytes (Rajbhandari et al. 2020, figure 1) against the step compiled for H200s, with Adam."""

import functools

import pytest

from jaxstack.run_config import RunConfig, load_config
from tests.hopper_steps import compile_step

DEVICES = 64
WIDTH = 4096
LAYERS = 36
VOCABULARY = 50304
MODEL = (
    f"model.hidden_size={WIDTH}", f"model.num_layers={LAYERS}", "model.num_heads=32", "model.intermediate_size=10944",
    f"model.vocab_size={VOCABULARY}", "model.tie_word_embeddings=true", "model.remat=full", "model.scan_layers=true",
    "train.sequence_length=64", f"train.global_batch_size={DEVICES}", "precision.compute=bfloat16",
)  # fmt: skip
"""7.46 billion parameters, and hardly any activations."""
LAYOUTS = {
    "data": (f"parallel.data={DEVICES}",),
    "zero 1": (f"parallel.data={DEVICES}", "parallel.zero=1"),
    "zero 2": (f"parallel.data={DEVICES}", "parallel.zero=2"),
    "fsdp": (f"parallel.fsdp={DEVICES}",),
}
PUBLISHED = {"data": 120.0, "zero 1": 31.4, "zero 2": 16.6, "fsdp": 1.9}
"""Stage -> the paper's gigabytes a device."""
WITHIN_STEP = {"data": (0.0, 4.0), "zero 1": (4.0, 0.0), "zero 2": (2.0, 2.0), "fsdp": (0.0, 4.0)}
"""Stage -> bytes a parameter within a step: whole on each device, and divided over those that share the state.

The paper's 16-bit weights and gradients; without a working copy of all weights the gradients are float32 instead.
"""


def config_of(stage: str) -> RunConfig:
    return load_config(None, [*MODEL, *LAYOUTS[stage]])


@functools.cache
def compiled_bytes(stage: str) -> tuple[int, int, int]:
    """(parameters, bytes of the state and the batch on a device, bytes of temporaries)."""
    trainer, compiled = compile_step(config_of(stage))
    memory = compiled.memory_analysis()
    return trainer.count_parameters(), memory.argument_size_in_bytes, memory.temp_size_in_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", LAYOUTS)
def test_the_compiled_step_takes_what_the_table_says(stage):
    """Beside the table a step has the buffers of a layer and of the embedding, and whole vectors."""
    count, state, temporary = compiled_bytes(stage)
    parts = 1 if stage == "data" else DEVICES
    vectors = 12 * (2 * LAYERS + 1) * WIDTH
    assert state == pytest.approx(12 * count / parts + vectors, rel=0.01)
    whole, divided = WITHIN_STEP[stage]
    layer = (count - VOCABULARY * WIDTH) / LAYERS
    # A layer's gathered weights and gradients in two dtypes, and the same of the embedding.
    beside = 12 * layer + 8 * VOCABULARY * WIDTH
    expected = count * (whole + divided / parts)
    assert (12 * count / parts + expected) / 1e9 == pytest.approx(PUBLISHED[stage], rel=0.02)
    assert 0.95 * expected <= temporary <= expected + beside
