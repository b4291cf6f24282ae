"""View of frozen weights that stay packed (quantized) in the train state while adapters beside them are trained.

QLoRA (Dettmers et al. 2023, arXiv:2305.14314). A packed weight is an array of small integers with its scales. The train
state holds these arrays below `packed_base`: no gradients, no optimizer state, and no checkpoint has them. A step
computes with `PackedWeight`, as decoding does.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.errors import ConfigError
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.module_arrays.view import Path, View, get_path
from jaxstack.parameter_paths import flatten, nest
from pallas_kernels import PackedWeight

NAME = "packed_base"
"""Name of the branch of the parameters that has the arrays of the packed weights."""


class PackedBase(View):
    """View whose train state holds given weights packed; they are constants.

    Args:
      weights: path of each packed weight -> the weight, whose arrays may be `jax.ShapeDtypeStruct`.
    """

    def __init__(self, weights: Mapping[str, PackedWeight]):
        self.weights = dict(weights)
        self.paths = frozenset(weights)

    def bind(self, arrays: ModuleArrays) -> "PackedBase":
        """Return a copy of this view.

        Raises:
          ConfigError: the module has no parameter at one of the paths, or one of another shape.
        """
        known = {"/".join(path): leaf.shape for path, leaf in flatten(arrays.abstract_params).items()}
        for path, weight in self.weights.items():
            if known.get(path) != weight.shape:
                raise ConfigError(
                    f"the packed base has {path} of shape {weight.shape}, but the model has "
                    f"{known.get(path, 'no such weight')}; keep model.scan_layers and the sizes as in the base."
                )
        return copy.copy(self)

    def trains(self, path: str) -> bool | None:
        return False if path in self.paths else None

    def check_frozen(self, is_frozen: Callable[[str], bool]) -> None:
        trained = next((path for path in sorted(self.paths) if not is_frozen(path)), None)
        if trained is not None:
            raise ConfigError(
                f"optimizer.groups trains {trained}, which stays packed, and packed weights have no gradients; leave "
                "it frozen, or start from a plain copy of the model (jaxstack convert)."
            )

    def saves(self, path: str) -> bool:
        return path not in self.paths and not path.startswith(f"{NAME}/")

    def stored_variables(self, path: Path, variable: Any) -> list[tuple[Path, Any]]:
        weight = self.weights.get("/".join(map(str, path)))
        if weight is None:
            return [(path, variable)]

        def part(array: jax.Array) -> Any:
            shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
            return variable.replace(shape, whole_shape=array.shape, logical_axes=(None,) * array.ndim)

        return [((NAME, *path, name), part(array)) for name, array in sorted(weight.arrays.items())]

    def store(self, params: Dict) -> Dict:
        flat = flatten(params)
        packed = {path: flat.pop(path) for path in list(flat) if "/".join(path) in self.paths}
        for path, leaf in packed.items():
            # A newly initialized weight is a plain array, and the base's arrays are loaded after it.
            known = self.weights["/".join(path)].arrays
            zeros = {name: jnp.zeros(array.shape, array.dtype) for name, array in known.items()}
            arrays = leaf.arrays if isinstance(leaf, PackedWeight) else zeros
            flat.update({(NAME, *path, name): array for name, array in arrays.items()})
        return nest(flat.items())

    def load(self, params: Dict) -> Dict:
        base = params[NAME]
        own = flatten({name: value for name, value in params.items() if name != NAME})
        packed = {
            tuple(path.split("/")): dataclasses.replace(weight, arrays=get_path(base, path))
            for path, weight in self.weights.items()
        }
        return nest((own | packed).items())


def packed_arrays(weights: Mapping[str, PackedWeight]) -> Dict:
    """Return the arrays of packed weights, by path, as the train state holds them."""
    return nest(
        ((NAME, *path.split("/"), name), array)
        for path, weight in weights.items()
        for name, array in weight.arrays.items()
    )
