"""Devices work on the chunks of the gathered rows in an order in which nothing waits for what comes later."""

import pytest

from pallas_kernels.collective_matmul.chunk_order import chunk_gathered, chunk_scattered
from pallas_kernels.hopper.scheduler import TileOrder


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_own_rows_come_first_when_gathering_and_last_when_scattering(devices):
    for device in range(devices):
        gathered = [chunk_gathered(step, device, devices) for step in range(devices)]
        scattered = [chunk_scattered(step, device, devices) for step in range(devices)]
        assert gathered[0] == device and scattered[-1] == device
        assert sorted(gathered) == sorted(scattered) == list(range(devices))
    for step in range(devices - 1):  # A receiver's slot `step` gets the sums of one sender.
        assert len({chunk_scattered(step, device, devices) for device in range(devices)}) == devices


@pytest.mark.parametrize("running", [(1, 1, 1), (1, 4, 2), (3, 1, 4)])
def test_any_program_of_each_device_is_enough_for_all_tiles_to_be_scattered(running):
    """Programs claim tiles in order, hold one and the next, and stay at one of their own device until all sums came."""
    devices = len(running)
    rows = 3
    columns = 2
    order = TileOrder(rows, columns, 2, programs=1, chunks=devices)
    steps = [int(order.tile(i).chunk) for i in range(order.total)]
    claims = [iter(range(len(steps))) for _ in running]
    programs = [(device, [next(claims[device], None)]) for device, count in enumerate(running) for _ in range(count)]
    sent: set[tuple[int, int]] = set()
    computed: set[tuple[int, int]] = set()
    moved = True
    while moved:
        moved = False
        for device, held in programs:
            if held[0] is None:
                continue
            held.extend([next(claims[device], None)] if len(held) == 1 else [])
            step = steps[held[0]]
            within = held[0] % (rows * columns)
            senders = set(range(devices)) - {device}
            owner = int(chunk_scattered(step, device, devices))
            if owner == device and not all((sender, device * 100 + within) in sent for sender in senders):
                continue
            sent.add((device, owner * 100 + within))
            computed.add((device, held.pop(0)))
            moved = True
    assert len(computed) == devices * len(steps)
