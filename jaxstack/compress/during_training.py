"""View of a module's arrays whose forward pass in training uses compressed (quantized, pruned, factorised) weights."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxstack.compress.base import DuringTraining, Stored
from jaxstack.compress.config import choose_rules
from jaxstack.compress.matrix import Weight, find_weights
from jaxstack.errors import ConfigError
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.module_arrays.view import Path, Reader, View, get_path, map_paths
from jaxstack.module_arrays.views import with_views
from jaxstack.parameter_paths import nest
from pallas_kernels.weight_only.packed import PackedWeight


class Compression(View):
    """View whose forward pass compresses weights by rules; training updates the float32 weights or factors.

    The train state holds what the methods store: float32 weights, or their factors. A step computes with `use`, once
    for all its microbatches and on global arrays, so that every layout is supported. In a pipeline, weights are stacks
    of layers in stage order. Stages with fewer layers have padding rows of zeros, which every method keeps zero.

    Args:
      rules: the rules of `compression.rules`.
    """

    def __init__(self, rules: Sequence[DuringTraining]):
        self.rules = tuple(rules)
        self.changes_layers = any(rule.replaces_matmul for rule in rules)
        self.chosen: dict[str, tuple[DuringTraining, Weight]] = {}
        """Path of a weight that the module computes with -> its rule, and the weight; known after `bind`."""

    def bind(self, arrays: ModuleArrays) -> "Compression":
        """Return a copy that knows which weights the rules compress.

        Raises:
          ConfigError: a rule matches no weight, two methods match one, or a method cannot compress what it matches.
        """
        bound = copy.copy(self)
        model = nnx.eval_shape(lambda: arrays.make(nnx.Rngs(0)))
        weights = [weight for weight in find_weights(model) if arrays.saves(weight.path)]
        bound.chosen = choose_rules([_stored_in(arrays, weight) for weight in weights], self.rules)
        bound.paths = frozenset(bound.chosen)
        bound._arrays = arrays
        bound._in_plain_order = bound if arrays.plain is arrays else self.bind(arrays.plain)
        return bound

    _arrays: ModuleArrays
    _in_plain_order: "Compression"

    def change_layers(self, model: nnx.Module) -> nnx.Module:
        """Replace, in place, the matmuls of the layers whose rules ask for it."""
        for path, node in nnx.iter_modules(model):
            for name in vars(node):
                if (chosen := self.chosen.get("/".join(map(str, (*path, name))))) is not None:
                    chosen[0].replace_matmul(node, chosen[1])
        return model

    def stored_variables(self, path: Path, variable: Any) -> list[tuple[Path, Any]]:
        rule, weight = self.chosen.get("/".join(map(str, path)), (None, None))
        parts = None if rule is None or weight is None else rule.stored_parts(weight.layout)
        if parts is None:
            return [(path, variable)]

        def part(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
            array = jax.ShapeDtypeStruct(shape, jnp.float32)
            return variable.replace(array, whole_shape=shape, logical_axes=axes)

        return [((*path, name), part(*parts[name])) for name in sorted(parts)]

    def store(self, params: Dict) -> Dict:
        return self._mapped(lambda rule, weight, w: rule.store(w, weight.layout), params)

    def check_frozen(self, is_frozen: Callable[[str], bool]) -> None:
        for path, (rule, _) in self.chosen.items():
            if is_frozen(path):
                raise ConfigError(
                    f"compression.rules: {rule.path!r} matches {path}, which optimizer.groups freezes, so that it "
                    "cannot be trained in its compressed form; drop one of the two."
                )

    def use(self, params: Dict, key: jax.Array | None) -> tuple[Dict, jax.Array | None]:
        drawn = {} if key is None else self._draw(key)

        def use(rule: DuringTraining, weight: Weight, stored: Stored) -> jax.Array:
            return rule.use(stored, weight.layout, drawn.get(weight.path))

        penalties = [
            rule.loss_term(get_path(params, path), weight.layout) for path, (rule, weight) in self.chosen.items()
        ]
        found = [penalty for penalty in penalties if penalty is not None]
        return self._mapped(use, params), sum(found[1:], found[0]) if found else None

    def _draw(self, key: jax.Array) -> dict[str, jax.Array]:
        """Draw one (matrix, choice) pair uniformly among all matrices of the model; return {path: int32 [*stack]}.

        Only the drawn matrix has a value from 0 to its number of choices - 1. All parallel layouts draw the same.
        """
        count = 0
        begins = {}
        wanted = {}
        for path, (rule, weight) in self._in_plain_order.chosen.items():
            if each := rule.number_of_choices(weight.layout):
                matrices = np.arange(math.prod(weight.layout.stack_shape), dtype=np.int32)
                begins[path] = count + each * matrices.reshape(weight.layout.stack_shape)
                count += each * matrices.size
        if not count:
            return {}
        for path, (rule, weight) in self.chosen.items():
            if rule.number_of_choices(weight.layout):
                wanted[path] = np.empty(weight.layout.stack_shape, np.int32)
        choice = jax.random.randint(key, (), 0, count)
        # In a pipeline, rows without a layer begin at 0 too: what is drawn for them does not matter.
        own = self._arrays.from_plain(_by_path(begins), _by_path(wanted))
        return {path: choice - get_path(own, path) for path in wanted}

    def load(self, params: Dict) -> Dict:
        return self._mapped(lambda rule, weight, stored: rule.export(stored, weight.layout), params)

    def read(self, path: str, stored: Reader) -> Any:
        found = stored(path)
        if path not in self.chosen:
            return found
        rule, weight = self.chosen[path]
        return np.asarray(rule.export(jax.tree.map(jnp.asarray, found), weight.layout))

    def master(self, params: Dict) -> Dict:
        """Convert stored parameters to unrounded float32 weights, as input of compression after training. Traceable."""
        return self._mapped(lambda rule, weight, stored: rule.master(stored, weight.layout), params)

    def keep(self, old: Dict, new: Dict) -> Dict:
        return self._mapped(lambda rule, weight, stored: rule.keep(get_path(old, weight.path), stored), new)

    def kept(self, params: Dict) -> dict[str, jax.Array]:
        """Count the values that an export stores for each compressed weight: {path: count}. Traceable."""
        return {path: rule.kept(get_path(params, path), weight.layout) for path, (rule, weight) in self.chosen.items()}

    def pack_rounding(self, params: Dict) -> dict[str, PackedWeight]:
        """Pack for inference the weights of layers that also round their inputs (W8A8).

        Plain exported weights would skip the rounding of the inputs.

        Returns:
          {path in the unrolled model: weight}.
        """
        rounding = {path: weight for path, (rule, weight) in self.chosen.items() if rule.replaces_matmul}
        dims = {name: weight.layout.dims for weight in rounding.values() for name in weight.names}
        packed = self.pack(params, rounding.__contains__)
        return {name: cast(PackedWeight, weight).with_dims(*dims[name]) for name, weight in packed.items()}

    def pack(
        self, params: Dict, wanted: Callable[[str], bool] = lambda path: True
    ) -> dict[str, PackedWeight | jax.Array]:
        """Pack each compressed weight for export: one [out, in] matrix per layer and expert, keyed by path.

        Args:
          params: what the train state stores.
          wanted: returns True for the paths of the weights to pack.
        """
        packed: dict[str, PackedWeight | jax.Array] = {}
        for path, (rule, weight) in self.chosen.items():
            if not wanted(path):
                continue
            stored = get_path(params, path)
            layout = weight.layout
            stored = stored if isinstance(stored, dict) else layout.to_matrices(stored)
            for place in np.ndindex(*layout.stack_shape):
                layer, expert = (place[0], place[1:]) if layout.has_layers else (0, place)
                name = "/".join([weight.names[layer], *map(str, expert)])
                packed[name] = rule.pack(jax.tree.map(lambda x, place=place: x[place], stored))
        return packed

    def _mapped(self, change: Callable[[DuringTraining, Weight, Stored], Stored], params: Dict) -> Dict:
        """Return the parameters with `change` applied to each compressed weight."""
        return map_paths(lambda path, stored: change(*self.chosen[path], stored), params, self.paths)


def _stored_in(arrays: ModuleArrays, weight: Weight) -> Weight:
    """Return a weight with the shape in which a module stores it, which in a pipeline may have rows without a layer."""
    shape = get_path(arrays.abstract_params, weight.path).shape
    stages = arrays.stages if weight.layout.has_layers else 1
    return dataclasses.replace(weight, layout=dataclasses.replace(weight.layout, shape=tuple(shape), stages=stages))


def _by_path(leaves: Mapping[str, Any]) -> Dict:
    return nest((path.split("/"), leaf) for path, leaf in leaves.items())


def compress_in_training(module: object, rules: Sequence[DuringTraining]) -> ModuleArrays:
    """Wrap a module for `Trainer` so that its weights are compressed (e.g. quantized) in every training step.

    Args:
      module: an NNX module, whose values are the initial ones, or a function of `nnx.Rngs` that makes one.
      rules: such as `[QatRule(path="kernel$", bits=4)]`; without rules the module is returned as it is.
    """
    return with_views(module, [Compression(rules)] if rules else [])


def check_start(module: ModuleArrays, params: Dict) -> None:
    """Check that each method of compressed training can be used with the weights that a run starts from.

    Args:
      module: the module of the run.
      params: the parameters that it starts from, those of `module.used`.

    Raises:
      ConfigError: one cannot.
    """
    compression = module.plain.view(Compression)
    for path, (rule, _) in ({} if compression is None else compression.chosen).items():
        rule.check_start(path, get_path(params, path))


def describe_compression(module: ModuleArrays, params: Dict) -> list[str]:
    """Return one line per compression method used in training: number of weight values, and how many are stored.

    Args:
      module: the module of the run.
      params: what its train state stores.
    """
    plain = module.plain
    compression = plain.view(Compression)
    if compression is None:
        return []
    kept = jax.jit(lambda params: compression.kept(module.to_plain(params, plain.abstract_params)))(params)
    sizes: dict[str, list[int]] = {}
    for path, (rule, weight) in compression.chosen.items():
        sums = sizes.setdefault(rule.title, [0, 0])
        sums[0] += int(np.prod(weight.layout.shape))
        sums[1] += int(kept[path])
    return [
        f"{title}: {total:,} weights"
        + (f", of which {stored:,} ({stored / total:.1%}) are stored" if stored != total else "")
        for title, (total, stored) in sizes.items()
    ]
