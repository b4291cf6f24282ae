"""The whole train step of a pipeline, compiled for four H200s: what it sends, what overlaps, what it keeps."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.data.device_batches import abstract_batch
from jaxstack.observe.collectives import Collective, collectives
from pallas_kernels import lowering_platform
from tests.compilation import fully_optimized
from tests.hopper import hopper_topology
from tests.small_runs import make_trainer, small_config

pytestmark = pytest.mark.exhaustive
needs_newer_xla = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 copies them")

STAGES = 4
T = 256
D = 256
F = 512


@functools.cache
@fully_optimized()
def compiled(schedule: str, microbatches: int, remat: str = "full", layers: int = 8) -> tuple[Any, dict[str, int]]:
    """The step with microbatches of two rows, and the mesh."""
    rows = 2 * microbatches
    config = small_config(
        f"model.num_layers={layers}", f"model.hidden_size={D}", "model.num_heads=4", f"model.intermediate_size={F}",
        "model.vocab_size=4096", f"model.remat={remat}", f"train.sequence_length={T}",
        f"train.global_batch_size={rows}", f"parallel.pipeline={STAGES}", f"parallel.pipeline_schedule={schedule}",
        f"parallel.microbatches={microbatches}",
    )  # fmt: skip
    trainer = make_trainer(config, devices=hopper_topology(STAGES).devices, dtype=jnp.bfloat16)
    host = {name: np.zeros((rows, T), np.int32) for name in ("tokens", "labels", "segment_ids")}
    with lowering_platform("cuda", compute_capability=(9, 0)):
        return trainer.compile(abstract_batch(host, trainer.rules, rows)), dict(trainer.rules.mesh.shape)


def rows_of(schedule: str, microbatches: int) -> list[Collective]:
    program, mesh = compiled(schedule, microbatches)
    return collectives(program.as_text(), mesh)


def temporary_bytes(schedule: str, microbatches: int) -> int:
    return compiled(schedule, microbatches)[0].memory_analysis().temp_size_in_bytes


def test_a_microbatch_of_the_residual_stream_travels_each_way_and_overlaps():
    """2 b s h bytes a boundary, microbatch and direction (Narayanan et al. 2021), in bfloat16."""
    up, down = (row for row in rows_of("1f1b", 8) if row.kind == "collective-permute")
    for row in (up, down):
        assert (row.dtype, row.payload_bytes, row.axes) == ("bf16", 2 * 2 * T * D, ("pipeline",))
        assert row.calls == 8 + 2 * (STAGES - 1) + 1, "once a tick"
        assert row.asynchronous


def test_embedding_and_head_are_gathered_and_scattered_once_a_step():
    rows = [row for row in rows_of("1f1b", 8) if row.kind != "collective-permute"]
    assert {row.kind for row in rows if row.payload_bytes > 16 * D} == {"all-gather", "reduce-scatter"}
    assert not any(row.in_loop for row in rows)


def test_memory_of_1f1b_does_not_grow_with_the_microbatches_and_that_of_gpipe_does():
    assert temporary_bytes("1f1b", 16) <= 1.02 * temporary_bytes("1f1b", 8)
    assert temporary_bytes("gpipe", 32) > 1.1 * temporary_bytes("gpipe", 8)
    assert temporary_bytes("1f1b", 16) < temporary_bytes("gpipe", 16)


WAITING = (2 * STAGES - 1) * (8 // STAGES) * 2 * 2 * T * D
"""Bytes of the inputs of layers that wait for their backward pass."""


def test_the_inputs_of_layers_wait_in_host_memory():
    assert compiled("1f1b", 8, "offload")[0].memory_analysis().host_temp_size_in_bytes >= WAITING


@needs_newer_xla
def test_inputs_in_host_memory_take_none_of_the_devices():
    memory = compiled("1f1b", 8, "offload")[0].memory_analysis()
    assert temporary_bytes("1f1b", 8) - memory.temp_size_in_bytes > 0.8 * WAITING


def test_zero_bubble_keeps_the_operands_of_waiting_weight_gradients_once():
    """Of each layer its two normed inputs, attention's output, the MLP's product, and the seven matmuls' gradients."""
    layers = 8 // STAGES
    tokens = 2 * T
    operands = 2 * (3 * D + F) + 2 * (3 * D + D + 2 * F + D)
    waiting = (2 * STAGES - 1) * layers * tokens * operands
    assert temporary_bytes("zero_bubble", 8) - temporary_bytes("1f1b", 8) < 1.15 * waiting


@pytest.mark.parametrize("layers", [pytest.param(8, marks=needs_newer_xla), 16])
def test_interleaved_stages_multiply_by_the_weights_where_they_are(layers):
    program, _ = compiled("interleaved", 8, "none", layers)
    # XLA's own kernels; in its dynamic-slice fusions, of kind kCustom, a matmul reads the slice in place.
    made = re.findall(r"%(\S*slice\S*) = \w+\[([\d,]+)\]\S* fusion\(.*kind=kLoop", program.as_text())
    weights = {f"{dim},{other}" for dim in (D, F) for other in (D, F)}
    assert not [name for name, shape in made if shape.removeprefix("1,") in weights]
