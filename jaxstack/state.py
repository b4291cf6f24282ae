"""The train state and its sharded initialization, in which no device ever holds more than its shards."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.parallel.rules import AxisRules, state_spec
from jaxstack.resilience.skipped_steps import StepHistory


class TrainState(NamedTuple):
    """Train state, which checkpoints store: parameters, optimizer state, random key, step count, recent losses."""

    step: jax.Array
    """[] int32: steps taken."""
    params: Any
    """Float32 master weights, nested dicts."""
    non_params: Any
    """The module's other variables: running statistics, random states."""
    optimizer: Any
    """The optax state, of the parameters that are trained."""
    key: jax.Array
    """The run's random key; step s uses fold_in(key, s)."""
    skipped: jax.Array
    """[] int32: consecutive steps skipped because loss or gradients were not finite, or spiked."""
    history: StepHistory
    """Loss and gradient norm of the last steps taken."""
    outer: Any = {}
    """State of the method that keeps workers together, see `jaxstack.local_sgd`; empty without workers."""


LATER_FIELDS = {"history": StepHistory.empty}
"""Field added after the first release -> function that makes its value for older checkpoints, which lack it."""


def init_state(module: ModuleArrays, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """Initialize a train state from a random key. To be jitted with sharded outputs, see `state_shardings`."""
    init_key, run_key = jax.random.split(key)
    params, non_params = module.init(init_key)
    zero = jnp.zeros((), jnp.int32)
    moments = optimizer.init(module.split_frozen(params)[0])
    return TrainState(zero, params, non_params, moments, run_key, zero, StepHistory.empty())


def abstract_state(module: ModuleArrays, optimizer: optax.GradientTransformation) -> TrainState:
    """Return shapes and dtypes of a model's train state, without computing it."""
    return jax.eval_shape(lambda: init_state(module, optimizer, jax.random.key(0)))


def with_shardings(shapes: TrainState, shardings: TrainState) -> TrainState:
    """Return the shapes and dtypes of a train state with shardings attached to them."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def start_shapes(module: ModuleArrays, rules: AxisRules, zero: int = 0) -> tuple[Dict, Dict]:
    """Return shapes, dtypes and shardings of a run's initial parameters, and of those that no checkpoint holds.

    Both are what a step computes with, in the order of checkpoints; the first are without what views add.
    Arguments as in `state_shardings`.
    """
    used = module.used.plain
    shardings = jax.tree.map(rules.sharding, used.parameter_specs(rules, zero))

    def shape(x, s):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)

    saved, unsaved = module.split_saved(jax.tree.map(shape, used.abstract_params, shardings))
    return module.split_added(saved)[0], unsaved


def state_shardings(
    module: ModuleArrays, optimizer: optax.GradientTransformation, rules: AxisRules, zero: int = 0
) -> TrainState:
    """Return the sharding of each array of a model's train state on the mesh.

    Parameters are sharded by the rules, optimizer state like its parameter (`state_spec`); everything else is
    replicated.

    Args:
      module: the module whose state it is.
      optimizer: the optimizer whose state it is.
      rules: the mapping of logical axes onto the mesh.
      zero: `StepLayout.zero`.
    """
    abstract = abstract_state(module, optimizer)
    specs = module.parameter_specs(rules, zero)
    whole = PartitionSpec()

    def moment(leaf: Any, param: Any, spec: PartitionSpec) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf  # parameters of another optimizer group have no moments here
        return state_spec(rules.mesh, spec, param.shape, leaf.shape)

    moments = optax.tree_utils.tree_map_params(
        optimizer,
        moment,
        abstract.optimizer,
        module.split_frozen(abstract.params)[0],
        module.split_frozen(specs)[0],
        transform_non_params=lambda _: whole,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    non_params = jax.tree.map(lambda _: whole, abstract.non_params)
    layout: Any = {
        "step": whole,
        "params": specs,
        "non_params": non_params,
        "optimizer": moments,
        "key": whole,
        "skipped": whole,
    }
    layout["history"] = jax.tree.map(lambda _: whole, abstract.history)
    layout = jax.tree.map(rules.sharding, layout, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return TrainState(**layout)
