"""A Flax module, NNX or Linen, as plain nested dicts of arrays and a function that merges them into a module.

The train state holds dicts, not modules: they flatten fast, checkpoint without classes, and need no NNX in a step.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, cast

import jax
import numpy as np
from flax import linen as nn
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.models.initialization import Width
from jaxstack.models.low_precision import count_fp8_matmuls
from jaxstack.parallel.rules import AxisRules
from jaxstack.parameter_paths import flatten, nest, split_paths
from jaxstack.precision import ScalingState, update_scaling

State = TypeVar("State")
V = TypeVar("V")
Dict = dict[str, Any]
"""Nested dicts with arrays, or something for each array, as leaves."""
NNXFactory = Callable[[nnx.Rngs], nnx.Module]


class ModuleArrays:
    """The structure of a Flax module's arrays: splits a module into nested dicts of arrays, and merges them again.

    It holds no arrays itself, but shapes, dtypes and metadata of each by its path.

    Args:
      make: builds the NNX module from `nnx.Rngs`; it is traced, so nothing is allocated before `init`.
    """

    stages: int = 1
    """Number of pipeline stages that hold equal parts of stacked parameters; 1: no pipeline."""

    def __init__(self, make: NNXFactory):
        self.make = make
        abstract = nnx.eval_shape(lambda: _check_made(make(nnx.Rngs(0))))
        self.gathers_weights = bool(getattr(abstract, "gathers_weights", False))
        """True if the module's class says (`gathers_weights`) that it gathers its weights where it uses them."""
        self.drops_tokens = bool(getattr(abstract, "drops_tokens", False))
        """True if a train step must add `dropout_keys` to the module's batches."""
        self.width: Width | None = getattr(abstract, "width", None)
        """The width of a model in muP."""
        self.dtype = getattr(abstract, "dtype", None) if self.gathers_weights else None
        """The compute dtype of a module that gathers its weights; None: unknown."""
        for variable in jax.tree.leaves(nnx.state(abstract, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)):
            variable.set_metadata(whole_shape=variable.shape)
        self._graphdef, params, non_params = nnx.split(abstract, nnx.Param, ...)
        self._set_non_params(nnx.to_flat_state(non_params))
        self.fp8_matmuls = count_fp8_matmuls(abstract)
        self._scaling = [
            tuple(map(str, path)) for path, variable in self._non_params if issubclass(variable.type, ScalingState)
        ]
        self._is_frozen: Callable[[str], bool] = lambda path: False
        self._set_params(nnx.to_flat_state(params))

    def _set_params(self, params: Any) -> None:
        self._params = params
        self.abstract_params = _nested(params)

    def _set_non_params(self, non_params: Any) -> None:
        self._non_params = non_params
        self.abstract_non_params = _nested(non_params)

    views: tuple[Any, ...] = ()
    """The views through which the train state stores the arrays, see `jaxstack.module_arrays.views`."""

    def view(self, kind: type[V]) -> V | None:
        """Return the first view of a kind, or None."""
        return next((view for view in self.views if isinstance(view, kind)), None)

    def declaring(self, views: Sequence[Any]) -> Self:
        """Return a copy with views that change no parameter, bound to these arrays.

        Raises:
          ConfigError: a view does not fit the module.
        """
        other = copy.copy(self)
        other.views = tuple(view.bind(self) for view in views)
        return other

    @property
    def plain(self) -> "ModuleArrays":
        """The module with layers in the order of checkpoints: `self`, except under pipeline parallelism."""
        return self

    @property
    def stores_plain(self) -> bool:
        """True if a checkpoint holds the train state as it is, so that `to_plain` and `from_plain` convert nothing."""
        return True

    def store(self, params: Dict) -> Dict:
        """Convert parameters of the module, in the model's layer order, to what the train state stores. Traceable."""
        return params

    @property
    def used(self) -> "ModuleArrays":
        """The arrays that the forward pass computes with: `self`, except if views change them for the train state."""
        return self

    def use(self, params: Dict, key: jax.Array | None) -> tuple[Dict, jax.Array | None]:
        """Return the parameters for the forward pass, and a term to add to the mean loss (None: no term).

        Differentiable. `params` have the form that the train state stores; `key` draws what is random.
        """
        del key
        return params, None

    def load(self, params: Dict) -> Dict:
        """Convert parameters from the form in the train state to the form for evaluation and export. Traceable."""
        return params

    def keep(self, old: Dict, new: Dict) -> Dict:
        """Return the parameters `new` after an optimizer step with constraints, such as a pruning mask, enforced."""
        del old
        return new

    def to_plain(self, state: State, wanted: State) -> State:
        """Convert a train state from the form in which this module trains to the form in checkpoints. Traceable.

        Args:
          state: the train state, or a part of it, such as the parameters.
          wanted: shapes of the result.
        """
        del wanted
        return state

    def from_plain(self, state: State, wanted: State) -> State:
        """Convert a train state from the form in checkpoints to the form in which this module trains. Traceable.

        Args:
          state: the train state, or a part of it, such as the parameters.
          wanted: shapes of the result.
        """
        del wanted
        return state

    def init(self, key: jax.Array) -> tuple[Dict, Dict]:
        """Initialize the module: return (parameters, other variables such as statistics and random states)."""
        return self.split(self.make(nnx.Rngs(key)))

    def split(self, module: nnx.Module) -> tuple[Dict, Dict]:
        """Split a module of this structure into (parameters, other variables), as nested dicts of arrays."""
        _, params, non_params = nnx.split(module, nnx.Param, ...)
        return _nested(nnx.to_flat_state(params)), _nested(nnx.to_flat_state(non_params))

    def merge(self, params: Dict, non_params: Dict) -> Any:
        """Build the module from nested dicts of its parameters and its other variables."""
        return nnx.merge(self._graphdef, _filled(self._params, params), _filled(self._non_params, non_params))

    @property
    def abstract_module(self) -> Any:
        """The module that steps compute with, whose arrays are `jax.ShapeDtypeStruct`."""
        return self.merge(self.abstract_params, self.abstract_non_params)

    def fold(self, params: Dict) -> Dict:
        """Return the parameters of the model without what the views add, which compute the same. Traceable.

        They are in the order of checkpoints, and in the form for evaluation and export.
        """
        if not self.views:
            return params
        module = self.merge(params, self.abstract_non_params)
        for view in self.views:
            module = view.fold(module)
        return self.split(module)[0]

    def freeze(self, chosen: Callable[[str], bool | None]) -> None:
        """Exclude parameters from training: they get no gradient and no optimizer state.

        Args:
          chosen: returns for the path of a parameter whether to exclude it; None: the views decide.

        Raises:
          ConfigError: all parameters are excluded, or a view does not allow it.
        """

        def is_frozen(path: str) -> bool:
            found = chosen(path)
            return not self.trains(path) if found is None else found

        self._freeze(is_frozen)

    def _freeze(self, is_frozen: Callable[[str], bool]) -> None:
        self._is_frozen = is_frozen
        if not self.abstract_params:
            raise ConfigError("the module has no parameters (flax.nnx.Param), so that there is nothing to train.")
        if not jax.tree.leaves(self.split_frozen(self.abstract_params)[0]):
            raise ConfigError("every parameter is frozen, so that nothing is left to train; see optimizer.groups.")

    def trains(self, path: str) -> bool:
        """Return whether the views have the parameter at a path trained, where no rule says whether it is."""
        found = [view.trains(path) for view in self.views]
        return True in found or False not in found

    def adds(self, path: str) -> bool:
        """Return True if a view adds the parameter at a path to the model that a run starts from."""
        return any(view.adds(path) for view in self.views)

    def saves(self, path: str) -> bool:
        """Return True if checkpoints hold the parameter at a path; others are read from elsewhere, and never trained.

        Which these are, the views say.
        """
        return all(view.saves(path) for view in self.views)

    def split_saved(self, params: Dict) -> tuple[Dict, Dict]:
        """Split parameters into (those that checkpoints hold, others)."""
        return split_paths(params, self.saves)

    def check_dtypes(self) -> None:
        """Check that every trained parameter has a dtype that can be differentiated.

        Raises:
          TypeError: one of them consists of integers or booleans.
        """
        for path, leaf in flatten(self.split_frozen(self.abstract_params)[0]).items():
            if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
                raise TypeError(
                    f"the parameter {'/'.join(path)} has dtype {leaf.dtype}, which has no gradient: make it a float32 "
                    "array, or a flax.nnx.Variable in place of a flax.nnx.Param."
                )

    def split_frozen(self, params: Dict) -> tuple[Dict, Dict]:
        """Split parameters, or a tree of the same structure, into (trained, frozen)."""
        return split_paths(params, lambda path: self.saves(path) and not self._is_frozen(path))

    def join(self, *parts: Dict) -> Dict:
        """Merge parts, such as those that `split_frozen` returned, into one tree; the last that has a path counts."""
        return nest(item for part in parts for item in flatten(part).items())

    def split_added(self, params: Dict) -> tuple[Dict, Dict]:
        """Split parameters into (those that a run can start from, those that views add)."""
        return split_paths(params, lambda path: not self.adds(path))

    def complete(self, params: Dict, key: jax.Array) -> Dict:
        """Add what views add to the model that a run starts from, newly initialized. Traceable.

        Args:
          params: what the train state stores, without it.
          key: draws the initial values.
        """
        added = self.split_added(self.init(key)[0])[1]
        if not added:
            return params
        params = self.join(params, added)
        used = self.load(params)
        for view in self.views:
            params = view.begin(params, used)
        return params

    def split_scaling(self, non_params: Dict) -> tuple[Dict, Dict]:
        """Split non-parameter variables into (FP8 scaling states of matmuls, others)."""
        flat = flatten(non_params)
        scaling = {path: flat.pop(path) for path in self._scaling}
        return nest(scaling.items()), nest(flat.items())

    def renew_scaling(self, non_params: Dict, maxima: Dict) -> Dict:
        """Return the variables with their FP8 scaling states updated by the amax values that this step measured."""
        scaling, others = self.split_scaling(non_params)
        return self.join(update_scaling(scaling, maxima), others)

    def map_parameters(self, function: Callable[..., Any], rules: AxisRules) -> Dict:
        """Apply `function(logical axes or None, shape, metadata)` to every parameter; return nested dicts.

        Logical axes that the rules do not know count as None.
        """

        def apply(variable: Any) -> Any:
            metadata = variable.get_metadata()
            # Flax's own name for the same thing, which modules that were not written for us may carry.
            names = metadata.get("logical_axes") or metadata.get("out_sharding") or ()
            known = len(names) == len(variable.shape) and all(n is None or n in rules.table for n in names)
            return function(names if known else None, variable.shape, metadata)

        return nest((path, apply(variable)) for path, variable in self._params)

    def stacked_parameters(self, rules: AxisRules) -> Dict:
        """Return for each trained parameter, as nested dicts, True if its first dim stacks the weights of layers."""
        stacked = self.map_parameters(lambda names, *_: bool(names) and names[0] == "layers", rules)
        return self.split_frozen(stacked)[0]

    def parameter_specs(self, rules: AxisRules, zero: int = 0) -> Dict:
        """Return nested dicts with the PartitionSpec of each parameter, as it is sharded between steps.

        Args:
          rules: the mapping of logical axes onto the mesh.
          zero: `StepLayout.zero`.
        """
        return self.map_parameters(lambda names, shape, _: rules.stored_spec(names, shape, zero), rules)


def make_arrays(module: object) -> ModuleArrays:
    """Convert an NNX module (its values become the initial ones) or a function of `nnx.Rngs` to a ModuleArrays.

    A ModuleArrays is returned as it is.

    Raises:
      TypeError: the module is neither.
    """
    if isinstance(module, ModuleArrays):
        return module
    if isinstance(module, nnx.Module):
        graphdef, state = nnx.split(module)
        return ModuleArrays(lambda rngs: nnx.merge(graphdef, state))
    if isinstance(module, nn.Module) or (isinstance(module, type) and issubclass(module, nn.Module)):
        raise TypeError(
            "a Linen module learns its shapes from inputs: give "
            "jaxstack.module_arrays.linen.from_linen(module, *inputs) in its place."
        )
    if callable(module):
        _check_called(module)
        return ModuleArrays(cast(NNXFactory, module))
    raise TypeError(f"module must be a flax.nnx.Module or a function of nnx.Rngs; not {type(module).__name__}.")


def _check_called(function: Callable[..., object]) -> None:
    """Raise TypeError if a module-creating function cannot be called with `nnx.Rngs` as its only argument."""
    with contextlib.suppress(ValueError):  # a function without a signature that Python can read
        made = function.__init__ if isinstance(function, type) else function  # NNX's metaclass hides the signature
        signature = inspect.signature(made)
        try:
            signature.bind(*[None] * (2 if isinstance(function, type) else 1))
        except TypeError:
            raise TypeError(
                f"a function that creates the module is called with flax.nnx.Rngs alone; this one takes {signature}. "
                "Wrap it: lambda rngs: MyModule(..., rngs=rngs)."
            ) from None


def _check_made(made: object) -> nnx.Module:
    """Return what a function created, after checking that it is an NNX module with all its arrays in variables.

    Raises:
      TypeError: it did not.
    """
    if isinstance(made, nn.Module):
        raise TypeError(
            "the function returned a Linen module, which learns its shapes from inputs: give "
            "jaxstack.module_arrays.linen.from_linen(module, *inputs) in place of the function."
        )
    if not isinstance(made, nnx.Module):
        raise TypeError(f"the function of nnx.Rngs must return a flax.nnx.Module; it returned {type(made).__name__}.")
    for path, module in nnx.iter_modules(made):
        for name, value in vars(module).items():
            if isinstance(value, jax.Array | np.ndarray) and not isinstance(value, nnx.Variable):
                place = ".".join(map(str, (*path, name)))
                raise TypeError(
                    f"{place} of the module is a plain array, which no train state contains; make it a "
                    "flax.nnx.Variable, or a flax.nnx.Param if it is to be trained, and read it as x[...]."
                )
    return made


def _nested(flat: Any) -> Dict:
    return nest((path, variable.get_raw_value()) for path, variable in flat)


def _filled(flat: Any, tree: Dict) -> Any:
    def find(path: Any) -> Any:
        branch: Any = tree
        for key in path:
            branch = branch[str(key)]
        return branch

    return nnx.from_flat_state([(path, variable.replace(find(path))) for path, variable in flat])
