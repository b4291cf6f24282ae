"""Order in which a device works on the chunks of the gathered rows: arithmetic on traced or plain integers.

The gathered rows lie in one chunk for each device of the axis. Every device works on one chunk after the other, and
each begins at another chunk, so that the devices wait for (or send to) different devices at any time.
"""

from pallas_kernels.mosaic_api import Index


def chunk_gathered(step: Index, device: Index, devices: int) -> Index:
    """Return the device whose rows `device` multiplies at `step`: its own first, which need not travel."""
    return (device + step) % devices


def chunk_scattered(step: Index, device: Index, devices: int) -> Index:
    """Return the device for which `device` computes rows at `step`: itself last, when the others' sums are there."""
    return (device + 1 + step) % devices
