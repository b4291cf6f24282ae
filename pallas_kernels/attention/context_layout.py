"""Assigns the chunks of a sequence to the devices of a mesh axis, and transfers chunks between devices.

With n devices and the layout "contiguous", device i holds the i-th of n chunks. With "zigzag" it holds chunks i and
2n-1-i of 2n, in this order: all devices then have the same work under a causal mask. (Striped Attention, Brandon et
al., arXiv:2311.09431, balances it by interleaving tokens; two chunks keep tiles whole, as in Llama 3,
arXiv:2407.21783.)
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int

from pallas_kernels.target import current_target

LAYOUTS = ("zigzag", "contiguous")
LINK_BANDWIDTH = 300e9
"""Bytes per second that a device sends to another one of its host, by NVLink."""
NETWORK_BANDWIDTH = 50e9
"""Bytes per second that a device sends to one of another host, by InfiniBand."""


def chunks_per_device(layout: str) -> int:
    """Return how many chunks of the sequence each device holds: two in the zigzag layout, one in the contiguous one.

    Raises:
        ValueError: the layout is unknown.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    return 2 if layout == "zigzag" else 1


def chunk_order(devices: int, layout: str = "zigzag") -> list[int]:
    """Return the indices of the sequence's chunks in device order, e.g. [0, 3, 1, 2] for 2 devices in zigzag layout."""
    if chunks_per_device(layout) == 1:
        return list(range(devices))
    return [chunk for device in range(devices) for chunk in (device, 2 * devices - 1 - device)]


def sequence_order(length: int, devices: int, layout: str = "zigzag") -> Int[np.ndarray, " T"]:
    """Return the permutation [T] of token positions that puts a sequence into the order of the devices' shards.

    `x[:, sequence_order(T, n)]`, sharded evenly over n devices, is a sequence x [B, T, ...] in this layout.

    Args:
        length: T, the length of the whole sequence.
        devices: size of the mesh axis that the sequence is sharded over.
        layout: "zigzag" or "contiguous".

    Raises:
        ValueError: the layout is unknown, or the length is not divisible by the number of chunks.
    """
    chunks = devices * chunks_per_device(layout)
    if length % chunks:
        below = length // chunks * chunks
        raise ValueError(
            f"the length ({length}) must be divisible by {chunks // devices} x {devices} devices ({chunks}) in the "
            f"layout {layout!r}; nearest: {f'{below} or ' if below else ''}{below + chunks}"
        )
    return np.arange(length).reshape(chunks, -1)[chunk_order(devices, layout)].reshape(-1)


def own_chunks(axis_name: str, layout: str) -> list[jax.Array]:
    """Return the (traced) indices of the sequence's chunks that this device holds, in the order of its shard."""
    index = lax.axis_index(axis_name)
    devices = lax.axis_size(axis_name)
    return [index, 2 * devices - 1 - index][: chunks_per_device(layout)]


def split(x: jax.Array, layout: str, dim: int = 1) -> list[jax.Array]:
    """Split this device's shard of a sequence into its chunks: two in the zigzag layout, else one."""
    return jnp.split(x, chunks_per_device(layout), axis=dim)


def permute(x: jax.Array, axis_name: str, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Send x between devices by (source, destination) pairs, like `lax.ppermute`; devices without a source get zeros.

    On XLA's CPU backend a collective permute waits for devices that took another branch of a conditional, as pipeline
    stages do, and hangs or mixes up messages. There an all-gather replaces it, and each device selects its part.
    """
    if current_target().platform != "cpu":
        return lax.ppermute(x, axis_name, list(pairs))
    table = np.full(lax.axis_size(axis_name), -1)
    for sender, receiver in pairs:
        table[receiver] = sender
    sender = jnp.asarray(table)[lax.axis_index(axis_name)]
    found = lax.dynamic_index_in_dim(lax.all_gather(x, axis_name), jnp.maximum(sender, 0), keepdims=False)
    return jnp.where(sender >= 0, found, jnp.zeros_like(found))


def receive_from_previous(x: jax.Array, axis_name: str) -> jax.Array:
    """Send x to the next device of the ring along a mesh axis, and return the x of the previous device."""
    devices = lax.axis_size(axis_name)
    return permute(x, axis_name, [(i, (i + 1) % devices) for i in range(devices)])
