"""Views: forms in which a train state stores a module's arrays, other than those that the module computes with.

A view changes some parameters, for example to factors of low rank or to a direction and a length, and says how a step
gets back what the module computes with. Views are listed and composed, as gradient transformations are in Optax:

    module = with_views(make_model, [Compression(rules), WeightNorm("kernel")])
    Trainer(module, loss_fn, data)

A new view is a subclass of `View` in its own file.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.module_arrays.module import Dict, ModuleArrays, State, make_arrays
from jaxstack.parameter_paths import flatten, nest

Path = tuple[Any, ...]


class View:
    """A form in which the train state stores some of a module's parameters. The default changes nothing.

    A subclass that changes parameters implements `bind`, `stored_variables`, `store`, `use` and `load`; one that
    constrains them implements `keep`; one that changes the order of all arrays implements `arrange` alone.
    """

    paths: frozenset[str] = frozenset()
    """Paths of the parameters that this view changes, such as `layer/kernel`; known after `bind`."""
    companions: tuple[str, ...] = ()
    """Companions of the module that the view adds for the parameters at `paths`, which are then not trained."""
    only_arranges: bool = False
    """True if the view has no other function than `arrange`."""
    changes_layers: bool = False
    """True if `change_layers` replaces layers of the module."""

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


class ViewedArrays(ModuleArrays):
    """A module whose parameters the train state stores as a list of views says; see `with_views`.

    Args:
      used: the arrays that the module computes with, arranged by all views.
      views: the views, which change different parameters.

    Raises:
      ConfigError: two views change the same parameter, or one does not fit the module.
    """

    def __init__(self, used: ModuleArrays, views: Sequence[View]):
        self.given = tuple(views)
        self.views = tuple(view.bind(used) for view in views)
        _check_different(self.views)
        if changing := [view for view in self.views if view.changes_layers]:
            if used.plain is not used:
                raise ConfigError(
                    "compression.rules with activations do not support a pipeline; set parallel.pipeline=1."
                )
            make = used.make

            def changed(rngs: nnx.Rngs) -> nnx.Module:
                model = make(rngs)
                for view in changing:
                    model = view.change_layers(model)
                return model

            used = ModuleArrays(changed)
        self._used = used
        super().__init__(used.make)
        self._set_non_params(used._non_params)
        variables = list(used._params)
        for view in self.views:
            variables = [item for path, variable in variables for item in view.stored_variables(path, variable)]
        self.companions = (*self.companions, *(name for view in self.views for name in view.companions))
        self._set_params(variables)
        self._plain = ViewedArrays(used.plain, views) if used.plain is not used else self

    @property
    def used(self) -> ModuleArrays:
        return self._used

    @property
    def plain(self) -> "ViewedArrays":
        return self._plain

    @property
    def stores_plain(self) -> bool:
        return self._used.stores_plain

    def to_plain(self, state: State, wanted: State) -> State:
        return self._used.to_plain(state, wanted)

    def from_plain(self, state: State, wanted: State) -> State:
        return self._used.from_plain(state, wanted)

    def init(self, key: jax.Array) -> tuple[Dict, Dict]:
        params, non_params = self._used.init(key)
        return self._stored(params), non_params

    def store(self, params: Dict) -> Dict:
        return self._stored(self._used.store(params))

    def _stored(self, params: Dict) -> Dict:
        for view in self.views:
            params = view.store(params)
        return params

    def merge(self, params: Dict, non_params: Dict) -> Any:
        """Build the module that evaluation and export use from stored parameters."""
        return self._used.merge(self.load(params), non_params)

    def split(self, module: nnx.Module) -> tuple[Dict, Dict]:
        params, non_params = self._used.split(module)
        return self._stored(params), non_params

    def freeze(self, is_frozen: Callable[[str], bool]) -> None:
        for view in self.views:
            view.check_frozen(is_frozen)
        self._used.freeze(is_frozen)
        super().freeze(is_frozen)
        if self.plain is not self:
            self.plain.freeze(is_frozen)

    def use(self, params: Dict, key: jax.Array | None) -> tuple[Dict, jax.Array | None]:
        penalties: list[jax.Array] = []
        for view in reversed(self.views):
            params, penalty = view.use(params, key)
            if penalty is not None:
                penalties.append(penalty)
        return params, sum(penalties[1:], penalties[0]) if penalties else None

    def load(self, params: Dict) -> Dict:
        for view in reversed(self.views):
            params = view.load(params)
        return params

    def keep(self, old: Dict, new: Dict) -> Dict:
        for view in self.views:
            new = view.keep(old, new)
        return new


def with_views(module: object, views: Sequence[View]) -> ModuleArrays:
    """Return a module's arrays in the form that a list of views makes of them.

    Args:
      module: what `make_arrays` accepts. If it has views already, these come after the new ones.
      views: the views, which change different parameters.

    Raises:
      ConfigError: a view does not fit the module, or two of them change the same parameter.
    """
    arrays = make_arrays(module)
    if not views:
        return arrays
    if isinstance(arrays, ViewedArrays):
        views = (*views, *arrays.given)
        arrays = arrays.used if not any(view.changes_layers for view in arrays.views) else make_arrays(arrays.make)
    for view in views:
        arrays = view.arrange(arrays)
    changing = [view for view in views if not view.only_arranges]
    return ViewedArrays(arrays, changing) if changing else arrays


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


def _check_different(views: Sequence[View]) -> None:
    known: dict[str, View] = {}
    for view in views:
        for path in sorted(view.paths):
            if path in known:
                raise ConfigError(
                    f"two views change the parameter {path}: {type(known[path]).__name__} and {type(view).__name__}; "
                    "give them rules that match different parameters."
                )
            known[path] = view
