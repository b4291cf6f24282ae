"""Detects silent data corruption: compares checksums of the training state's replicas between devices.

A device that computes or stores wrong values reports no error. If data parallelism replicates a parameter, its replicas
then differ. A state without replicas (fully sharded over all devices) cannot be checked this way.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxstack.checkpoint.leaves import name_leaves
from jaxstack.errors import JaxstackError


class ReplicaCheck:
    """Finds arrays of the training state whose replicas differ between devices, by checksums of their bits.

    All states that it checks have the same structure and layout.

    Reads the replicated part of the state once from device memory, and copies four bytes per leaf and device to the
    host. Any single changed word changes the checksum: words are summed modulo 2^32 with odd weights.

    Args:
      state: a pytree of arrays, or of ShapeDtypeStructs with shardings.
    """

    def __init__(self, state: PyTree):
        named = name_leaves(state)[0]
        leaves = {name: leaf for name, leaf in named.items() if _replica_count(leaf.sharding) > 1}
        self.names = list(leaves)
        """Names of the leaves that have replicas."""
        self._shardings = [leaf.sharding for leaf in leaves.values()]
        self._ranks = [leaf.ndim for leaf in leaves.values()]
        self._checksums = {mesh: self._compile(mesh) for mesh in {s.mesh for s in self._shardings}}

    def find(self, state: PyTree) -> list[str]:
        """Return one line for each array of the state whose replicas differ, with the devices that differ.

        Waits for the state; all processes must call it.
        """
        arrays = name_leaves(state)[0]
        lines = []
        for mesh, compute in self._checksums.items():
            places = [i for i, sharding in enumerate(self._shardings) if sharding.mesh == mesh]
            sums = np.asarray(compute([arrays[self.names[i]] for i in places]))
            for column, i in enumerate(places):
                odd = _odd_ones(sums[:, column], _parts(mesh, self._shardings[i].spec, self._ranks[i]))
                if odd:
                    lines.append(f"{self.names[i]} {_name_devices(odd, mesh)}")
        return lines

    def _compile(self, mesh: Mesh) -> Any:
        specs = [s.spec for s in self._shardings if s.mesh == mesh]
        local = jax.shard_map(
            lambda arrays: jnp.stack([_checksum(x) for x in arrays])[None],
            mesh=mesh,
            in_specs=(specs,),
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=False,
        )
        return jax.jit(local, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _checksum(x: jax.Array) -> jax.Array:
    """Return a checksum of the bits of an array, uint32 []."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_ or x.dtype.name.endswith("int4") or x.dtype.name.endswith("int2"):
        words = x.astype(jnp.uint8)
    else:
        words = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32))
    # The weight of a word is computed from its indices: flattening a tiled layout would copy the array.
    weight = jnp.ones((), jnp.uint32)
    for dim in range(words.ndim):
        weight = weight * jnp.uint32(1_000_003) + 2 * jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    return jnp.sum(words.astype(jnp.uint32) * weight, dtype=jnp.uint32)


def _replica_count(sharding: object) -> int:
    """Return how many devices hold a replica of the same shard; 1 if unknown, or if the array is not on devices."""
    if not isinstance(sharding, NamedSharding) or sharding.memory_kind not in (None, "device", "unpinned_host"):
        return 1
    return math.prod(size for axis, size in sharding.mesh.shape.items() if axis not in _axes(sharding.spec))


def _axes(spec: PartitionSpec) -> set[str]:
    return {axis for part in spec for axis in ((part,) if isinstance(part, str) else part or ())}


def _parts(mesh: Mesh, spec: PartitionSpec, rank: int) -> list[int]:
    """Return for each device of the mesh the index of its shard; devices with the same index hold replicas."""
    split = _axes(spec)
    shape = tuple(mesh.shape.values())
    places = np.indices(shape).reshape(len(shape), -1)
    sizes = [size if axis in split else 1 for axis, size in mesh.shape.items()]
    places = [place if axis in split else place * 0 for axis, place in zip(mesh.axis_names, places, strict=True)]
    return np.ravel_multi_index(places, sizes).tolist()


def _odd_ones(sums: np.ndarray, parts: Sequence[int]) -> list[list[int]]:
    """Return, for each shard whose checksums differ, the devices that are outvoted; all its devices after a tie."""
    groups: dict[int, dict[int, list[int]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for place, (value, part) in enumerate(zip(sums.tolist(), parts, strict=True)):
        groups[part][value].append(place)
    odd = []
    for values in groups.values():
        if len(values) == 1:
            continue
        alike = sorted(values.values(), key=len, reverse=True)
        clear = len(alike[0]) > len(alike[1])
        odd.append(sorted(place for same in alike[clear:] for place in same))
    return odd


def _name_devices(odd: Sequence[Sequence[int]], mesh: Mesh) -> str:
    devices = mesh.devices.flat
    named = [
        ", ".join(f"device {devices[i].id} (process {devices[i].process_index})" for i in places) for places in odd
    ]
    return "differs between copies: " + "; ".join(named)


_SHOWN = 5
_GO_BACK = "This state is not saved; run the same command again to continue from the newest checkpoint"


class SilentCorruption(JaxstackError):
    """Raised when replicas of an array of the training state differ between devices."""


class StateCheck:
    """Checks the training state for replicas that differ between devices and for parameters that are not finite.

    Every process calls it in the same way; it waits for the state to be computed.

    Args:
      checksum_every_steps: interval of comparing replicas, which are then compared before each save too; None: never.
    """

    def __init__(self, checksum_every_steps: int | None = None):
        self._every = checksum_every_steps
        self._replicas: ReplicaCheck | None = None
        # A scalar is replicated to every device, and so to every process; a vector of them may be sharded.
        self._finite = jax.jit(lambda arrays: {name: jnp.isfinite(x).all() for name, x in arrays.items()})

    def check(self, step: int, state: PyTree, before_save: bool) -> None:
        """Check that replicas are equal, if due at this step, and before a save that parameters are finite.

        Args:
          step: number of steps done.
          state: a `TrainState`.
          before_save: the state is about to be saved.

        Raises:
          SilentCorruption: replicas differ; the message names the leaves and devices.
          JaxstackError: a parameter is not finite.
        """
        if self._every is not None and (before_save or step % self._every == 0):
            self._replicas = self._replicas or ReplicaCheck(state)
            found = self._replicas.find(state)
            if found:
                raise SilentCorruption(
                    f"silent corruption: after step {step} copies of the state are not the same:\n  {_list(found)}\n"
                    f"{_GO_BACK}. That one was compared before it was saved. If the same device is named again, take "
                    "it out of the run and test it (dcgmi diag -r 3)."
                )
        if before_save:
            self._check_finite(step, state.params)

    def _check_finite(self, step: int, params: PyTree) -> None:
        arrays = {name: x for name, x in name_leaves(params)[0].items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        bad = [name for name, finite in jax.device_get(self._finite(arrays)).items() if not finite]
        if bad:
            raise JaxstackError(
                f"after step {step} parameters are not finite: {_list(bad, ', ')}. {_GO_BACK}. Lower the learning rate."
            )


def _list(lines: list[str], mark: str = "\n  ") -> str:
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return mark.join([*lines[:_SHOWN], *more])
