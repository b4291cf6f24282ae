"""Files of a Hugging Face checkpoint: config.json, and model.safetensors or several shards with an index."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxstack.errors import ConfigError, JaxstackError, cannot_write
from jaxstack.files import LFS_POINTER
from jaxstack.models.huggingface.direct_storage import ByteReader, Device, DirectTensor
from jaxstack.models.huggingface.file_tensor import DTYPES, FileTensor, file_tensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object, and return it as a dict.

    Raises:
      ConfigError: the file does not exist, or is not a JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} is not a Hugging Face checkpoint: it has no {path.name}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON that can be read: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return found


def list_tensors(directory: Path) -> list[str]:
    """List the names of a checkpoint's tensors; [] if its files cannot be read, which `WeightFiles` explains."""
    try:
        if (directory / WEIGHTS).is_file():
            with safe_open(str(directory / WEIGHTS), framework="numpy") as file:
                return list(file.keys())
        return list(read_json(directory / INDEX).get("weight_map") or ())
    except (SafetensorError, OSError, ValueError, ConfigError):
        return []


class WeightFiles:
    """Tensors in the safetensors files of a checkpoint, read lazily by slices.

    Attributes:
      shapes: shape of every tensor, by name.

    Raises:
      ConfigError: files are missing, cut off or damaged.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._tensors: dict[str, FileTensor] = {}
        self._replaced: dict[str, Any] = {}
        for name, indexed in self._list_files().items():
            tensors = self._find_tensors(directory / name)
            missing = sorted(indexed - tensors.keys())
            if missing:
                raise ConfigError(f"{directory / name} lacks tensors that {INDEX} places there: {_some(missing)}.")
            self._tensors |= tensors
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def _list_files(self) -> dict[str, set[str]]:
        """List the checkpoint's weight files, each with the tensors that the index says it contains."""
        for name in (WEIGHTS, INDEX):
            path = self.directory / name
            if path.is_symlink() and not path.exists():
                raise ConfigError(f"{path} is a link to {path.readlink()}, which does not exist; fetch it again.")
        if (self.directory / WEIGHTS).is_file():
            return {WEIGHTS: set()}
        if not (self.directory / INDEX).is_file():
            raise ConfigError(
                f"{self.directory} has neither {WEIGHTS} nor {INDEX}; weights in other formats (pytorch_model.bin) "
                "are converted by transformers: model.save_pretrained(directory)."
            )
        places = read_json(self.directory / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ConfigError(f"{self.directory / INDEX} has no weight_map from tensors to files.")
        files: dict[str, set[str]] = {}
        for tensor, name in places.items():
            if Path(name).name != name:
                raise ConfigError(f"{self.directory / INDEX} places {tensor} outside of its directory: {name}.")
            files.setdefault(name, set()).add(tensor)
        return files

    def _find_tensors(self, path: Path) -> dict[str, FileTensor]:
        try:
            with safe_open(str(path), framework="numpy"):  # checks the header, and that the file has all tensors
                return file_tensors(path)
        except FileNotFoundError:
            raise ConfigError(f"{path} is missing: {INDEX} names it.") from None
        except (SafetensorError, OSError, ValueError) as error:
            with open(path, "rb") as file:
                pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
            if pointer:
                raise ConfigError(f"{path} is a pointer of Git LFS in place of the file: git lfs pull") from None
            raise ConfigError(f"{path} is damaged or not a safetensors file ({error}); fetch it again.") from None

    def rename(self, prefix: str, unprefixed: str, nested: Mapping[str, str]) -> None:
        """Replace prefixes of tensor names.

        Args:
          prefix: added to all names except `unprefixed`, if then no name starts with it.
          nested: prefixes -> what replaces them, before that.
        """
        new = dict.fromkeys(self.shapes, "")
        for name in new:
            inner = next((inner for inner in nested if name.startswith(inner)), "")
            new[name] = nested.get(inner, "") + name.removeprefix(inner)
        if not any(name.startswith(prefix) for name in new.values()):
            new = {old: name if name == unprefixed else prefix + name for old, name in new.items()}
        self._tensors = {new[name]: tensor for name, tensor in self._tensors.items()}
        self.shapes = {new[name]: shape for name, shape in self.shapes.items()}

    def slices(self, name: str) -> Any:
        """Return a reader of slices of a floating-point tensor, used as `slices(name)[0:2, 1:3]`.

        Raises:
          ConfigError: the dtype is not F32, F16 or BF16.
        """
        if name in self._replaced:
            return self._replaced[name]
        found = self._tensors[name]
        if found.dtype_name not in _DTYPES:
            raise ConfigError(
                f"{name} is {found.dtype_name}: quantized weights are read in the formats of compressed-tensors only, "
                f"which {CONFIG} describes; give others in bfloat16 or float32."
            )
        return found

    def on_device(self, name: str, device: Device, read: ByteReader) -> DirectTensor | None:
        """Return a reader of slices of a floating-point tensor onto a device; None if it is not stored as one tensor.

        Args:
          name: the tensor.
          device: where slices are placed.
          read: reads bytes of the files, e.g. `read_by_kvikio`.

        Raises:
          ConfigError: as in `slices`.
        """
        if name in self._replaced:
            return None
        return DirectTensor(self.slices(name), device, read)

    def stored(self, name: str) -> Any:
        """Return a reader of slices of a tensor, quantized dtypes included; None if there is no such tensor.

        Raises:
          ConfigError: its dtype is one that no quantized weight has.
        """
        found = self._tensors.get(name)
        if found is not None and found.dtype_name not in DTYPES:
            raise ConfigError(f"{name} is {found.dtype_name}, not one of {', '.join(DTYPES)}.")
        return found

    def replace(self, name: str, tensor: Any, parts: Iterable[str]) -> None:
        """Replace the tensors that make up one quantized weight by a single, virtual tensor.

        Args:
          name: name of the new tensor.
          tensor: object that reads slices of it, with its `shape`; `stored` still reads the parts.
          parts: names of the tensors that it is made of; those that do not exist are ignored.
        """
        for part in parts:
            self.shapes.pop(part, None)
        self.shapes[name] = tensor.shape
        self._replaced[name] = tensor

    def check(self, wanted: Mapping[str, tuple[int, ...]], optional: str) -> None:
        """Check that the files have all wanted tensors, in the wanted shapes, and no unknown ones.

        Args:
          wanted: shapes by name.
          optional: regular expression of other names that are allowed.

        Raises:
          ConfigError: they differ; the message has the first differences of each kind.
        """
        missing = [name for name in wanted if name not in self.shapes]
        strange = [n for n in sorted(self.shapes) if n not in wanted and not re.fullmatch(optional, n)]
        shapes = [
            f"{name} is {list(self.shapes[name])}, not {list(shape)}"
            for name, shape in wanted.items()
            if name in self.shapes and self.shapes[name] != shape
        ]
        problems = {"tensors are missing": missing, "tensors are not known": strange, "shapes differ": shapes}
        found = [f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names]
        if found:
            raise ConfigError(f"the weights in {self.directory} do not fit its {CONFIG}: {'; '.join(found)}.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def claim_directory(directory: Path) -> None:
    """Create the directory of a new checkpoint, or check that the existing directory contains no checkpoint.

    Raises:
      ConfigError: it already holds a checkpoint, or cannot be created.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        present = [path.name for path in directory.iterdir() if path.name == CONFIG or path.suffix == ".safetensors"]
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror or error}.") from None
    if present:
        raise ConfigError(f"{directory} already holds a checkpoint ({present[0]}); give another directory.")


def write_weights(directory: Path, tensors: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int) -> None:
    """Write tensors one after another to safetensors files of at most `max_shard_bytes`, with an index if several.

    Raises:
      JaxstackError: the disk is full, or the directory cannot be written to; the files are then removed.
    """
    parts: list[tuple[Path, list[str]]] = []
    pending: dict[str, np.ndarray] = {}
    total = size = 0
    os.umask(mask := os.umask(0o022))

    def flush() -> None:
        path = directory / f".part-{len(parts)}"
        parts.append((path, list(pending)))
        save_file(pending, str(path), metadata={"format": "pt"})
        path.chmod(0o666 & ~mask)  # safetensors lets nobody else read it
        pending.clear()

    try:
        for name, tensor in tensors:
            if pending and size + tensor.nbytes > max_shard_bytes:
                flush()
                size = 0
            pending[name] = np.ascontiguousarray(tensor)
            size = size + tensor.nbytes
            total = total + tensor.nbytes
        flush()
        _put_in_place(directory, parts, total)
    except BaseException as error:
        for path, _ in parts:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            raise cannot_write(directory, _as_os_error(error)) from None
        raise


def _as_os_error(error: OSError | SafetensorError) -> OSError:
    """Convert safetensors' error, whose text ends in `(os error 28)`, to an OSError with that number."""
    if isinstance(error, OSError):
        return error
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))


def _put_in_place(directory: Path, parts: list[tuple[Path, list[str]]], total: int) -> None:
    if len(parts) == 1:
        parts[0][0].rename(directory / WEIGHTS)
        return
    places = {}
    for number, (path, names) in enumerate(parts, 1):
        final = f"model-{number:05}-of-{len(parts):05}.safetensors"
        path.rename(directory / final)
        places |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically.

    Raises:
      JaxstackError: the disk is full or fails.
    """
    part = path.with_name(f".part-{path.name}")
    try:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        part.rename(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise JaxstackError(f"cannot write {path}: {error.strerror or error}") from None
