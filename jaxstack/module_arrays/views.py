"""Composes the views of a module's arrays, see `jaxstack.module_arrays.view`.

Views are listed and composed, as gradient transformations are in Optax:

    module = with_views(make_model, [Compression(rules), WeightNorm("kernel")])
    Trainer(module, loss_fn, data)

A new view is a subclass of `View` in its own file.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.module_arrays.adapters import Adapters
from jaxstack.module_arrays.companion import Companion
from jaxstack.module_arrays.module import Dict, ModuleArrays, State, make_arrays
from jaxstack.module_arrays.reward_head import RewardHead
from jaxstack.module_arrays.view import View, map_paths

__all__ = ["FOUND", "View", "ViewedArrays", "map_paths", "with_views"]

FOUND: tuple[type[View], ...] = (Companion, Adapters, RewardHead)
"""The kinds of views that a module asks for by what it is made of, see `View.find`."""


class ViewedArrays(ModuleArrays):
    """A module whose parameters the train state stores as a list of views says; see `with_views`.

    Args:
      used: the arrays that the module computes with, arranged by all views.
      views: the views that change parameters, each different ones. Those of `used` come after them.

    Raises:
      ConfigError: two views change the same parameter, or one does not fit the module.
    """

    def __init__(self, used: ModuleArrays, views: Sequence[View]):
        self.source = used
        """The arrays without the views that change parameters, as they were given."""
        self.views = (*(view.bind(used) for view in views), *used.views)
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

            used = ModuleArrays(changed).declaring(used.views)
        self._used = used
        super().__init__(used.make)
        self._set_non_params(used._non_params)
        variables = list(used._params)
        for view in self.views:
            variables = [item for path, variable in variables for item in view.stored_variables(path, variable)]
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

    @property
    def abstract_module(self) -> Any:
        return self._used.abstract_module

    def fold(self, params: Dict) -> Dict:
        return self._used.fold(self.load(params))

    def _freeze(self, is_frozen: Callable[[str], bool]) -> None:
        for view in self.views:
            view.check_frozen(is_frozen)
        self._used._freeze(is_frozen)
        super()._freeze(is_frozen)
        if self.plain is not self:
            self.plain._freeze(is_frozen)

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


def with_views(module: object, views: Sequence[View] = ()) -> ModuleArrays:
    """Return a module's arrays in the form that a list of views makes of them.

    Args:
      module: what `make_arrays` accepts. If it has views already, these come after the new ones; else those come last
        that it asks for by what it is made of (`FOUND`).
      views: the views, which change different parameters.

    Raises:
      ConfigError: a view does not fit the module, or two of them change the same parameter.
    """
    arrays = make_arrays(module)
    if arrays.views and not views:
        return arrays
    views = (*views, *(arrays.views or _find(arrays)))
    if isinstance(arrays, ViewedArrays):
        arrays = arrays.source
    for view in views:
        arrays = view.arrange(arrays)
    kept = [view for view in views if not view.only_arranges]
    arrays = arrays.declaring([view for view in kept if view.only_declares])
    changing = [view for view in kept if not view.only_declares]
    return ViewedArrays(arrays, changing) if changing else arrays


def _find(arrays: ModuleArrays) -> list[View]:
    """Return the views that a module asks for by what it is made of."""
    module = arrays.abstract_module
    return [view for kind in FOUND for view in kind.find(module)]


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
