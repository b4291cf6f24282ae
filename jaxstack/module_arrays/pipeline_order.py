"""A Transformer whose layers are stored in the order of pipeline stages, so that a device holds only its own.

In checkpoints and in merged models the layers are in the model's order, independent of the layout: a train state is
converted when it is saved and restored, leaf by leaf, by name.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxstack.checkpoint.leaves import name_leaves
from jaxstack.errors import ConfigError
from jaxstack.models import Transformer, in_fp8
from jaxstack.module_arrays.module import Dict, ModuleArrays, State
from jaxstack.module_arrays.view import View
from jaxstack.parallel.pipeline.plan import StageLayout
from jaxstack.parameter_paths import path_name

_LAYER = re.compile(r"^(|.*/)decoder/layers/(\d+)/(.*)$")
"""Name of a leaf of a layer, also inside an optimizer's state."""


class StagedArrays(ModuleArrays):
    """A Transformer whose stacked layers are stored in pipeline order: by stage, with `chunks` groups of layers each.

    Its dicts of parameters have stages x chunks x rows layers along the leading dim of stacked parameters; rows without
    a layer are zero, and stay so. Models made from them, and given to it, are the plain ones.

    Raises:
      ConfigError: it is no Transformer, or it has too few layers for the stages.
    """

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], stages: int, chunks: int = 1):
        self._plain = ModuleArrays(make)
        model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        if not isinstance(model, Transformer):
            raise ConfigError(
                f"parallel.pipeline cuts jaxstack.models.Transformer into stages; found {type(model).__name__}. "
                "Use the axes data, fsdp and tensor for it."
            )
        config = model.config
        dtype = model.dtype
        self.unrolled = not config.scan_layers
        """True if the layers of a stage are unrolled: every layer of the plain module then has its own leaves."""
        scanned = config.model_copy(update={"scan_layers": True})
        precision = model.precision

        def stacked(rngs):
            return in_fp8(Transformer(scanned, rngs, dtype=dtype), precision)

        super().__init__(stacked if self.unrolled else make)
        stack = self.merge_stage(self.abstract_params, self.abstract_non_params).decoder
        self._lead = stack.scanned.start
        self._period = stack.period
        self.layout = StageLayout(stack.repeats if stack.repeats > 1 else 1, stages, chunks)
        self.stages = stages
        rows = self.layout.order.size
        self._set_params(_with_rows(self._params, rows))
        self._set_non_params(_with_rows(self._non_params, rows))

    @property
    def plain(self) -> ModuleArrays:
        """The module with its layers in the model's order, as in checkpoints."""
        return self._plain

    def declaring(self, views: Sequence[Any]) -> "StagedArrays":
        other = super().declaring(views)
        other._plain = self._plain.declaring(views)
        return other

    @property
    def abstract_module(self) -> Any:
        return self.plain.abstract_module

    def fold(self, params: Dict) -> Dict:
        return self.plain.fold(self.to_plain(params, self.plain.abstract_params))

    def _freeze(self, is_frozen: Callable[[str], bool]) -> None:
        for path in (path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.plain.abstract_params)):
            staged = self._staged_name(path)[0]
            if is_frozen(path) != is_frozen(staged):
                raise ConfigError(
                    f"optimizer.groups: the pipeline stores {path} with other layers, as {staged}, and only one of the "
                    "two paths is frozen; drop the layer's number from the rule."
                )
        self.plain._freeze(is_frozen)
        super()._freeze(is_frozen)

    def store(self, params: Dict) -> Dict:
        """Reorder the layers of checkpoint parameters into the order of the pipeline stages. Traceable."""
        return self.from_plain(params, self.abstract_params)

    def init(self, key: jax.Array) -> tuple[Dict, Dict]:
        return self._staged(*self.plain.init(key))

    def merge(self, params: Dict, non_params: Dict) -> Any:
        """Build the whole model, with its layers in the model's order."""
        plain = self.plain
        return plain.merge(
            self.to_plain(params, plain.abstract_params), self.to_plain(non_params, plain.abstract_non_params)
        )

    def split(self, module: nnx.Module) -> tuple[Dict, Dict]:
        return self._staged(*self.plain.split(module))

    def _staged(self, params: Dict, non_params: Dict) -> tuple[Dict, Dict]:
        return self.store(params), self.from_plain(non_params, self.abstract_non_params)

    def merge_stage(self, params: Dict, non_params: Dict) -> Any:
        """Build the model that one stage runs: only this stage's layers are in its stack."""
        return super().merge(params, non_params)

    def split_stage(self, module: nnx.Module) -> tuple[Dict, Dict]:
        """Split a model built by `merge_stage` into (parameters, other variables)."""
        return super().split(module)

    @property
    def stores_plain(self) -> bool:
        """True if pipeline order equals the model's order, so that checkpoints need no conversion."""
        return self.layout.is_canonical and not self.unrolled

    def to_plain(self, state: State, wanted: State) -> State:
        """Convert a train state, or a part of it, from pipeline order to the model's order. Traceable."""
        leaves, _ = name_leaves(state)
        names, structure = name_leaves(wanted)
        found = []
        for name, shape in names.items():
            staged, group = self._staged_name(name)
            x = leaves[staged]
            if group is not None and self._is_stack(x, shape, self.layout.order.size):
                x = x[int(self.layout.places[group])] if self.unrolled else _pick_rows(x, self.layout.places)
            found.append(x)
        return structure.unflatten(found)

    def from_plain(self, state: State, wanted: State) -> State:
        """Convert a train state, or a part of it, from the model's order to pipeline order. Traceable."""
        leaves, _ = name_leaves(state)
        names, structure = name_leaves(wanted)
        sources: dict[str, list[Any]] = {}
        for name, x in leaves.items():  # leaves of unrolled layers in the order of their groups
            sources.setdefault(self._staged_name(name)[0], []).append((self._staged_name(name)[1], x))
        order = self.layout.order.reshape(-1)
        found = []
        for name, shape in names.items():
            group, x = sources[name][0]
            if group is not None and self._is_stack(x, shape, self.layout.groups):
                if self.unrolled:
                    by_group = dict(sources[name])
                    # Zeros for rows without a layer, and for the scaling states of layers that are in FP8 only here.
                    x = jnp.stack([by_group[g] if g in by_group else jnp.zeros_like(x) for g in order.tolist()])
                else:
                    x = _pick_rows(x, order)
            found.append(x)
        return structure.unflatten(found)

    def _is_stack(self, x: Any, wanted: Any, rows: int) -> bool:
        """Return True if a leaf of the train state has a leading dim over layers; False if all layers share it."""
        return x.shape != wanted.shape if self.unrolled else x.ndim > 0 and x.shape[0] == rows

    def _staged_name(self, name: str) -> tuple[str, int | None]:
        """Return (name in this module, index of its group of layers) for the name of a leaf in the plain module.

        The group is 0 if the leaf is a whole stack, and None if it is not part of the stack.
        """
        match = _LAYER.match(name)
        if match is None:
            return name, None
        before = match[1]
        index = int(match[2])
        after = match[3]
        place = index - self._lead
        if not self.unrolled:
            return name, 0 if 0 <= place < self._period else None
        stacked = self._period * self.layout.groups
        if place < 0:
            return name, None
        if place >= stacked:
            return f"{before}decoder/layers/{index - stacked + self._period}/{after}", None
        return f"{before}decoder/layers/{self._lead + place % self._period}/{after}", place // self._period


class PipelineOrder(View):
    """View that stores stacked layers in the order of pipeline stages, see `StagedArrays`.

    Args:
      stages: number of pipeline stages.
      chunks: groups of layers on each stage.
    """

    only_arranges = True

    def __init__(self, stages: int, chunks: int):
        self.stages = stages
        self.chunks = chunks

    def arrange(self, arrays: ModuleArrays) -> ModuleArrays:
        return StagedArrays(arrays.make, self.stages, self.chunks)


def _pick_rows(x: Any, rows: np.ndarray) -> Any:
    """Return x[rows], with zeros where a row is -1, by slicing: XLA's partitioner fails on a gather."""
    empty = rows < 0
    goes_on = np.where(empty[1:], empty[:-1], ~empty[:-1] & (np.diff(rows) == 1))
    parts = []
    for piece in np.split(rows, 1 + np.flatnonzero(~goes_on)):
        first = int(piece[0])
        count = len(piece)
        parts.append(jnp.zeros((count, *x.shape[1:]), x.dtype) if first < 0 else x[first : first + count])
    return jnp.concatenate(parts)


def _is_stacked(variable: Any) -> bool:
    axes = variable.get_metadata().get("logical_axes")
    return bool(axes) and axes[0] == "layers"


def _with_rows(flat: Any, rows: int) -> list[Any]:
    """Return the abstract variables, with the leading dim of those of stacked layers resized to `rows`."""

    def resize(variable: Any) -> Any:
        if not _is_stacked(variable):
            return variable
        shape = (rows, *variable.shape[1:])
        return variable.replace(jax.ShapeDtypeStruct(shape, variable.dtype), whole_shape=shape)

    return [(path, resize(variable)) for path, variable in flat]
