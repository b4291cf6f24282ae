"""Which tile of the product is computed when: arithmetic on indices, the same for traced and for plain integers.

The gathered rows lie in one chunk for each device of the axis. A device works on one chunk after the other, beginning
`first` devices after its own, so that all of them wait for (or send to) different devices at any time.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp


class Tile(NamedTuple):
    """A tile of the output: the chunk's place in the order, and block of rows and of columns within the chunk."""

    step: Any
    row: Any
    column: Any


def place(index: Any, rows: int, columns: int, group: int) -> Tile:
    """The `index`-th tile of chunks of `rows` x `columns` tiles.

    Within a chunk `group` rows of tiles are walked column by column: tiles computed at one time then share their
    operands in the L2 cache.
    """
    step, within = index // (rows * columns), index % (rows * columns)
    band, in_band = within // (group * columns), within % (group * columns)
    height = jnp.minimum(group, rows - band * group)
    return Tile(step, band * group + in_band % height, in_band // height)


def count_for(program: Any, programs: int, tiles: int) -> Any:
    """How many of the tiles program, program + programs, ... there are."""
    return (tiles - 1 - program) // programs + 1


def chunk_gathered(step: Any, device: Any, devices: int) -> Any:
    """The device whose rows `device` multiplies at `step`: its own first, they need not travel."""
    return (device + step) % devices


def chunk_scattered(step: Any, device: Any, devices: int) -> Any:
    """The device for which `device` computes rows at `step`: itself last, when the others' sums have arrived."""
    return (device + 1 + step) % devices
