"""Builds an Optax optimizer from the configurations of an optimizer and a learning-rate schedule."""

import operator
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from jaxstack.models.initialization import Width
from jaxstack.optim.base import GroupRule, Optimizer, RunInfo, StepOptimizer, is_matrix
from jaxstack.optim.mup import check_mup_support, clip_by_scaled_norm, rate_factor, scale_epsilon
from jaxstack.parameter_paths import map_by_path, match, path_name
from pallas_kernels.target import automatic_axes

_FEWEST_ROWS = 256
_MOST_ROWS = 4096
"""Bounds of the number of partial sums of a large array, a power of two that divides its size."""
_SMALL = 2**16
"""Arrays with fewer elements are concatenated without partial sums."""


def global_norm(tree: PyTree[Float[Array, "..."]]) -> Float[Array, ""]:
    """Return the square root of the sum of all elements' squares, as `optax.tree.norm` does.

    A model has hundreds of small arrays, and XLA launches two kernels for the sum of each. Here the squares of small
    arrays and partial sums of the large ones are concatenated and summed by one reduction, in float32. Under a mesh
    over which XLA partitions arrays this is `optax.tree.norm`: XLA would gather the arrays to concatenate them.
    """
    if automatic_axes() or not jax.tree.leaves(tree):
        return optax.tree.norm(tree)
    # Without the barrier XLA would sum each part of the concatenation in its own kernel.
    parts = jax.lax.optimization_barrier(jnp.concatenate([_partial_sums(x) for x in jax.tree.leaves(tree)]))
    return jnp.sqrt(parts.sum())


def _partial_sums(x: jax.Array) -> jax.Array:
    """Return float32 [R] whose sum is the sum of the squares of all elements."""
    squares = jnp.square(jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
    if x.size < _SMALL:
        return squares.reshape(-1)
    rows = min(x.size & -x.size, _MOST_ROWS)
    return squares.reshape(rows, -1).sum(axis=1) if rows >= _FEWEST_ROWS else squares.sum(keepdims=True).reshape(1)


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Return an Optax transformation that scales updates down to a global norm of `limit` if theirs is larger."""

    def update(updates: PyTree, params: PyTree = None) -> PyTree:
        norm = global_norm(updates)
        return jax.tree.map(lambda g: jnp.where(norm < limit, g, (g / norm.astype(g.dtype)) * limit), updates)

    return optax.stateless(update)


BALANCE = r"(^|/)balance_bias$"
"""Path of the bias that balances the load of experts; its "gradient" is the load."""


def build_optimizer(
    optimizer: Optimizer,
    learning_rate: Callable[[jax.typing.ArrayLike], jax.Array],
    params: PyTree,
    known: PyTree = None,
    stacked: PyTree = None,
    *,
    total_steps: int | None = None,
    width: Width | None = None,
    specs: PyTree = None,
) -> StepOptimizer:
    """Build an Optax optimizer: clipping by global norm, core update rule, weight decay, and learning rate.

    Frozen parameters are not updated. A balance bias (`BALANCE`) moves by `balance_rate` against the sign of its load,
    whatever its group.

    Args:
      optimizer: the settings.
      learning_rate: step -> learning rate.
      params: the trained parameters or their shapes; their paths decide on groups, their ranks on weight decay.
      known: all parameters, including frozen ones, of which each group must match one; default: `params`.
      stacked: True for each of `params` whose first dim counts layers; default: False for all.
      total_steps: number of steps of the run, for the optimizers that depend on it.
      width: the model's width, which decides on learning rates in muP; None: the standard parametrization.
      specs: PartitionSpec in which each of `params` is stored; default: they are on one device.

    Raises:
      ConfigError: the path of a rule matches no parameter, or the optimizer has no rule for muP.
    """
    if width is not None:
        check_mup_support(optimizer)
        optimizer = scale_epsilon(optimizer, width)
    known = params if known is None else known
    stacked = jax.tree.map(lambda _: False, params) if stacked is None else stacked
    chex.assert_trees_all_equal_structs(params, stacked)
    optimizer.check(known)
    frozen = frozen_by_groups(optimizer)
    scales, decays = _scales_and_decays(optimizer, params, width)
    run = RunInfo(learning_rate, total_steps, _by_path(specs))
    chain = optax.chain(
        _clipping(optimizer, width),
        _finished_core(optimizer, optimizer.core(run), stacked),
        _per_parameter(lambda update, param, amount: update + amount * param if amount else update, decays),
        optax.scale_by_learning_rate(learning_rate),
        _per_parameter(lambda update, param, scale: update * scale if scale != 1 else update, scales),
    )
    chain = optimizer.wrap(chain, run)
    transforms = {"trained": chain, "frozen": optax.set_to_zero(), "balance": _against_sign(optimizer.balance_rate)}

    def label(path: str) -> str:
        if frozen(path):
            return "frozen"
        return "balance" if is_load_signal(path) else "trained"

    def labels(tree: PyTree) -> PyTree:
        return map_by_path(lambda path, leaf: label(path), tree)

    used = set(jax.tree.leaves(labels(params)))
    if used - {"trained"}:
        # Labels are computed by path at each call: the layers of the stored state may be arranged differently from
        # those that are trained.
        chain = optax.partition({name: transforms[name] for name in sorted(used)}, labels)
    built = StepOptimizer(chain.init, optax.with_extra_args_support(chain).update)
    built.sampled_gradient = optimizer.sampled_gradient
    if type(optimizer).gradient_point is not Optimizer.gradient_point:
        built.gradient_point = optimizer.gradient_point
    return built


def _clipping(optimizer: Optimizer, width: Width | None) -> optax.GradientTransformation:
    """Return the clipping by global norm; for SGD in muP by a norm that does not depend on the width."""
    if optimizer.clip_norm is None:
        return optax.identity()
    if width is not None and optimizer.scales_with_gradient:
        return clip_by_scaled_norm(optimizer.clip_norm, width)
    return clip_by_global_norm(optimizer.clip_norm)


def _scales_and_decays(optimizer: Optimizer, params: PyTree, width: Width | None) -> tuple[PyTree, PyTree]:
    """Return the learning-rate factor and the weight decay of each parameter, from groups and muP."""
    rules = [*((group.path, group) for group in optimizer.groups), (".*", GroupRule(path=".*"))]
    groups = map_by_path(lambda path, leaf: match(path, rules), params)

    def is_group(x):
        return isinstance(x, GroupRule)

    def decay(group: GroupRule, matrix: bool) -> float:
        return group.weight_decay if group.weight_decay is not None else optimizer.weight_decay * matrix

    decays = jax.tree.map(decay, groups, map_by_path(is_matrix, params), is_leaf=is_group)
    scales = jax.tree.map(lambda group: group.learning_rate_scale, groups, is_leaf=is_group)
    if width is None:
        return scales, decays
    factors = map_by_path(lambda path, leaf: rate_factor(optimizer, width, path, leaf), params)
    return jax.tree.map(operator.mul, scales, factors), jax.tree.map(operator.truediv, decays, factors)


def _by_path(specs: PyTree) -> dict[str, PartitionSpec]:
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return {path_name(path): spec for path, spec in leaves}


def frozen_by_groups(optimizer: Optimizer) -> Callable[[str], bool | None]:
    """Return a function from a parameter's path to `frozen` of the first group that matches it; None without one."""
    rules = [*((group.path, group.frozen) for group in optimizer.groups), (".*", None)]
    return lambda path: match(path, rules)


def is_load_signal(path: str) -> bool:
    """Return True if a path is that of an expert-balancing bias, whose gradient is replaced by the experts' loads."""
    return match(path, ((BALANCE, True), (".*", False)))


def gradient_norm(gradients: PyTree) -> jax.Array:
    """Return the global norm of the gradients, leaving out the expert loads that are stored among them."""
    return global_norm(map_by_path(lambda path, g: None if is_load_signal(path) else g, gradients))


def _against_sign(rate: float) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: jax.tree.map(lambda u: -rate * jax.numpy.sign(u), updates))


def _finished_core(
    optimizer: Optimizer, core: optax.GradientTransformation, stacked: PyTree
) -> optax.GradientTransformation:
    """Return the core update rule followed by the optimizer's `finish`, applied to each layer by itself."""
    core = optax.with_extra_args_support(core)

    def by_layer(u, p, stack):
        return (jax.vmap(optimizer.finish) if stack else optimizer.finish)(u, p)

    finish = _per_parameter(by_layer, stacked)

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree = None, **extra: object
    ) -> tuple[PyTree, optax.OptState]:
        updates, state = core.update(updates, state, params, **extra)
        return finish.update(updates, optax.EmptyState(), params)[0], state

    return optax.GradientTransformationExtraArgs(core.init, update)


def _per_parameter(
    apply: Callable[[jax.Array, jax.Array, float], jax.Array], constants: PyTree
) -> optax.GradientTransformation:
    """Return an Optax transformation that calls `apply(update, parameter, constant)` for each parameter."""

    def update(updates: PyTree, state: optax.OptState, params: PyTree = None) -> tuple[PyTree, optax.OptState]:
        def masked(x):
            return isinstance(x, optax.MaskedNode)

        def one(u: jax.Array | optax.MaskedNode, p: jax.Array, c: float) -> jax.Array | optax.MaskedNode:
            return u if isinstance(u, optax.MaskedNode) else apply(u, p, c)

        return jax.tree.map(one, updates, params, constants, is_leaf=masked), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
