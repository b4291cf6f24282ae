"""A module whose forward pass in training uses compressed (quantized, pruned or factorised) weights."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxstack.compressed_training.base import Stored, WeightRule
from jaxstack.compressed_training.compressible_weights import Weight, find_weights
from jaxstack.compressed_training.config import choose_rules
from jaxstack.errors import ConfigError
from jaxstack.functional.module import Dict, FunctionalModule, State, make_functional
from jaxstack.nested import flatten, nest
from pallas_kernels.weight_only.packed import PackedWeight


class CompressedModule(FunctionalModule):
    """A Flax module whose forward pass compresses weights by rules; training updates the float32 weights or factors.

    The train state holds what the methods store: float32 weights, or their factors. A step computes with `use`, once
    for all its microbatches and on global arrays, so that every layout is supported. In a pipeline, weights are stacks
    of layers in stage order. Stages with fewer layers have padding rows of zeros, which every method keeps zero.

    Args:
      module: what `make_functional` accepts, including a `StagedModule`.
      rules: the rules of `compression.rules`.

    Raises:
      ConfigError: a rule matches no weight, two methods match one, or a method cannot compress what it matches.
    """

    def __init__(self, module: object, rules: Sequence[WeightRule]):
        given = make_functional(module)
        self.rules = tuple(rules)
        model = nnx.eval_shape(lambda: given.make(nnx.Rngs(0)))
        self.chosen = choose_rules([_stored_in(given, weight) for weight in find_weights(model)], rules)
        """Path of a weight in `used` -> its rule, and the weight."""
        staged = given.plain is not given
        replaces = any(rule.replaces_matmul for rule in rules)
        if staged and replaces:
            raise ConfigError("compression.rules with activations do not support a pipeline; set parallel.pipeline=1.")
        self._used = FunctionalModule(lambda rngs: self._with_matmuls(given.make(rngs))) if replaces else given
        super().__init__(self._used.make)
        self._set_non_params(self._used._non_params)
        variables = self._used._params
        self._set_params([item for path, variable in variables for item in self._stored_variables(path, variable)])
        self._plain = CompressedModule(given.plain, rules) if staged else self

    def _with_matmuls(self, model: nnx.Module) -> nnx.Module:
        """Replace, in place, the matmuls of the layers whose rules ask for it."""
        for path, node in nnx.iter_modules(model):
            for name in vars(node):
                if (chosen := self.chosen.get("/".join(map(str, (*path, name))))) is not None:
                    chosen[0].replace_matmul(node, chosen[1])
        return model

    def _stored_variables(self, path: tuple[Any, ...], variable: Any) -> list[tuple[tuple[Any, ...], Any]]:
        rule, weight = self.chosen.get("/".join(map(str, path)), (None, None))
        parts = None if rule is None or weight is None else rule.stored_parts(weight.layout)
        if parts is None:
            return [(path, variable)]

        def part(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
            array = jax.ShapeDtypeStruct(shape, jnp.float32)
            return variable.replace(array, whole_shape=shape, logical_axes=axes)

        return [((*path, name), part(*parts[name])) for name in sorted(parts)]

    @property
    def used(self) -> FunctionalModule:
        return self._used

    @property
    def plain(self) -> "CompressedModule":
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
        return self._store(params), non_params

    def params_from_plain(self, params: Dict) -> Dict:
        """Convert uncompressed parameters to what the train state stores (weights, or their factors). Traceable."""
        return self._store(self._used.params_from_plain(params))

    def _store(self, params: Dict) -> Dict:
        return self._mapped(lambda rule, weight, w: rule.store(w, weight.layout), params)

    def merge(self, params: Dict, non_params: Dict) -> Any:
        """Build the module with compressed weights from stored parameters, for evaluation and export."""
        return self._used.merge(self.export(params), non_params)

    def split(self, module: nnx.Module) -> tuple[Dict, Dict]:
        params, non_params = self._used.split(module)
        return self._store(params), non_params

    def freeze(self, is_frozen: Callable[[str], bool]) -> None:
        for path, (rule, _) in self.chosen.items():
            if is_frozen(path):
                raise ConfigError(
                    f"compression.rules: {rule.path!r} matches {path}, which optimizer.groups freezes, so that it "
                    "cannot be trained in its compressed form; drop one of the two."
                )
        self._used.freeze(is_frozen)
        super().freeze(is_frozen)
        if self.plain is not self:
            self.plain.freeze(is_frozen)

    def use(self, params: Dict, key: jax.Array | None) -> tuple[Dict, jax.Array | None]:
        drawn = {} if key is None else self._draw(key)

        def use(rule: WeightRule, weight: Weight, stored: Stored) -> jax.Array:
            return rule.use(stored, weight.layout, drawn.get(weight.path))

        penalties = [rule.loss_term(self._get(params, path), weight.layout) for path, (rule, weight) in self._items()]
        found = [penalty for penalty in penalties if penalty is not None]
        return self._mapped(use, params), sum(found[1:], found[0]) if found else None

    def _draw(self, key: jax.Array) -> dict[str, jax.Array]:
        """Draw one (matrix, choice) pair uniformly among all matrices of the model; return {path: int32 [*stack]}.

        Only the drawn matrix has a value from 0 to its number of choices - 1. All parallel layouts draw the same.
        """
        count = 0
        begins = {}
        wanted = {}
        for path, (rule, weight) in self.plain.chosen.items():
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
        own = self._used.from_plain(_by_path(begins), _by_path(wanted))
        return {path: choice - self._get(own, path) for path in wanted}

    def export(self, params: Dict) -> Dict:
        return self._mapped(lambda rule, weight, stored: rule.export(stored, weight.layout), params)

    def master(self, params: Dict) -> Dict:
        """Convert stored parameters to unrounded float32 weights, as input of compression after training. Traceable."""
        return self._mapped(lambda rule, weight, stored: rule.master(stored, weight.layout), params)

    def keep_constraints(self, old: Dict, new: Dict) -> Dict:
        return self._mapped(lambda rule, weight, stored: rule.keep(self._get(old, weight.path), stored), new)

    def kept(self, params: Dict) -> dict[str, jax.Array]:
        """Count the values that an export stores for each compressed weight: {path: count}. Traceable."""
        return {path: rule.kept(self._get(params, path), weight.layout) for path, (rule, weight) in self._items()}

    def pack_rounding(self, params: Dict) -> dict[str, PackedWeight]:
        """Pack for inference the weights of layers that also round their inputs (W8A8).

        Plain exported weights would skip the rounding of the inputs.

        Returns:
          {path in the unrolled model: weight}.
        """
        rounding = {path: weight for path, (rule, weight) in self._items() if rule.replaces_matmul}
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
        for path, (rule, weight) in self._items():
            if not wanted(path):
                continue
            stored = self._get(params, path)
            layout = weight.layout
            stored = stored if isinstance(stored, dict) else layout.to_matrices(stored)
            for place in np.ndindex(*layout.stack_shape):
                layer, expert = (place[0], place[1:]) if layout.has_layers else (0, place)
                name = "/".join([weight.names[layer], *map(str, expert)])
                packed[name] = rule.pack(jax.tree.map(lambda x, place=place: x[place], stored))
        return packed

    def kept_of(self, params: Dict, path: str) -> jax.Array:
        """Count the values that an export would store for the weight at `path`, given uncompressed parameters."""
        rule, weight = self.chosen[path]
        return rule.kept(rule.store(self._get(params, path), weight.layout), weight.layout)

    def _items(self) -> list[tuple[str, tuple[WeightRule, Weight]]]:
        return list(self.chosen.items())

    @staticmethod
    def _get(params: Dict, path: str) -> Stored:
        for key in path.split("/"):
            params = params[key]
        return params

    def _mapped(self, change: Callable[[WeightRule, Weight, Stored], Stored], params: Dict) -> Dict:
        """Return the parameters with `change` applied to each compressed weight."""
        flat = flatten(params, stop=lambda path: "/".join(path) in self.chosen)
        for path in list(flat):
            if (name := "/".join(path)) in self.chosen:
                flat[path] = change(*self.chosen[name], flat[path])
        return nest(flat.items())


def _stored_in(module: FunctionalModule, weight: Weight) -> Weight:
    """Return a weight with the shape in which a module stores it, which in a pipeline may have rows without a layer."""
    shape = CompressedModule._get(module.abstract_params, weight.path).shape
    stages = module.stages if weight.layout.has_layers else 1
    return dataclasses.replace(weight, layout=dataclasses.replace(weight.layout, shape=tuple(shape), stages=stages))


def _by_path(leaves: Mapping[str, Any]) -> Dict:
    return nest((path.split("/"), leaf) for path, leaf in leaves.items())


def compress_in_training(module: object, rules: Sequence[WeightRule]) -> FunctionalModule:
    """Wrap a module for `Trainer` so that its weights are compressed (e.g. quantized) in every training step.

    Args:
      module: an NNX module, whose values are the initial ones, or a function of `nnx.Rngs` that makes one.
      rules: such as `[QatRule(path="kernel$", bits=4)]`; without rules the module is returned as it is.
    """
    return CompressedModule(module, rules) if rules else make_functional(module)
