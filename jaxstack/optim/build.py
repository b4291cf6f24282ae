"""From an optimizer's and a schedule's configuration to one optax transformation."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxstack.optim.base import GroupRule, Optimizer, is_matrix
from jaxstack.tree_rules import ADAPTER, map_by_path, match

BALANCE = r"(^|/)balance_bias$"


def build_optimizer(
    optimizer: Optimizer,
    learning_rate: Callable[[jax.typing.ArrayLike], jax.Array],
    params: Any,
    known: Any = None,
    stacked: Any = None,
) -> optax.GradientTransformation:
    """Clip by global norm, the optimizer's core, decoupled weight decay, learning rate; frozen parameters left out.

    What `BALANCE` matches is no weight: it moves by `balance_rate` against the sign of its load, whatever the group.

    Args:
      learning_rate: step -> learning rate.
      params: the parameters or their shapes; their paths decide on groups, their ranks on weight decay.
      known: all parameters, where `params` are those that are trained.
      stacked: for each of `params` whether its first dim counts layers; default: none does.

    Raises:
      ConfigError: the path of a rule matches no parameter.
    """
    rules = [(group.path, group) for group in optimizer.groups]
    known = params if known is None else known
    optimizer.check(known)
    rules.append((".*", GroupRule(path=".*")))
    is_frozen = frozen_rule(optimizer, known)
    groups = map_by_path(lambda path, leaf: match(path, rules), params)

    is_group = lambda x: isinstance(x, GroupRule)  # noqa: E731
    matrix = map_by_path(is_matrix, params)

    def decay(group: GroupRule, matrix: bool) -> float:
        return group.weight_decay if group.weight_decay is not None else optimizer.weight_decay * matrix

    decays = jax.tree.map(decay, groups, matrix, is_leaf=is_group)
    scales = jax.tree.map(lambda group: group.learning_rate_scale, groups, is_leaf=is_group)
    clip = optax.identity() if optimizer.clip_norm is None else optax.clip_by_global_norm(optimizer.clip_norm)
    chain = optax.chain(
        clip,
        _finished(optimizer, jax.tree.map(lambda _: False, params) if stacked is None else stacked),
        _per_parameter(lambda update, param, amount: update + amount * param if amount else update, decays),
        optax.scale_by_learning_rate(learning_rate),
        _per_parameter(lambda update, param, scale: update * scale if scale != 1 else update, scales),
    )
    transforms = {"trained": chain, "frozen": optax.set_to_zero(), "balance": _against_sign(optimizer.balance_rate)}

    def label(path: str) -> str:
        if is_frozen(path):
            return "frozen"
        return "balance" if is_load_signal(path) else "trained"

    def labels(tree: Any) -> Any:
        return map_by_path(lambda path, leaf: label(path), tree)

    used = set(jax.tree.leaves(labels(params)))
    if used - {"trained"}:
        # By a function: what is stored may have its layers arranged otherwise than what is trained.
        chain = optax.partition({name: transforms[name] for name in sorted(used)}, labels)
    return chain


def frozen_rule(optimizer: Optimizer, params: Any) -> Callable[[str], bool]:
    """Whether the parameter of a path is frozen: as its group says, else where there are adapters and it is none."""
    rules = [(group.path, group.frozen) for group in optimizer.groups]
    adapted = any(jax.tree.leaves(map_by_path(lambda path, leaf: bool(ADAPTER.search(path)), params)))

    def is_frozen(path: str) -> bool:
        chosen = match(path, [*rules, (".*", None)])
        return chosen if chosen is not None else adapted and not ADAPTER.search(path)

    return is_frozen


def is_load_signal(path: str) -> bool:
    """Whether the "gradient" of the parameter is the load of experts (`jaxstack.models.moe.router.load_signal`)."""
    return match(path, ((BALANCE, True), (".*", False)))


def gradient_norm(gradients: Any) -> jax.Array:
    """The global norm of the gradients, loads of experts left out."""
    return optax.global_norm(map_by_path(lambda path, g: None if is_load_signal(path) else g, gradients))


def largest_overload(gradients: Any) -> jax.Array | None:
    """How much more than an even share the fullest expert of all layers got: 0 is even, 1 twice as much. None where no
    gradient tells the load."""
    loads = map_by_path(lambda path, g: jax.numpy.max(g) if is_load_signal(path) else None, gradients)
    found = jax.tree.leaves(loads)
    return jax.numpy.max(jax.numpy.stack(found)) if found else None


def _against_sign(rate: float) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: jax.tree.map(lambda u: -rate * jax.numpy.sign(u), updates))


def _finished(optimizer: Optimizer, stacked: Any) -> optax.GradientTransformation:
    """The core, and what it does to each layer's parameter by itself; the state is the core's."""
    core = optimizer.core()
    by_layer = lambda u, p, many: (jax.vmap(optimizer.finish) if many else optimizer.finish)(u, p)  # noqa: E731
    finish = _per_parameter(by_layer, stacked)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = core.update(updates, state, params)
        return finish.update(updates, optax.EmptyState(), params)[0], state

    return optax.GradientTransformation(core.init, update)


def _per_parameter(apply: Callable[[Any, Any, float], Any], constants: Any) -> optax.GradientTransformation:
    """`apply(update, parameter, constant)`, where each parameter has a constant of its own."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731

        def one(u: Any, p: Any, c: float) -> Any:
            return u if masked(u) else apply(u, p, c)

        return jax.tree.map(one, updates, params, constants, is_leaf=masked), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
