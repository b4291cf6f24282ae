"""Reads and writes the weights of a compressed model: safetensors files, and a manifest with formats and hashes.

`compressed/` in a run directory holds

    compressed.json       step, the format of each packed weight, and the SHA-256 of each file; written last
    model*.safetensors    plain parameters by path; arrays of packed weights as `PATH:NAME`, integers as bit streams;
                          plain ones that are smaller so, such as pruned ones, as `PATH:mask`, a bit for each value,
                          and `PATH:values`, those that are not zero
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from safetensors import safe_open

from jaxstack.checkpoint.manifest import hash_files
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.files import write_json
from jaxstack.models.huggingface.files import read_json, write_weights
from jaxstack.parallel.packed_weights import place_packed
from jaxstack.parameter_paths import nest, path_name
from pallas_kernels import Grid, PackedWeight
from pallas_kernels.weight_only.bits import pack_bits, unpack_bits
from pallas_kernels.weight_only.formats import FORMATS, Format
from pallas_kernels.weight_only.packed import is_packed

FOLDER = "compressed"
MANIFEST = "compressed.json"
VERSION = 1
_WITHOUT_ZEROS = "without zeros"
"""Format, in the manifest, of plain parameters that are stored as mask and values."""
_SHARD_BYTES = 5 * 10**9

Params: TypeAlias = dict[str, Any]
"""Nested dicts with arrays and `PackedWeight` as leaves."""
Place: TypeAlias = Callable[[str, tuple[int, ...]], jax.P]
"""(path of a parameter, its shape) -> the PartitionSpec in which a plain parameter of this shape is stored."""


def is_compressed(directory: str | Path) -> bool:
    """Return True if the run directory holds a compressed model in place of training checkpoints."""
    return (Path(directory) / FOLDER / MANIFEST).is_file()


def named_leaves(params: Params) -> dict[str, Any]:
    """Return a dict from the path of each parameter to its array, or to its `PackedWeight` if it is compressed."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_packed)
    return {path_name(path): leaf for path, leaf in leaves}


def write_compressed(directory: str | Path, params: Params, step: int) -> None:
    """Write the parameters of a compressed model to the folder `compressed` of a run directory.

    Args:
      step: step of the checkpoint that was compressed.

    Raises:
      JaxstackError: the disk is full or fails.
    """
    write_leaves(directory, named_leaves(params).items(), step)


def write_leaves(
    directory: str | Path, leaves: Iterable[tuple[str, Any]], step: int, file_bytes: int = _SHARD_BYTES
) -> None:
    """Write parameters as `write_compressed` does, taking one after the other from (path, array or `PackedWeight`).

    Args:
      directory: the run directory.
      leaves: the parameters.
      step: step of the checkpoint that was compressed.
      file_bytes: bytes of a file, which are in memory until it is written.

    Raises:
      JaxstackError: the disk is full or fails.
    """
    folder = Path(directory) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Any] = {}

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for path, leaf in leaves:
            described, arrays = _as_written(leaf)
            if described is not None:
                weights[path] = described
            for name, array in arrays.items():
                yield f"{path}:{name}" if name else path, array

    write_weights(folder, tensors(), file_bytes)
    hashes = hash_files(folder, sorted(path.name for path in folder.iterdir()), sync=True)
    write_json(folder / MANIFEST, {"version": VERSION, "step": step, "weights": weights, "files": hashes})


def read_compressed(
    directory: str | Path,
    place: Place | None = None,
    mesh: jax.sharding.Mesh | None = None,
    wanted: Callable[[str], bool] = lambda path: True,
) -> tuple[Params, int]:
    """Read the parameters of a compressed model, and the training step that they were saved at.

    Vectors are returned as plain arrays.

    Args:
      place: the layout of each parameter on `mesh`; None: on one device.
      wanted: returns True for the paths of the parameters to read.

    Raises:
      JaxstackError: a file is missing or has changed since it was written.
      ConfigError: a later version of jaxstack wrote the directory.
    """
    folder = Path(directory) / FOLDER
    manifest = _read_manifest(folder)
    _check_files(folder, manifest["files"])
    weights = manifest["weights"]
    found = {}
    for name in sorted(manifest["files"]):
        if not name.endswith(".safetensors"):
            continue
        with safe_open(folder / name, framework="numpy") as file:
            for tensor in file.keys():  # noqa: SIM118 (not a mapping)
                path, _, part = tensor.partition(":")
                if not wanted(path):
                    continue
                value = file.get_tensor(tensor)
                if part:
                    found.setdefault(path, {})[part] = _unpacked(value, weights[path], part)
                else:
                    found[path] = value
    make = functools.partial(_make_leaf, weights=weights, place=place, mesh=mesh)
    return nest((path, make(path, value)) for path, value in found.items()), int(manifest["step"])


def describe_compressed(directory: str | Path) -> dict[str, PackedWeight]:
    """Return the packed weights of a compressed model by path, whose arrays are `jax.ShapeDtypeStruct`.

    Only the manifest is read. In a directory without a compressed model there are none.

    Raises:
      ConfigError: a later version of jaxstack wrote the directory.
    """
    if not is_compressed(directory):
        return {}
    known = _read_manifest(Path(directory) / FOLDER)["weights"]
    return {path: _abstract(one) for path, one in known.items() if one["format"] != _WITHOUT_ZEROS}


def _abstract(known: Mapping[str, Any]) -> PackedWeight:
    arrays: Any = {
        name: jax.ShapeDtypeStruct(tuple(array["shape"]), jnp.dtype(array["dtype"]))
        for name, array in known["arrays"].items()
    }
    stack = tuple(known.get("stack", ()))
    return PackedWeight(arrays, _format(known), tuple(known["inputs"]), tuple(known["outputs"]), stack)


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_json(folder / MANIFEST)
    if manifest.get("version") != VERSION:
        raise ConfigError(f"{folder} was written by another version of jaxstack; compress the model again.")
    return manifest


def read_step(directory: str | Path) -> int:
    """Return the training step of the checkpoint that was compressed."""
    return int(read_json(Path(directory) / FOLDER / MANIFEST)["step"])


def dense_parameter(path: str, leaf: PackedWeight | ArrayLike) -> jax.Array:
    """Return a parameter as a plain array, decompressed if needed, in the shape that the model uses."""
    if not is_packed(leaf):
        return jnp.asarray(leaf)
    return leaf.matrix() if path.endswith("/table") else leaf.dense()  # a packed table is the transpose


def with_packed_weights(params: Params, packed: Mapping[str, PackedWeight], shardings: Params) -> Params:
    """Return parameters with those at the paths of `packed` replaced by packed weights, sharded as the plain ones."""
    leaves = named_leaves(params)
    layout = named_leaves(shardings)
    return nest({**leaves, **{path: place_packed(weight, layout[path]) for path, weight in packed.items()}}.items())


def unpack_vectors(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by path with compressed vectors (1-D parameters) decompressed; matrices stay compressed."""
    return {path: leaf.dense() if is_packed(leaf) and leaf.ndim == 1 else leaf for path, leaf in leaves.items()}


def _as_written(leaf: Any) -> tuple[dict[str, Any] | None, dict[str, np.ndarray]]:
    """Return what the manifest says of a parameter, None if it is written as it is, and the arrays to write by name."""
    if is_packed(leaf):
        return _describe(leaf), _packed_arrays(leaf)
    array = np.asarray(leaf)
    mask = _has_bits(array)
    if _bytes_without_zeros(array, mask) >= array.nbytes:
        return None, {"": array}
    described = {"format": _WITHOUT_ZEROS, "shape": list(array.shape), "dtype": str(array.dtype)}
    return described, {"mask": np.packbits(mask.reshape(-1), bitorder="little"), "values": array[mask]}


def _packed_arrays(weight: PackedWeight) -> dict[str, np.ndarray]:
    bits = weight.format.bits_of
    found = {}
    for name, array in weight.arrays.items():
        if name in bits:
            wide = array.astype(jnp.int8 if jnp.issubdtype(array.dtype, jnp.signedinteger) else jnp.uint8)
            found[name] = pack_bits(np.asarray(wide), bits[name])
        else:
            stored = np.asarray(array)
            # safetensors reads no FP8 into NumPy.
            found[name] = stored.view(np.uint8) if stored.dtype.itemsize == 1 else stored
    return found


def stored_bytes(leaf: Any) -> int:
    """Return the bytes of a parameter on disk: a pruned plain matrix takes a bit for each value, and those not zero."""
    if is_packed(leaf):
        return leaf.stored_bytes
    array = np.asarray(leaf)
    return min(array.nbytes, _bytes_without_zeros(array, _has_bits(array)))


def _bytes_without_zeros(array: np.ndarray, mask: np.ndarray) -> int:
    """Return the bytes of a bit for each value, and of the values in the mask."""
    return -(-array.size // 8) + int(np.count_nonzero(mask)) * array.itemsize


def _has_bits(array: np.ndarray) -> np.ndarray:
    """Return which values have any bit set: not 0, as which -0 does not count."""
    return array.view(f"u{array.dtype.itemsize}") != 0


def _with_zeros(known: Mapping[str, Any], parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the array that was stored as `mask` and `values`."""
    shape = tuple(known["shape"])
    array = np.zeros(shape, jnp.dtype(known["dtype"]))
    array[np.unpackbits(parts["mask"], count=array.size, bitorder="little").reshape(shape) == 1] = parts["values"]
    return array


def _describe(weight: PackedWeight) -> dict[str, Any]:
    arrays = {name: {"dtype": str(x.dtype), "shape": list(x.shape)} for name, x in weight.arrays.items()}
    settings = dataclasses.asdict(weight.format)  # type: ignore[call-overload]
    dims = {"inputs": list(weight.inputs), "outputs": list(weight.outputs)}
    if weight.stack:
        dims["stack"] = list(weight.stack)
    return {"format": weight.format.name, "settings": settings, **dims, "arrays": arrays}


def _format(described: Mapping[str, Any]) -> Format:
    settings = dict(described["settings"])
    if "grid" in settings:
        settings["grid"] = Grid(**settings["grid"])
    return FORMATS[described["format"]](**settings)


def _unpacked(value: np.ndarray, described: Mapping[str, Any], part: str) -> np.ndarray:
    if described["format"] == _WITHOUT_ZEROS:
        return value
    bits = _format(described).bits_of
    known = described["arrays"][part]
    if part not in bits:
        return value.view(jnp.dtype(known["dtype"])) if value.dtype == np.uint8 else value
    signed = jnp.issubdtype(jnp.dtype(known["dtype"]), jnp.signedinteger)
    return unpack_bits(value, bits[part], tuple(known["shape"]), signed=signed)


def _make_leaf(
    path: str, value: Any, *, weights: Mapping[str, Any], place: Place | None, mesh: jax.sharding.Mesh | None
) -> Any:
    known = weights.get(path)
    if known is not None and known["format"] == _WITHOUT_ZEROS:
        value = _with_zeros(known, value)
        known = None
    stack = () if known is None else tuple(known.get("stack", ()))
    shape = value.shape if known is None else (*stack, *known["inputs"], *known["outputs"])
    sharding = None
    if mesh is not None:
        sharding = jax.NamedSharding(mesh, jax.P() if place is None else place(path, shape))
    if known is not None:
        arrays = {name: array.astype(jnp.dtype(known["arrays"][name]["dtype"])) for name, array in value.items()}
        weight = PackedWeight(arrays, _format(known), tuple(known["inputs"]), tuple(known["outputs"]), stack)
        value = weight.dense() if weight.ndim == 1 else weight  # nothing multiplies with a packed vector
    if not is_packed(value):
        return jnp.asarray(value) if sharding is None else jax.device_put(value, sharding)
    return place_packed(value, sharding, transposed=path.endswith("/table"))


def _check_files(folder: Path, hashes: Mapping[str, str]) -> None:
    try:
        found = hash_files(folder, hashes)
    except OSError as error:
        raise JaxstackError(f"{folder} is damaged ({error}); compress the model again.") from None
    if changed := sorted(name for name in hashes if found[name] != hashes[name]):
        raise JaxstackError(f"{folder / changed[0]} has changed since it was written; compress the model again.")
