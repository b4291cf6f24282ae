"""The overlap of communication and computation is read from the intervals of a trace."""

import pytest

from benchmarks.distributed.overlap import SERIAL, communicates, hidden_share, layout_work, overlap_of
from jaxstack.run_config import load_config

MILLISECOND = 1_000_000


def event(start: float, end: float, kernel: str) -> tuple[int, int, str, dict[str, str]]:
    return int(start * MILLISECOND), int(end * MILLISECOND), kernel, {"hlo_op": "", "name": ""}


def test_overlap_is_the_time_of_both_by_that_of_communication():
    events = [
        event(0, 4, "nvjet_hsh_128x256"),
        event(3, 7, "ncclDevKernel_AllGather_RING_LL"),
        event(6, 9, "loop_add_fusion"),
        event(8, 10, "MemcpyP2P"),
        event(8.5, 9.5, "ncclDevKernel_AllReduce_Sum"),
    ]
    found = overlap_of(events, steps=2)
    # Communication from 3 to 7 and 8 to 10, computation from 0 to 4 and 6 to 9: both from 3 to 4, 6 to 7 and 8 to 9.
    expected = {"communication": 3.0, "computation": 3.5, "overlapped": 1.5, "busy": 5.0, "overlap": 0.5}
    assert found == pytest.approx(expected)


def test_without_communication_there_is_no_share():
    assert "overlap" not in overlap_of([event(0, 1, "gemm")], steps=1)
    assert hidden_share({"busy": 1.0}, {"communication": 0.0, "computation": 1.0}) is None


def test_kernels_that_communicate_themselves_are_compared_with_the_serial_trace():
    serial = overlap_of([event(0, 8, "gemm"), event(8, 10, "nccl all_gather")], steps=1)
    assert serial["overlap"] == 0.0
    assert hidden_share(serial, serial) == 0.0
    fused = overlap_of([event(0, 8.5, "gather_matmul_kernel")], steps=1)
    assert hidden_share(fused, serial) == pytest.approx(0.75)
    assert hidden_share(overlap_of([event(0, 8, "gather_matmul")], steps=1), serial) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [("ncclDevKernel_ReduceScatter", True), ("MemcpyP2P", True), ("MemcpyD2D", False), ("cutlass_gemm", False)],
)
def test_which_kernels_communicate(kernel, expected):
    assert communicates(kernel, {}) is expected


@pytest.mark.parametrize("layout", SERIAL)
def test_the_works_are_valid_configurations(layout):
    name, overrides = layout_work(layout, 2, 4)
    settings = [value for value in (*overrides, *SERIAL[layout]) if not value.startswith("xla_")]
    config = load_config(None, settings)
    assert config.model.num_layers == 4 and f"{layout}2" in name and "of 4 layers" in name
    assert getattr(config.parallel, layout) == 2
