"""The interface of views: special handling of some of a module's parameters in training, checkpoints and export.

A view changes some parameters, for example to factors of low rank or to a direction and a length, and says how a step
gets back what the module computes with. Or it says that some of them are not trained, not saved, or not part of the
model that a run starts from. `jaxstack.module_arrays.views` composes a list of them.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.parameter_paths import flatten, nest

Path = tuple[Any, ...]
Reader = Callable[[str], Any]
"""Path of a parameter, such as `layer/kernel` -> its array or dict of arrays, in host memory."""


class View:
    """Special handling of some of a module's parameters: how they are stored, trained and saved; by default none.

    A subclass that changes parameters implements `bind`, `stored_variables`, `store`, `use` and `load`; one that
    constrains them implements `keep`; one that changes the order of all arrays implements `arrange` alone; one that
    says what becomes of parameters that the module itself has implements `find`, and some of `trains`, `saves`, `adds`,
    `begin`, `fold` and `read`.
    """

    paths: frozenset[str] = frozenset()
    """Paths of the parameters that this view changes, such as `layer/kernel`; known after `bind`."""
    only_arranges: bool = False
    """True if the view has no other function than `arrange`."""
    only_declares: bool = False
    """True if the view changes no parameter, so that steps compute with what the train state stores."""
    feature: str | None = None
    """Feature that the view belongs to, by its name in the table of what excludes what (`jaxstack.config.features`)."""
    changes_layers: bool = False
    """True if `change_layers` replaces layers of the module."""

    @classmethod
    def find(cls, module: nnx.Module) -> Sequence["View"]:
        """Return the views of this kind that a module asks for by what it is made of; its arrays are abstract."""
        del module
        return ()

    def trains(self, path: str) -> bool | None:
        """Return whether the parameter at a path is trained, where the optimizer's groups do not say; None: no opinion.

        A parameter is trained if one view says so, or none says that it is not.
        """
        del path
        return None

    def adds(self, path: str) -> bool:
        """Return True if a run initializes the parameter at a path, as the model that it starts from has none."""
        del path
        return False

    def begin(self, params: Dict, used: Dict) -> Dict:
        """Return the parameters with which a run starts from another model's. Traceable.

        Args:
          params: what the train state stores; what views add is newly initialized.
          used: what the module computes with.
        """
        del used
        return params

    def fold(self, module: nnx.Module) -> nnx.Module:
        """Return the module, changed in place, without what the view adds to it, computing the same. Traceable."""
        return module

    def read(self, path: str, stored: Reader) -> Any:
        """Return the parameter at a path of the module after `load` and `fold`, for one that is read from disk alone.

        Args:
          path: path of the parameter, such as `layer/kernel`.
          stored: returns the array, or dict of arrays, at a path of a checkpoint.
        """
        return stored(path)

    def saves(self, path: str) -> bool:
        """Return False if checkpoints leave out the parameter at a path, because it is read from elsewhere.

        Such a parameter is never trained. `Trainer.load_unsaved` sets it.
        """
        del path
        return True

    def arrange(self, arrays: ModuleArrays) -> ModuleArrays:
        """Return the arrays in the order in which steps store and compute with them, such as that of pipeline stages.

        Raises:
          ConfigError: the module cannot be arranged so.
        """
        return arrays

    def bind(self, arrays: ModuleArrays) -> "View":
        """Return a copy of this view that knows the parameters it changes (`paths`).

        Args:
          arrays: the module's arrays in the form that it computes with, arranged by all views.

        Raises:
          ConfigError: the view does not fit the module.
        """
        del arrays
        return copy.copy(self)

    def change_layers(self, model: nnx.Module) -> nnx.Module:
        """Return the module with layers replaced, in place, for example by some that round their inputs."""
        return model

    def stored_variables(self, path: Path, variable: Any) -> list[tuple[Path, Any]]:
        """Return what the train state stores for an abstract NNX variable, as pairs (path, variable)."""
        return [(path, variable)]

    def store(self, params: Dict) -> Dict:
        """Convert parameters that the module computes with to those that the train state stores. Traceable."""
        return params

    def use(self, params: Dict, key: jax.Array | None) -> tuple[Dict, jax.Array | None]:
        """Compute the parameters for the forward pass of a train step from the stored ones. Differentiable.

        Args:
          params: all stored parameters.
          key: draws what is random; None: nothing is.

        Returns:
          The parameters, and a penalty to add to the mean loss, a scalar (None: no penalty).
        """
        del key
        return self.load(params), None

    def load(self, params: Dict) -> Dict:
        """Convert stored parameters to those that evaluation and export compute with. Traceable."""
        return params

    def keep(self, old: Dict, new: Dict) -> Dict:
        """Return the stored parameters `new` after an optimizer step, with the view's constraint applied."""
        del old
        return new

    def check_frozen(self, is_frozen: Callable[[str], bool]) -> None:
        """Check that the view allows the rules of what is not trained.

        Args:
          is_frozen: returns True for the path of a parameter that is not trained.

        Raises:
          ConfigError: it does not.
        """


def map_paths(change: Callable[[str, Any], Any], params: Dict, paths: frozenset[str]) -> Dict:
    """Return parameters with `change(path, array or dict of arrays)` applied to those at the given paths."""
    flat = flatten(params, stop=lambda path: "/".join(path) in paths)
    for path in list(flat):
        if (name := "/".join(path)) in paths:
            flat[path] = change(name, flat[path])
    return nest(flat.items())


def get_path(params: Dict, path: str) -> Any:
    """Return the array, or dict of arrays, at a path such as `layer/kernel` of nested dicts."""
    for key in path.split("/"):
        params = params[key]
    return params
