"""Two ways for weights and gradients to travel along mesh axes inside a `shard_map`: collectives, and copies.

NCCL's collectives are kernels. Matmul kernels start one program on every multiprocessor of a GPU; those for which a
collective leaves no room run after all others, so that about the time of the collective is lost although it runs beside
them. The GPUs of one process reach each other's memory, and their copy engines need no multiprocessor: there a gather
is a permute to each other device (`COPIES` of `jaxstack.distributed.xla_options` makes it a copy) and a pass that
puts the parts in order, a scatter a pass that takes the gradient apart, the permutes, and a sum.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

MOST_COPIED = 8
"""Devices; each sends to every other, so that the number of copies grows with its square."""


def in_one_process(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the mesh is of a few GPUs that one process drives."""
    if isinstance(mesh, AbstractMesh) or not 1 < mesh.size <= MOST_COPIED:
        return False
    devices = mesh.devices.flat
    return devices[0].platform in ("gpu", "cuda") and len({device.process_index for device in devices}) == 1


def gather(x: jax.Array, axes: tuple[str, ...], dim: int, *, copies: bool) -> jax.Array:
    """The parts of all `n` devices along `axes`, in their order: [..., D, ...] -> [..., n D, ...] at `dim`."""
    if not copies:
        return jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    devices, own, size = jax.lax.axis_size(axes), jax.lax.axis_index(axes), x.shape[dim]
    parts = [x, *(_from(x, axes, shift) for shift in range(1, devices))]
    # They lie in order from this device's own on: a window into them written twice is the whole.
    twice = jnp.concatenate([*parts, *parts[:-1]], dim)
    return jax.lax.dynamic_slice_in_dim(twice, (devices - own) % devices * size, devices * size, dim)


def scatter(x: jax.Array, axes: tuple[str, ...], dim: int, dtype: str, *, copies: bool) -> jax.Array:
    """This device's part of the sum over the `n` devices along `axes`, in `dtype`: [..., n D, ...] -> [..., D, ...].

    By copies what is sent has the narrower of the two dtypes and is added up in float32: a gradient in bfloat16 is
    summed in float32 at the price of sending bfloat16.
    """
    if not copies:
        return jax.lax.psum_scatter(x.astype(dtype), axes, scatter_dimension=dim, tiled=True)
    devices, own, size = jax.lax.axis_size(axes), jax.lax.axis_index(axes), x.shape[dim] // jax.lax.axis_size(axes)
    sent = x.astype(dtype) if jnp.dtype(dtype).itemsize < x.dtype.itemsize else x
    part = lambda shift: jax.lax.dynamic_slice_in_dim(sent, (own - shift) % devices * size, size, dim)  # noqa: E731
    parts = [part(0), *(_from(part(shift), axes, shift) for shift in range(1, devices))]
    return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts]).astype(dtype)


def _from(x: jax.Array, axes: tuple[str, ...], shift: int) -> jax.Array:
    """x of the device that is `shift` further along `axes`, in a circle."""
    devices = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes, [(source, (source - shift) % devices) for source in range(devices)])
