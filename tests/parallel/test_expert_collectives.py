"""What a mixture of experts sends: the collectives of the whole train step, compiled for four H200s."""

import functools
from collections import Counter

import pytest

from jaxstack.models.moe.exchange import count_buffer_rows
from jaxstack.observe.collectives import Collective, collectives
from jaxstack.observe.what_ran import refuse_fallbacks
from tests.hopper_steps import compile_step
from tests.parallel.test_step_collectives import SHAPE, B, T, V, compiled_for_hopper
from tests.small_runs import small_config

LAYERS = 3
D = 256
F = 128
E = 8
K = 2
MIXTURE = (
    *SHAPE,
    f"model.moe={{num_experts: {E}, num_experts_per_tok: {K}, moe_intermediate_size: {F}}}",
)
KERNELS = 3 * E * D * F
"""Weights of all experts of a layer."""


@functools.cache
def rows(*overrides: str) -> list[Collective]:
    return compiled_for_hopper(*MIXTURE, *overrides)[0]


def total(kind: str, *overrides: str, dtype: str = "bf16", **wanted) -> int:
    found = [row for row in rows(*overrides) if row.kind == kind and row.dtype == dtype]
    found = [row for row in found if all(getattr(row, name) == value for name, value in wanted.items())]
    return sum(row.payload_bytes * row.calls for row in found)


def exchanged(devices: int, degree: int, factor: float) -> int:
    """Bytes of one exchange of rows: tokens there, results back, or a gradient of either."""
    assignments = B * T * K // devices
    return degree * count_buffer_rows(assignments, degree, factor, assignments) * D * 2


@pytest.mark.parametrize(
    ("overrides", "degree"),
    [
        (("parallel.expert=4",), 4),
        pytest.param(("parallel.data=2", "parallel.expert=2"), 2, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive
def test_an_exchange_sends_the_formula_s_bytes(overrides, degree):
    """There and back, forward and backward, and there once more as `remat: full` computes the layer again."""
    enough = (*overrides, f"model.moe.exchange_factor={degree}")
    one = exchanged(4, degree, degree)
    assert one == B * T * K // 4 * degree * D * 2, "with the largest factor, all assignments to each device"
    assert total("all-to-all", *enough, axes=("expert",)) == LAYERS * (2 + 2 + 1) * one
    assert total("all-to-all", *enough) == total("all-to-all", *enough, axes=("expert",))


@pytest.mark.exhaustive
def test_two_devices_exchange_rows_and_no_operation_falls_back():
    """A step for two H200s, with our grouped matmul: nothing is refused under `observe.fail_on_fallback`."""
    trainer, compiled = compile_step(small_config(*MIXTURE, "parallel.expert=2", "model.moe.exchange_factor=2"))
    refuse_fallbacks(trainer.choices)
    assert {choice.backend for choice in trainer.choices if choice.operation == "grouped_matmul"} == {"mosaic"}
    found = [row for row in collectives(compiled.as_text(), dict(trainer.rules.mesh.shape)) if row.dtype == "bf16"]
    sent = sum(row.payload_bytes * row.calls for row in found if row.kind == "all-to-all")
    assert sent == LAYERS * (2 + 2 + 1) * exchanged(2, 2, 2)


@pytest.mark.exhaustive
def test_bounded_buffers_send_less():
    found = Counter(
        row.payload_bytes for row in rows("parallel.expert=4") if row.kind == "all-to-all" and row.dtype == "bf16"
    )
    assert set(found) == {exchanged(4, 4, 1.5)}
    assert exchanged(4, 4, 1.5) * 4 < 1.1 * 1.5 * exchanged(4, 4, 4)


def test_expert_weights_stay_where_they_are():
    """No gather and no reduction of them along `expert`; the other weights are reduced as over `data`."""
    over = ("parallel.expert=4", "model.moe.exchange_factor=4")
    assert {row.kind for row in rows(*over)} == {"all-to-all", "all-reduce"}
    reduced = sum(row.payload_bytes * row.calls for row in rows(*over) if row.kind == "all-reduce" and row.in_loop)
    attention = 4 * D * 8 * 64
    assert reduced <= LAYERS * 4 * (attention + D * E + 2 * D) + 4096


@pytest.mark.exhaustive
def test_fsdp_gathers_a_device_s_own_experts_in_bfloat16():
    over = ("parallel.fsdp=2", "parallel.expert=2", "model.moe.exchange_factor=2")
    matrices = KERNELS // 2 + 4 * D * 8 * 64
    router = D * E
    ends = 2 * V * D
    gathered = 2 * LAYERS * (2 * matrices + 4 * router) + 2 * ends
    summed = 4 * (LAYERS * (matrices + router) + ends)
    moved = {kind: [row for row in rows(*over) if row.kind == kind] for kind in ("all-gather", "reduce-scatter")}
    sizes = {kind: sum(row.payload_bytes * row.calls for row in found) for kind, found in moved.items()}
    # The router alone is gathered in float32. Layers are gathered forward, and again in the backward; gradients are
    # summed in float32, as `precision.reduce` says.
    assert sizes == {"all-gather": gathered, "reduce-scatter": summed}
    assert {row.axes for found in moved.values() for row in found} == {("fsdp",)}
