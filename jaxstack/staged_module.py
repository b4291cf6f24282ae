"""A module whose stacked layers are stored in the order of the pipeline's stages, so that a device holds its own alone.

On disk, and for whoever asks for the module itself, the layers are in the model's order: see `to_canonical`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.functional import Dict, FunctionalModule
from jaxstack.parallel.pipeline import StageLayout


class StagedModule(FunctionalModule):
    """A FunctionalModule laid out for `stages` x `chunks` virtual stages.

    Its dicts of parameters have `layout.stages x chunks x rows` layers along the leading dim of stacked parameters;
    rows without a layer are zero, and stay so. Modules made from them, and given to it, are the model's own.

    Raises:
      ConfigError: the module has no stacked layers, or too few for the stages.
    """

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], stages: int, chunks: int = 1):
        super().__init__(make)
        sizes = {variable.shape[0] for _, variable in self._params if _is_stacked(variable)}
        if len(sizes) != 1:
            raise ConfigError(
                "parallel.pipeline needs layers that repeat and are stacked (model.scan_layers=true, and at least two "
                "repetitions of model.layer_types); found none. Set parallel.pipeline=1, or change the model."
            )
        self.layout = StageLayout(sizes.pop(), stages, chunks)
        rows = self.layout.order.size
        self._params = [
            (path, _with_rows(variable, rows) if _is_stacked(variable) else variable) for path, variable in self._params
        ]
        self._stacked = self._tree({path: _is_stacked(variable) for path, variable in self._params})
        canonical = self.abstract_params
        self.canonical_params = canonical
        self.abstract_params = jax.eval_shape(self._stage, canonical)

    def merge(self, params: Dict, rest: Dict) -> Any:
        """The module, its layers in the model's order."""
        return super().merge(self._unstage(params), rest)

    def merge_stage(self, params: Dict, rest: Dict) -> Any:
        """The module with the rows of one stage as its stacked layers."""
        return super().merge(params, rest)

    def split(self, module: nnx.Module) -> tuple[Dict, Dict]:
        params, rest = super().split(module)
        return self._stage(params), rest

    def split_stage(self, module: nnx.Module) -> Dict:
        """The parameters of a module made by `merge_stage`."""
        return super().split(module)[0]

    def to_canonical(self, optimizer: optax.GradientTransformation, state: Any) -> Any:
        """A train state (or its shapes) in the model's order of layers, as checkpoints hold it. Traceable."""
        return self._convert(optimizer, state, self.canonical_params, self._take, self.layout.order.size)

    def from_canonical(self, optimizer: optax.GradientTransformation, state: Any) -> Any:
        """The inverse of `to_canonical`."""
        return self._convert(optimizer, state, self.abstract_params, self._spread, self.layout.groups)

    def _convert(
        self, optimizer: optax.GradientTransformation, state: Any, wanted: Any, change: Callable[..., Any], rows: int
    ) -> Any:
        def moment(leaf: Any, stacked: bool) -> Any:
            # Factored moments keep the leading dim too.
            return change(leaf) if stacked and leaf.ndim and leaf.shape[0] == rows else leaf

        moments = optax.tree_utils.tree_map_params(optimizer, moment, state.optimizer, self._stacked)
        params = jax.tree.map(lambda x, stacked: change(x) if stacked else x, state.params, self._stacked)
        return state._replace(params=params, optimizer=moments)

    def _stage(self, params: Dict) -> Dict:
        return jax.tree.map(lambda x, stacked: self._spread(x) if stacked else x, params, self._stacked)

    def _unstage(self, params: Dict) -> Dict:
        return jax.tree.map(lambda x, stacked: self._take(x) if stacked else x, params, self._stacked)

    def _take(self, x: Any) -> Any:
        return x if self.layout.is_canonical else x[self.layout.places]

    def _spread(self, x: Any) -> Any:
        if self.layout.is_canonical:
            return x
        order = self.layout.order.reshape(-1)
        held = (order >= 0).reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(held, x[np.maximum(order, 0)], jnp.zeros((), x.dtype))

    def _tree(self, values: dict[Any, Any]) -> Dict:
        tree: Dict = {}
        for path, value in values.items():
            branch = tree
            for key in path[:-1]:
                branch = branch.setdefault(str(key), {})
            branch[str(path[-1])] = value
        return tree


def _is_stacked(variable: Any) -> bool:
    axes = variable.get_metadata().get("logical_axes")
    return bool(axes) and axes[0] == "layers"


def _with_rows(variable: Any, rows: int) -> Any:
    shape = (rows, *variable.shape[1:])
    return variable.replace(jax.ShapeDtypeStruct(shape, variable.dtype), whole_shape=shape)
