"""Order in which a device multiplies the chunks of rows (one per device): each device starts at a different chunk.

The gathered rows lie in one chunk for each device of the axis. Every device works on one chunk after the other, and
each begins at another chunk, so that the devices wait for (or send to) different devices at any time.
"""

from pallas_kernels.mosaic_api import Index


def chunk_gathered(step: Index, device: Index, devices: int) -> Index:
    """Return the index of the device whose rows `device` multiplies at a step of an all-gather matmul: itself first."""
    return (device + step) % devices


def chunk_scattered(step: Index, device: Index, devices: int) -> Index:
    """Return the index of the device whose rows `device` computes at a step of a matmul-reduce-scatter: itself last."""
    return (device + 1 + step) % devices
