"""Writes the shards that a process has of named arrays to files with hashes, and reads them back onto the same layout.

A folder of shards has the manifest of a checkpoint (`SHA256SUMS`, `checkpoint.json`) and one file for each array:

    arrays/N   the distinct shards of one array on this process, one after the other, as plain bytes

`checkpoint.json` names the file of each array and the place of each shard, such as `0:4,8:16`. Unlike a checkpoint on
disk, such a folder can only be read by a process with the same shards.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxstack.checkpoint import manifest
from jaxstack.files import write_file

SHARDS = "shards"
"""Key of the index with file and places of each array's shards."""
_FOLDER = "arrays"
_HOST = "pinned_host"

Shards = dict[str, dict[str, Any]]
"""Name of an array -> place of a shard -> the shard, in host memory."""


def place_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Return the part of an array of `shape` that `index` selects as text: `0:4,8:16`, or an empty one for a scalar."""
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop, _ in bounds)


def start_copy(arrays: Mapping[str, jax.Array | np.ndarray]) -> Shards:
    """Start to copy this process's shards from the devices to host memory, without waiting for them.

    When this returns, the arrays may be donated or deleted: the runtime lets a step that overwrites them wait for the
    copy. Replicas of a shard on several devices of the process are copied once.
    """
    found: Shards = {}
    queued: list[tuple[str, str, jax.Array]] = []
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            found[name] = {place_of((slice(None),) * array.ndim, array.shape): np.array(array)}
            continue
        shards = {place_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        found[name] = {}
        queued += [(name, place, data) for place, data in shards.items()]
    targets = [_on_host(data) for _, _, data in queued]
    # Without may_alias=False, an array that is in host memory already, as offloaded ones are, would not be copied.
    copied = jax.device_put([data for _, _, data in queued], targets, may_alias=False)
    for (name, place, _), data in zip(queued, copied, strict=True):
        found[name][place] = data
    return found


def _on_host(data: jax.Array) -> jax.sharding.Sharding:
    (device,) = data.devices()
    return jax.sharding.SingleDeviceSharding(device, memory_kind=_HOST)


def write(root: Path, shards: Shards, index: dict[str, Any], files: Mapping[str, bytes]) -> int:
    """Write shards, further files and, last, the index and the manifest of hashes; return the bytes of the shards.

    Args:
      root: an empty folder.
      shards: from `start_copy`; each array's are dropped when they are written.
      index: content of checkpoint.json, from `commit.make_index`.
      files: further files, name -> content.

    Raises:
      OSError: a file cannot be written.
    """
    (root / _FOLDER).mkdir()
    described = {}
    total = 0
    for number, name in enumerate(list(shards)):
        pieces = shards.pop(name)
        file = f"{_FOLDER}/{number}"
        with open(root / file, "wb") as out:
            for piece in pieces.values():
                total += out.write(_as_bytes(np.asarray(piece)))
        described[name] = {"file": file, "places": list(pieces)}
    for name, content in files.items():
        write_file(root / name, content, durable=False)
    digests = manifest.hash_files(root, manifest.list_files(root))
    manifest.write_manifest(root, digests, {**index, SHARDS: described})
    return total


def _as_bytes(array: np.ndarray) -> memoryview:
    # Types such as bfloat16 have no buffer of their own.
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def local_places(target: Any) -> dict[Any, str]:
    """Return device -> place of the shard of a wanted array that it gets; {None: the whole} for a numpy array."""
    if not isinstance(target, jax.ShapeDtypeStruct):
        return {None: place_of((slice(None),) * target.ndim, target.shape)}
    sharding = target.sharding
    assert sharding is not None, "orbax_target gives every array a sharding"
    found = sharding.addressable_devices_indices_map(target.shape)
    return {device: place_of(index or (), target.shape) for device, index in found.items()}


def local_bytes(targets: Mapping[str, Any]) -> int:
    """Return the bytes of the distinct shards that this process has of the wanted arrays."""
    total = 0
    for target in targets.values():
        size = np.dtype(target.dtype).itemsize
        total += sum(size * math.prod(_shape(place)) for place in set(local_places(target).values()))
    return total


def missing_shard(index: Mapping[str, Any], targets: Mapping[str, Any]) -> str | None:
    """Return the first wanted shard that a folder of shards lacks, as `name[place]`; None if it has all of them."""
    for name, target in targets.items():
        places = index[SHARDS].get(name, {}).get("places", ())
        for place in local_places(target).values():
            if place not in places:
                return f"{name}[{place}]"
    return None


def read(root: Path, index: Mapping[str, Any], targets: Mapping[str, Any]) -> dict[str, Any]:
    """Read the wanted arrays from a folder of shards whose hashes were checked.

    Args:
      root: the folder.
      index: its checkpoint.json.
      targets: name -> jax.ShapeDtypeStruct with a sharding whose shards are all in the folder, or a numpy array.
    """
    return {name: _read_array(root, index[SHARDS][name], target) for name, target in targets.items()}


def _read_array(root: Path, described: Mapping[str, Any], target: Any) -> Any:
    dtype = np.dtype(target.dtype)
    # Not mapped into memory: the CPU backend would use the file's pages as the array, and a step would write to them.
    content = (root / described["file"]).read_bytes()
    pieces = {}
    offset = 0
    for place in described["places"]:
        shape = _shape(place)
        count = math.prod(shape)
        pieces[place] = np.frombuffer(content, dtype, count, offset).reshape(shape)
        offset += count * dtype.itemsize
    places = local_places(target)
    if not isinstance(target, jax.ShapeDtypeStruct):
        return pieces[places[None]].copy()
    kind = getattr(target.sharding, "memory_kind", None)
    arrays = [
        jax.device_put(pieces[place], jax.sharding.SingleDeviceSharding(device, memory_kind=kind), may_alias=False)
        for device, place in places.items()
    ]
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, arrays)


def _shape(place: str) -> tuple[int, ...]:
    bounds = (part.split(":") for part in place.split(",")) if place else ()
    return tuple(int(stop) - int(start) for start, stop in bounds)
