"""How a sequence lies on the devices of a mesh axis, and how chunks of it permute between them.

Of n devices, in the layout "contiguous" device i holds the i-th of n chunks. In "zigzag" it holds, one after the other,
chunks i and 2n-1-i of 2n: under a causal mask all devices then have the same work (Brandon et al., Striped Attention,
arXiv:2311.09431, balance it by interleaving; two chunks keep tiles whole, as in Llama 3, arXiv:2407.21783).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.target import current_target

LAYOUTS = ("zigzag", "contiguous")


def chunks_per_device(layout: str) -> int:
    """How many chunks of the sequence a device holds.

    Raises:
        ValueError: there is no such layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    return 2 if layout == "zigzag" else 1


def chunk_order(devices: int, layout: str = "zigzag") -> list[int]:
    """The chunks' numbers as they lie in memory, device after device."""
    if chunks_per_device(layout) == 1:
        return list(range(devices))
    return [chunk for device in range(devices) for chunk in (device, 2 * devices - 1 - device)]


def sequence_order(length: int, devices: int, layout: str = "zigzag") -> np.ndarray:
    """Positions [T] in the order in which the devices hold them: `x[:, sequence_order(T, n)]`, split evenly, is the
    layout of a sequence x [B, T, ...].

    Raises:
        ValueError: the chunks do not divide the length.
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
    """The numbers [] of this device's chunks, in their order."""
    index, devices = lax.axis_index(axis_name), lax.axis_size(axis_name)
    return [index, 2 * devices - 1 - index][: chunks_per_device(layout)]


def split(x: jax.Array, layout: str, dim: int = 1) -> list[jax.Array]:
    """This device's chunks, cut out of its part of an array."""
    return jnp.split(x, chunks_per_device(layout), axis=dim)


def permute(x: jax.Array, axis_name: str, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends x from device to device, by (from, to); who gets nothing has zeros. Linear, so differentiable.

    XLA's CPU backend lets a permute wait for devices that took another branch of a conditional, as the stages of a
    pipeline do: it hangs, or mixes up messages. There everything is gathered, and each device takes its part.
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
    """x of the device before this one, around the ring."""
    devices = lax.axis_size(axis_name)
    return permute(x, axis_name, [(i, (i + 1) % devices) for i in range(devices)])
