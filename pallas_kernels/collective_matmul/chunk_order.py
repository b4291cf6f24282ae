"""Order in which a device multiplies the rows that belong to each device of the axis, one chunk of rows per device.

The gathered rows lie in one chunk for each device of the axis. Every device works on one chunk after the other, and
each begins at another chunk, so that the devices wait for (or send to) different devices at any time.
"""

from pallas_kernels.mosaic_api import Index


def chunk_gathered(step: Index, device: Index, devices: int) -> Index:
    """Return whose rows `device` multiplies at `step` of a matmul with all-gather: its own first, as they are there."""
    return (device + step) % devices


def chunk_scattered(step: Index, device: Index, devices: int) -> Index:
    """Return for whom `device` computes rows at `step` of a matmul with reduce-scatter: for itself last."""
    return (device + 1 + step) % devices
