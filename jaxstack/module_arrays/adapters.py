"""View of adapters (LoRA, DoRA): what becomes of their arrays and of the weights beside them.

An adapter itself stays a layer of the model (`jaxstack.models.adapters`): it computes x W + s (x A) B from a frozen,
maybe packed W, while a view's `use` could only hand the module W + s A B, a second copy of each weight with a gradient
of its size. The view says the rest: adapters are trained and all else is not, unless the optimizer's groups say
otherwise, so that W has neither gradient nor optimizer state; a run that starts from another model initializes them;
and for export, sampling and other runs they are merged into the weights.
"""

import copy
import re
from collections.abc import Mapping, Sequence

import numpy as np
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.models.adapters import Adaptable, adapted_layers, merge_adapters
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.module_arrays.view import Reader, View, get_path
from jaxstack.parameter_paths import flatten, nest

_PATH = re.compile(r"(^|/)adapter/")
"""Matches the paths of parameters that an adapter adds to a layer."""


class Adapters(View):
    """View of all adapters of a model."""

    only_declares = True
    feature = "adapters"

    layers: Mapping[str, Adaptable]
    """Path of a layer -> the layer, with its adapter; their arrays are abstract. Known after `bind`."""

    @classmethod
    def find(cls, module: nnx.Module) -> Sequence["Adapters"]:
        return [cls()] if adapted_layers(module) else []

    def bind(self, arrays: ModuleArrays) -> "Adapters":
        """Return a copy that knows the layers.

        Raises:
          ConfigError: the arrays are in the order of pipeline stages, which stack the weights of layers.
        """
        if arrays.stages > 1:
            raise ConfigError("adapters do not support a pipeline; use fsdp or tensor, or remove the adapters.")
        bound = copy.copy(self)
        bound.layers = adapted_layers(arrays.abstract_module)
        return bound

    def trains(self, path: str) -> bool:
        return self.adds(path)

    def adds(self, path: str) -> bool:
        return _PATH.search(path) is not None

    def begin(self, params: Dict, used: Dict) -> Dict:
        """Return the parameters with DoRA's magnitudes set to the norms of the weights that the run starts from."""
        flat = flatten(params)
        for path, layer in self.layers.items():
            if layer.adapter.magnitude is not None:
                kernel, a, b = (get_path(used, f"{path}/{name}") for name in ("kernel", "adapter/a", "adapter/b"))
                flat[(*path.split("/"), "adapter", "magnitude")] = layer.adapter.column_norms(kernel, a, b)
        return nest(flat.items())

    def fold(self, module: nnx.Module) -> nnx.Module:
        return merge_adapters(module)

    def read(self, path: str, stored: Reader) -> np.ndarray:
        layer, _, name = path.rpartition("/")
        if name != "kernel" or layer not in self.layers:
            return stored(path)
        adapter = self.layers[layer].adapter
        parts = ["a", "b"] if adapter.magnitude is None else ["a", "b", "magnitude"]
        return np.asarray(adapter.merge(stored(path), *(stored(f"{layer}/adapter/{part}") for part in parts)))
