"""All-gather and reduce-scatter inside a `shard_map`, by collectives or by peer-to-peer copies.

NCCL's collectives are kernels. A matmul kernel starts one program on every multiprocessor of a GPU; the programs for
which a concurrent collective leaves no room run after all others, so that the overlap saves almost no time. GPUs of one
process can read each other's memory by their copy engines, which occupy no multiprocessor. With `peer_copies` an
all-gather is therefore one permute from each other device (`PEER_COPIES` of `jaxstack.distributed.xla_options` compiles
it to a copy) and a pass that puts the shards in order; a reduce-scatter is a pass that cuts the gradient into shards,
the permutes, and a sum.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

MOST_COPIED = 8
"""Maximum number of devices. Each sends to every other one, so that the number of copies grows quadratically."""


def in_one_process(mesh: Mesh | AbstractMesh) -> bool:
    """Return True if the mesh has 2 to `MOST_COPIED` GPUs, all of one process, so that they can copy peer to peer."""
    if isinstance(mesh, AbstractMesh) or not 1 < mesh.size <= MOST_COPIED:
        return False
    devices = mesh.devices.flat
    return devices[0].platform in ("gpu", "cuda") and len({device.process_index for device in devices}) == 1


def gather(x: jax.Array, axes: tuple[str, ...], dim: int, *, peer_copies: bool) -> jax.Array:
    """All-gather the shards of the `n` devices along `axes`, in order: [..., D, ...] -> [..., n D, ...].

    Args:
      x: this device's shard.
      axes: manual mesh axes, major to minor.
      dim: the dim that is concatenated.
      peer_copies: True sends by peer-to-peer copies in place of a collective.
    """
    if not peer_copies:
        return jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    devices = jax.lax.axis_size(axes)
    own = jax.lax.axis_index(axes)
    size = x.shape[dim]
    parts = [x, *(_from(x, axes, shift) for shift in range(1, devices))]
    # The shards are in order, starting with this device's own; a window into two rounds of them starts with shard 0.
    twice = jnp.concatenate([*parts, *parts[:-1]], dim)
    return jax.lax.dynamic_slice_in_dim(twice, (devices - own) % devices * size, devices * size, dim)


def scatter(x: jax.Array, axes: tuple[str, ...], dim: int, dtype: str, *, peer_copies: bool) -> jax.Array:
    """Reduce-scatter over the `n` devices along `axes`: [..., n D, ...] -> [..., D, ...] in `dtype`.

    Peer-to-peer copies send the narrower of the dtypes of `x` and `dtype`, and sum in float32: a bfloat16 gradient is
    summed in float32 at the cost of sending bfloat16.

    Args:
      x: this device's summand.
      axes: manual mesh axes, major to minor.
      dim: the dim that is split.
      dtype: of the result, and of the sum of a collective.
      peer_copies: True sends by peer-to-peer copies in place of a collective.
    """
    if not peer_copies:
        return jax.lax.psum_scatter(x.astype(dtype), axes, scatter_dimension=dim, tiled=True)
    devices = jax.lax.axis_size(axes)
    own = jax.lax.axis_index(axes)
    size = x.shape[dim] // jax.lax.axis_size(axes)
    sent = x.astype(dtype) if jnp.dtype(dtype).itemsize < x.dtype.itemsize else x

    def part(shift):
        return jax.lax.dynamic_slice_in_dim(sent, (own - shift) % devices * size, size, dim)

    parts = [part(0), *(_from(part(shift), axes, shift) for shift in range(1, devices))]
    return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts]).astype(dtype)


def _from(x: jax.Array, axes: tuple[str, ...], shift: int) -> jax.Array:
    """Return the array x of the device `shift` positions further along the mesh axes, cyclically."""
    devices = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes, [(source, (source - shift) % devices) for source in range(devices)])
