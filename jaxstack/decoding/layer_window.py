"""Text generation with models larger than device memory: some layers are in it at a time, the others come ahead of use.

A thread brings the weights of the next layers while one layer runs: from files (TPI-LLM, Li et al. 2024,
arXiv:2410.00531), from host memory, or from the memory of other devices (EnergonAI, Du et al. 2022, arXiv:2209.02341).
The output head counts as a layer; of the embedding only the rows of a step's tokens are read.
"""

import concurrent.futures
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, Float, Int, PyTree

from jaxstack.decoding.decode import Params, cast_matrices
from jaxstack.decoding.parted import PartedDecoder
from jaxstack.errors import ConfigError
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel.rules import AxisRules

_TABLE = "embedding/table"
WeightPlace: TypeAlias = Literal["files", "host", "peers"]
"""Storage of the layers that are outside the device's memory: the checkpoint's files, host memory, or the memory of the
other devices of the process."""


class StoredWeights(Protocol):
    """Interface of model weights on disk, such as `jaxstack.models.huggingface.load.ModelParts`."""

    def read(self, path: str, dtypes: PyTree) -> PyTree:
        """Read the parameters at or below a path in the parameter tree, in the dtypes given by the tree `dtypes`."""
        ...

    def rows(self, path: str, numbers: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N D"]:
        """Read the given rows of a weight matrix, such as the embeddings of some tokens."""
        ...


def parts_in_turns(count: int, size: int) -> list[int]:
    """Return the numbers of a model's parts that are loaded in turns, as `WeightWindow` does.

    Args:
      count: number of parts.
      size: number of parts that the memory has room for. All are kept if it has room for all; otherwise two places are
        for the parts in turns, which are evenly spread over the model, so that one is loaded while others are used.
    """
    turns = 0 if size >= count else count - size + min(size, 2)
    return [number * count // turns for number in range(turns)]


class WeightWindow:
    """Keeps some parts of a model in device memory, and loads the others ahead of their use, in turns.

    Args:
      count: number of parts, which are used in order; after the last comes the first again.
      size: largest number of parts in device memory.
      read: loads one part into device memory.
    """

    def __init__(self, count: int, size: int, read: Callable[[int], Params]):
        self.turns = parts_in_turns(count, size)
        """Numbers of the parts that are loaded in turns."""
        self.slots = min(size, 2, len(self.turns))
        """Largest number of these parts in memory."""
        self._read = read
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "weight window")
        first = [number for number in range(count) if number not in self.turns[self.slots :]]
        self._parts = {number: self._thread.submit(read, number) for number in first}
        self._following = itertools.islice(itertools.cycle(self.turns), self.slots, None)

    def take(self, number: int) -> Params:
        """Return the weights of a part, waiting until they are in device memory.

        Raises:
          Exception: the error of the read, if it failed.
        """
        return self._parts[number].result()

    def release(self, number: int, after: Array) -> None:
        """Delete a part that is loaded in turn when `after` has been computed with it, and load another."""
        if number not in self.turns:
            return
        jax.block_until_ready(after)
        for x in jax.tree.leaves(self._parts.pop(number).result()):
            x.delete()
        following = next(self._following)
        self._parts[following] = self._thread.submit(self._read, following)

    def close(self) -> None:
        """Stop the thread that loads ahead, and drop all weights."""
        self._thread.shutdown(cancel_futures=True)
        self._parts.clear()


class WindowDecoder(PartedDecoder):
    """Generates tokens on one device with a model of which only a few layers are in device memory at a time.

    Args:
      module: the functional form of the Transformer, with unrolled layers.
      stored: its weights.
      non_params: its other variables.
      rules: sharding rules of a mesh of one device.
      resident: number of layers in device memory at a time.
      place: where the weights of the others are.
      vocab_size: number of ids that may be generated, if the model has more rows than the tokenizer has ids.

    Raises:
      ConfigError: they are to be on other devices, and there are none.
    """

    def __init__(
        self,
        module: ModuleArrays,
        stored: StoredWeights,
        non_params: Params,
        rules: AxisRules,
        *,
        resident: int,
        place: WeightPlace = "files",
        vocab_size: int | None = None,
    ):
        layers = len(module.abstract_params["decoder"]["layers"])
        turns = parts_in_turns(layers + 1, resident)
        options = {"vocab_size": vocab_size, "key": lambda layer: layer if layer in turns else None}
        super().__init__(module, module.abstract_params, non_params, [rules], **options)
        self.stored = stored
        self._here = rules.sharding(jax.P())
        self._final = {
            name: self._read(name, self._here) for name in self.params if name not in ("decoder", "embedding", "head")
        }
        paths = [f"decoder/layers/{number}" for number in range(layers)] + [self.head]
        sizes = [_bytes(self._dtypes(path)) for path in paths]
        kept = sum(size for number, size in enumerate(sizes) if number not in turns)
        largest = sorted((sizes[number] for number in turns), reverse=True)
        self.window_bytes = _bytes(self._final) + kept + sum(largest[: min(resident, 2)])
        """Bytes of weights that are in device memory at most."""
        self.total_bytes = _bytes(self.params)
        """Bytes of all weights in the compute dtype."""
        homes = _homes(place, rules)
        self.pool_bytes = sum(largest) if homes else 0
        """Bytes of weights in host memory, or on other devices."""
        placed = dict(zip(turns, itertools.cycle(homes))) if homes else {}
        self._pool = dict[int, Params]()
        self.window = WeightWindow(layers + 1, resident, functools.partial(self._load, paths, placed))

    def load(self, params: Params, non_params: Params) -> None:
        """Set the parameters' shapes and dtypes (their values stay in files) and the values of the other variables."""
        self.params = jax.eval_shape(lambda params: cast_matrices(self.module, params, self.rules), params)
        self.non_params = non_params

    def unload(self) -> None:
        """Stop the thread that loads ahead, and free the cache. The decoder cannot be used any more."""
        self.window.close()
        self._pool.clear()
        self._free_cache()

    @property
    def weight_bytes(self) -> int:
        return self.window_bytes

    @property
    def entry(self) -> Params:
        return self._final

    @property
    def final(self) -> Params:
        return self._final

    def embedding_rows(self, tokens: Int[np.ndarray, " T"]) -> Float[np.ndarray, "T D"]:
        """Read the rows of the embedding matrix for these tokens."""
        return self.stored.rows(_TABLE, tokens).astype(self.params["embedding"]["table"].dtype)

    def take(self, number: int) -> Params:
        return self.window.take(number)

    def release(self, number: int, after: Array) -> None:
        self.window.release(number, after)

    def _load(self, paths: Sequence[str], homes: Mapping[int, Sharding], number: int) -> Params:
        """Bring a part into device memory: from files, or from where it was put when it was first needed."""
        if number not in homes:
            return self._read(paths[number], self._here)
        if number not in self._pool:
            self._pool[number] = self._read(paths[number], homes[number])
        return jax.device_put(self._pool[number], self._here)

    def _read(self, path: str, sharding: Sharding) -> Params:
        """Read the parameters at or below a path from files, one at a time."""

        def place(keys: tuple[Any, ...], like: Any) -> Array:
            leaf = "/".join([path, *(key.key for key in keys)])
            return jax.device_put(self.stored.read(leaf, like), sharding)

        return jax.tree.map_with_path(place, self._dtypes(path))

    def _dtypes(self, path: str) -> PyTree:
        return functools.reduce(lambda tree, key: tree[key], path.split("/"), self.params)


def _homes(place: WeightPlace, rules: AxisRules) -> list[Sharding]:
    """Return where the weights are that are not in the device's memory, in turns; []: in files.

    Raises:
      ConfigError: they are to be on other devices, and there are none.
    """
    if place == "files":
        return []
    if place == "host":
        return [rules.sharding(jax.P()).with_memory_kind("pinned_host")]
    peers = [device for device in jax.local_devices() if device not in rules.mesh.devices]
    if not peers:
        raise ConfigError("there is no other device to hold weights; use --weights host, or files.")
    return [SingleDeviceSharding(device) for device in peers]


def _bytes(tree: PyTree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
