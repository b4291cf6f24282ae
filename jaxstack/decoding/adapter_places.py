"""Places of an engine's model for low-rank adapters, which are loaded and unloaded while it runs."""

import itertools
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.errors import ConfigError, nearest
from jaxstack.models.adapter_stack import AdapterMatrices, LayerSizes, add_adapter_stacks, check_matrices
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parameter_paths import flatten, nest


class PlacedAdapter(NamedTuple):
    """An adapter that is loaded."""

    name: str
    """Name by which requests ask for it."""
    number: int
    """Its place, from 1 on."""
    root: bytes
    """Digest of the empty prefix with it: no other adapter shares its cached prefixes."""


class AdapterPlaces:
    """The adapters of a model, each in one of a fixed number of places, so that no program is compiled for a new one.

    Args:
      model: gets the places, all empty.
      count: their number.
      rank: largest rank of an adapter.
    """

    def __init__(self, model: ModelOnMesh, count: int, rank: int):
        self.count = count
        self.rank = rank
        self._model = model
        self._loads = itertools.count(1)
        self._loading = threading.Lock()
        self._placed = dict[str, PlacedAdapter]()
        self._layers: Mapping[str, LayerSizes] = {}
        if count:
            self._add_places()

    def _add_places(self) -> None:
        """Give the model's layers a place for each adapter."""
        model = self._model
        make = model.module.make

        def make_adapted(rngs: nnx.Rngs) -> nnx.Module:
            made = make(rngs)
            self._layers = add_adapter_stacks(made, self.count, self.rank)
            return made

        module = ModuleArrays(make_adapted)
        own = flatten(model.params)
        specs = flatten(module.parameter_specs(model.rules))
        for path, leaf in flatten(module.abstract_params).items():
            if path not in own:
                sharding = model.rules.sharding(specs[path])
                own[path] = jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), sharding)
        model.module = module
        model.load(nest(own.items()), model.non_params)

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters."""
        return list(self._placed)

    def find(self, name: str) -> PlacedAdapter:
        """Return the adapter of a name.

        Raises:
          ConfigError: there is none.
        """
        if name not in self._placed:
            raise ConfigError(f"there is no adapter {name!r}; {nearest(name, self._placed)}")
        return self._placed[name]

    def load(self, name: str, matrices: AdapterMatrices, used: Callable[[], Collection[int]]) -> None:
        """Put an adapter into a free place.

        Args:
          name: name by which requests ask for it.
          matrices: its matrices.
          used: returns the numbers of the places that unfinished requests use.

        Raises:
          ConfigError: a matrix does not fit the model, there is an adapter of this name, or no place is free.
        """
        self._check(name, matrices)
        with self._loading:
            if name in self._placed:
                raise ConfigError(f"an adapter {name!r} is loaded already; unload it first, or choose another name.")
            taken = {adapter.number for adapter in self._placed.values()} | {*used()}
            number = next((number for number in range(1, self.count + 1) if number not in taken), None)
            if number is None:
                raise ConfigError(
                    f"all {self.count} places of adapters (engine.adapters) are in use, by {', '.join(self.names)} or "
                    "by unfinished requests; unload an adapter first."
                )
            self._write(number, matrices)
            self._placed[name] = PlacedAdapter(name, number, f"adapter {next(self._loads)}".encode())

    def _write(self, number: int, matrices: AdapterMatrices) -> None:
        """Write matrices into a place: those of layers that the adapter does not change are zero."""
        params = flatten(self._model.params)
        with jax.set_mesh(self._model.rules.mesh):
            for path in self._layers:
                for kind, axis in (("a", -2), ("b", 0)):
                    key = (*path.split("/"), "adapter", kind)
                    own = None if path not in matrices else getattr(matrices[path], kind)
                    params[key] = _replace(params[key], own, number - 1, axis)
        self._model.params = nest(params.items())

    def unload(self, name: str) -> None:
        """Forget an adapter, which requests that began with it still use.

        Raises:
          ConfigError: there is none of this name.
        """
        del self._placed[self.find(name).name]

    def _check(self, name: str, matrices: AdapterMatrices) -> None:
        check_matrices(matrices, self._layers, f"the adapter {name!r}")
        rank = max((layer.a.shape[-1] for layer in matrices.values()), default=0)
        if rank > self.rank:
            raise ConfigError(
                f"the adapter {name!r} has rank {rank}; start the server with engine.adapter_rank={rank} or more."
            )


def _replace(stack: Array, values: np.ndarray | None, index: int, axis: int) -> Array:
    """Return a stack of matrices with the one at `index` replaced by `values`, zeros beside them (None: by zeros)."""
    axis = axis % stack.ndim
    shape = stack.shape[:axis] + stack.shape[axis + 1 :]
    whole = np.zeros(shape, np.float32)
    if values is not None:
        whole[tuple(slice(size) for size in values.shape)] = values
    return jax.device_put(_put(stack, whole, np.int32(index), axis=axis), stack.sharding)


@partial(jax.jit, static_argnames="axis")
def _put(stack: Array, whole: Array, index: Int[Array, ""], *, axis: int) -> Array:
    return jax.lax.dynamic_update_index_in_dim(stack, whole.astype(stack.dtype), index, axis)
