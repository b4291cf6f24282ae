"""Writes the shards that a process has of named arrays to files with hashes, and reads them back onto the same layout.

A folder of shards has the manifest of a checkpoint (`SHA256SUMS`, `checkpoint.json`) and one file for each array:

    arrays/N   the distinct shards of one array on this process, one after the other, as plain bytes

`checkpoint.json` names the file of each array and the place of each shard, such as `0:4,8:16`. A process with the same
shards reads its own folder; one of another layout reads the files of those folders that have parts of its shards.
"""

import collections
import dataclasses
import hashlib
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.checkpoint import manifest
from jaxstack.files import write_file
from jaxstack.observe.nvml import available_bytes
from jaxstack.parallel.transfers import Transfers

SHARDS = "shards"
"""Key of the index with file and places of each array's shards."""
_FOLDER = "arrays"
_HOST = "pinned_host"

_PART_BYTES = 2**26
"""Bytes of a copy on a device that are brought to the host in one piece."""
_IN_FLIGHT = 1 / 8
"""Share of a copy on the devices that is on its way to the host, or there in pinned memory, at a time. XLA begins the
transfer of a part after all steps that are queued by then, so that with less each step would bring only a little."""
_BYTES_ON_THEIR_WAY = 2**30
"""Bytes that a reader may have on their way to devices at a time, in addition to the array that it reads."""

Shards = dict[str, dict[str, list[Any]]]
"""Name of an array -> place of a shard -> a copy of the shard, as parts whose bytes follow one another."""
_Placed: TypeAlias = dict[tuple[str, str], jax.Array]
"""Name of an array and place of a shard -> the shard, on one device."""


def place_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Return the part of an array of `shape` that `index` selects as text: `0:4,8:16`, or an empty one for a scalar."""
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop, _ in bounds)


def has_room(arrays: Mapping[str, jax.Array | np.ndarray]) -> bool:
    """Return True if the devices of this process can hold their shards twice beside what steps have needed so far.

    What other programs hold of a GPU counts as used. False where the runtime does not know a device's memory, as that
    of CPUs.
    """
    needed: collections.Counter[Any] = collections.Counter()
    for data in _distinct_shards(arrays).values():
        needed[_device_of(data)] += data.nbytes
    for (device, size), available in zip(needed.items(), available_bytes([*needed]), strict=True):
        known = device.memory_stats() or {}
        limit = known.get("bytes_limit", 0)
        if min(limit, limit if available is None else available) - known.get("peak_bytes_in_use", 0) < size:
            return False
    return bool(needed)


def start_copy(arrays: Mapping[str, jax.Array | np.ndarray], *, on_device: bool = False) -> Shards:
    """Start to copy this process's shards, without waiting for them.

    When this returns, the arrays may be donated or deleted: the runtime lets a step that overwrites them wait for the
    copy. Replicas of a shard on several devices of the process are copied once.

    Args:
      arrays: name -> array.
      on_device: copy within the devices' memory, and let `write` read these copies. Otherwise they are copied to host
        memory now, and the next step waits for the whole transfer.
    """
    found: Shards = {name: {} for name in arrays}
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            found[name][place_of((slice(None),) * array.ndim, array.shape)] = [np.array(array)]
    shards = _distinct_shards(arrays)
    cloned = {key: data for key, data in shards.items() if on_device and _is_in_device_memory(data)}
    copies = _clone(cloned) | {key: [_to_host(data)] for key, data in shards.items() if key not in cloned}
    for name, place in shards:
        found[name][place] = copies[name, place]
    return found


def _distinct_shards(arrays: Mapping[str, jax.Array | np.ndarray]) -> _Placed:
    """Return name and place -> this process's shard there, of the arrays that are on devices."""
    return {
        (name, place_of(shard.index, array.shape)): shard.data
        for name, array in arrays.items() if isinstance(array, jax.Array)
        for shard in array.addressable_shards
    }  # fmt: skip


def _device_of(data: jax.Array) -> Any:
    (device,) = data.devices()
    return device


def _is_in_device_memory(data: jax.Array) -> bool:
    """Return True unless a shard is in another memory, as offloaded ones are in the host's."""
    return data.sharding.memory_kind in (None, _device_of(data).default_memory().kind)


def _clone(shards: _Placed) -> dict[tuple[str, str], list[jax.Array]]:
    """Return copies of single-device arrays where they are, in parts, by one program for each device."""
    devices = collections.defaultdict[Any, _Placed](dict)
    for key, data in shards.items():
        devices[_device_of(data)][key] = data
    copies: dict[tuple[str, str], list[jax.Array]] = {}
    for those in devices.values():
        copies |= _clone_on_one(those)
    return copies


@jax.jit
def _clone_on_one(shards: _Placed) -> dict[tuple[str, str], list[jax.Array]]:
    # By a program, as device_put to an array's own device need not copy within its memory.
    return {key: _parts(data) for key, data in shards.items()}


def _parts(data: jax.Array) -> list[jax.Array]:
    size = _PART_BYTES // data.dtype.itemsize
    if data.size <= size:
        return [jnp.copy(data)]
    flat = data.reshape(-1)
    return [flat[start : start + size] for start in range(0, flat.size, size)]


def _to_host(data: jax.Array) -> jax.Array:
    """Start to copy a single-device array to pinned host memory."""
    # Without may_alias=False, an array that is there already, such as an offloaded one, would not be copied.
    target = jax.sharding.SingleDeviceSharding(_device_of(data), memory_kind=_HOST)
    return jax.device_put(data, target, may_alias=False)


def write(
    root: Path,
    shards: Shards,
    index: dict[str, Any],
    files: Mapping[str, bytes],
    written: Callable[[str], None] = lambda name: None,
) -> int:
    """Write shards, further files and, last, the index and the manifest of hashes; return the bytes of the shards.

    Args:
      root: an empty folder.
      shards: from `start_copy`; each array's are dropped when they are written.
      index: content of checkpoint.json, from `commit.make_index`.
      files: further files, name -> content.
      written: called with the name of each file but index and manifest once it is complete, by several threads.

    Raises:
      OSError: a file cannot be written.
    """
    (root / _FOLDER).mkdir()
    described = {
        name: {"file": f"{_FOLDER}/{number}", "places": list(pieces)}
        for number, (name, pieces) in enumerate(shards.items())
    }
    sizes = {name: sum(part.nbytes for parts in pieces.values() for part in parts) for name, pieces in shards.items()}
    groups = _even_groups(sizes, manifest.THREADS)
    ahead = int(_IN_FLIGHT * sum(sizes.values()) / len(groups))

    def write_group(names: Sequence[str]) -> dict[str, tuple[str, int]]:
        numbers = {name: sum(map(len, shards[name].values())) for name in names}
        copies = itertools.chain.from_iterable(parts for name in names for parts in shards.pop(name).values())
        on_host = _bring(copies, ahead)
        results = {}
        for name, number in numbers.items():
            file = described[name]["file"]
            results[file] = _write_parts(root / file, itertools.islice(on_host, number))
            written(file)
        return results

    results = dict(collections.ChainMap(*manifest.in_threads(write_group, groups)))
    digests = {file: digest for file, (digest, _) in results.items()}
    for name, content in files.items():
        write_file(root / name, content, durable=False)
        written(name)
    digests |= manifest.hash_files(root, files)
    manifest.write_manifest(root, digests, {**index, SHARDS: described})
    return sum(size for _, size in results.values())


def _even_groups(sizes: Mapping[str, int], number: int) -> list[list[str]]:
    """Divide names among at most `number` groups of about the same size in all; at least one group."""
    groups = [(0, [])] * min(number, len(sizes)) or [(0, [])]
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        total, names = groups[0]
        heapq.heapreplace(groups, (total + sizes[name], [*names, name]))
    return [names for _, names in groups]


def _bring(parts: Iterable[Any], ahead: int) -> Iterator[Any]:
    """Yield arrays in host memory, having begun the transfers of those that follow, of up to `ahead` bytes in all.

    Those of a device come by way of pinned memory, which numpy reads in place. Where numpy asks the device itself, the
    runtime copies to pageable memory in a callback of the CUDA driver, and those of running steps wait for it.
    """
    begun: collections.deque[Any] = collections.deque()
    size = 0
    for part in parts:
        on_device = isinstance(part, jax.Array) and _is_in_device_memory(part)
        begun.append(_to_host(part) if on_device else part)
        size += part.nbytes
        del part  # the copy on the device
        while begun and size > ahead:
            size -= begun[0].nbytes
            yield begun.popleft()
    while begun:
        yield begun.popleft()


def _write_parts(path: Path, parts: Iterable[Any]) -> tuple[str, int]:
    """Write arrays to a file, one after the other; return the SHA-256 in hex of their bytes, and their number."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "wb") as out:
        for part in parts:
            content = _as_bytes(np.asarray(part))
            digest.update(content)
            size += out.write(content)
            del part, content  # so that the next ones can have their pinned memory
    return digest.hexdigest(), size


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


def other_files(index: Mapping[str, Any]) -> set[str]:
    """Return the names of the files of a folder of shards that hold no arrays."""
    return {name for name in index["files"] if not name.startswith(f"{_FOLDER}/")}


def find_files(indexes: Sequence[Mapping[str, Any]], targets: Mapping[str, Any]) -> tuple[list[set[str]], str | None]:
    """Find the files that hold this process's shards of the wanted arrays, in the folders that several processes wrote.

    Args:
      indexes: checkpoint.json of each folder; all are of one layout. Where several have a shard, the first is used.
      targets: as in `read`.

    Returns:
      The names of the files for each folder, and the first wanted shard that is incomplete, as `name[place]`, or None.
    """
    files: list[set[str]] = [set() for _ in indexes]
    for name, target in targets.items():
        owners: dict[str, int] = {}
        for number, index in enumerate(indexes):
            for place in index[SHARDS].get(name, {}).get("places", ()):
                owners.setdefault(place, number)
        for wanted in dict.fromkeys(local_places(target).values()):
            used = {place: both for place in owners if (both := _overlap(place, wanted)) is not None}
            if sum(_size(both) for both in used.values()) < math.prod(_shape(wanted)):
                return files, f"{name}[{wanted}]"
            for place in used:
                files[owners[place]].add(indexes[owners[place]][SHARDS][name]["file"])
    return files, None


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder of shards to read from: its path, its checkpoint.json, and the files to use."""

    root: Path
    index: Mapping[str, Any]
    files: Collection[str]


def read(folders: Sequence[Folder], targets: Mapping[str, Any]) -> dict[str, Any]:
    """Read the wanted arrays from folders of shards whose hashes were checked, and whose files `find_files` has found.

    Args:
      folders: the folders.
      targets: name -> jax.ShapeDtypeStruct with a sharding, or a numpy array.
    """
    transfers = Transfers(_BYTES_ON_THEIR_WAY)
    return {name: _read_array(name, folders, target, transfers) for name, target in targets.items()}


def _read_array(name: str, folders: Sequence[Folder], target: Any, transfers: Transfers) -> Any:
    pieces: dict[str, np.ndarray] = {}
    for folder in folders:
        described = folder.index[SHARDS].get(name)
        if described is not None and described["file"] in folder.files:
            pieces = _read_pieces(folder.root, described, np.dtype(target.dtype)) | pieces
    places = local_places(target)
    shards = {place: _cut(place, pieces) for place in set(places.values())}
    if not isinstance(target, jax.ShapeDtypeStruct):
        return shards[places[None]].copy()
    kind = getattr(target.sharding, "memory_kind", None)
    arrays = []
    for device, place in places.items():
        there = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        arrays.append(transfers.add(jax.device_put(shards[place], there, may_alias=False)))
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, arrays)


def _read_pieces(root: Path, described: Mapping[str, Any], dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return place -> shard of one array's file."""
    # Not mapped into memory: the CPU backend would use the file's pages as the array, and a step would write to them.
    content = (root / described["file"]).read_bytes()
    pieces = {}
    offset = 0
    for place in described["places"]:
        shape = _shape(place)
        count = math.prod(shape)
        pieces[place] = np.frombuffer(content, dtype, count, offset).reshape(shape)
        offset += count * dtype.itemsize
    return pieces


def _cut(wanted: str, pieces: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the part of an array at the place `wanted`, put together from pieces that cover it."""
    if wanted in pieces:
        return pieces[wanted]
    whole = np.empty(_shape(wanted), next(iter(pieces.values())).dtype)
    for place, piece in pieces.items():
        both = _overlap(place, wanted)
        if both is not None:
            whole[_within(both, wanted)] = piece[_within(both, place)]
    return whole


_Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""First and last index + 1 of a part of an array in each of its dims."""


def _bounds(place: str) -> _Bounds:
    pairs = (part.split(":") for part in place.split(",")) if place else ()
    return tuple((int(start), int(stop)) for start, stop in pairs)


def _shape(place: str) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in _bounds(place))


def _size(bounds: _Bounds) -> int:
    return math.prod(stop - start for start, stop in bounds)


def _overlap(first: str, second: str) -> _Bounds | None:
    """Return the elements that two places have in common; None if there are none."""
    pairs = zip(_bounds(first), _bounds(second), strict=True)
    both = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs)
    return both if all(start < stop for start, stop in both) else None


def _within(bounds: _Bounds, place: str) -> tuple[slice, ...]:
    """Return the indices of `bounds` in the shard at `place`."""
    starts = (start for start, _ in _bounds(place))
    return tuple(slice(low - start, high - start) for (low, high), start in zip(bounds, starts, strict=True))
