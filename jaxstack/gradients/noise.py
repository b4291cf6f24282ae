"""The gradient noise scale, estimated from the microbatches of a step (McCandlish et al. 2018, arXiv:1812.06162).

A gradient g over b items has E|g|² = |G|² + S / b, with the true gradient G and the trace S of the covariance of one
item's gradient. Two batch sizes therefore determine both: the small batch is a microbatch, including any devices over
which its gradient is already summed, and the large one is the whole batch. With sharded weights no replica has
its own gradient, so replicas cannot be the small batches. Parameters that are summed over different devices have
small batches of different sizes; as all terms are sums over parameters, each group is estimated separately.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxstack.errors import ConfigError
from jaxstack.observe.noise_scale import noise_problem
from jaxstack.optim.build import is_load_signal
from jaxstack.parameter_paths import map_by_path


@dataclasses.dataclass(frozen=True, order=True)
class Group:
    """Mesh axes over which a parameter's gradient is sharded and summed; parameters with equal axes form a group.

    Attributes:
      split: manual axes that split the gradient of a microbatch.
      summed: manual axes over which it is summed already; `split` is a part of them.
      stored: manual axes that split the gradient of the whole batch.
    """

    split: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()


Squares = dict[Group, Float[Array, "..."]]
"""Group of parameters -> sum of squares of the local gradients, [] of one batch or [M] of M microbatches."""


def check_noise_layout(microbatches: int, axes: Mapping[str, int]) -> None:
    """Check that the gradient noise scale can be measured with this mesh and number of microbatches.

    Args:
      microbatches: number of microbatches of a step.
      axes: mesh axis -> number of devices.

    Raises:
      ConfigError: it cannot; the message says what to change.
    """
    problem = noise_problem(microbatches, axes)
    if problem:
        raise ConfigError(problem)


def sum_squares(gradients: PyTree, groups: PyTree | None = None) -> Squares:
    """Return, for each group of parameters, the sum of a device's squared gradients (without expert-balancing biases).

    Args:
      gradients: float arrays.
      groups: the `Group` of each of them; None: all are of one group that no axis splits.
    """
    kept = map_by_path(lambda path, g: jnp.zeros(()) if is_load_signal(path) else jnp.sum(jnp.square(g)), gradients)
    squares = jax.tree.leaves(kept)
    listed = jax.tree.leaves(groups) if groups is not None else [Group()] * len(squares)
    found: Squares = {}
    for group, square in zip(listed, squares, strict=True):
        found[group] = found.get(group, jnp.zeros(())) + square
    return found


def estimate_noise(
    small: Squares,
    small_count: Float[Array, " M"],
    large: Squares,
    large_count: Float[Array, ""],
    axes: tuple[str, ...] = (),
) -> dict[str, Float[Array, ""]]:
    """Return a step's estimates of the true gradient's squared norm (`gradient_signal`) and noise (`gradient_noise`).

    Both, |G|² and S, are unbiased: their means over many steps give the noise scale S / |G|², in items. Either may be
    negative in a single step.

    Args:
      small: sums of squares of the gradient sums of this device's microbatches, each [M].
      small_count: number of items of each of them.
      large: sums of squares of the gradient sums of the whole batch, each [].
      large_count: number of its items.
      axes: all manual mesh axes that split the batch.
    """
    signal = noise = jnp.zeros(())
    for group, squares in small.items():
        count = _sum(small_count, group.summed)
        norms = _sum(squares, group.split) / jnp.maximum(count, 1.0) ** 2
        seen = count > 0  # a microbatch may have padding only
        batches = jnp.maximum(_sum(jnp.sum(seen), axes), 1)
        small_norm = _sum(jnp.sum(jnp.where(seen, norms, 0.0)), axes) / batches
        inverse = _sum(jnp.sum(jnp.where(seen, 1 / jnp.maximum(count, 1.0), 0.0)), axes) / batches
        large_norm = _sum(large[group], group.stored) / jnp.maximum(large_count, 1.0) ** 2
        one = (small_norm - large_norm) / (inverse - 1 / jnp.maximum(large_count, 1.0))
        noise += one
        signal += large_norm - one / jnp.maximum(large_count, 1.0)
    return {"gradient_signal": signal, "gradient_noise": noise}


def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


Measure = Callable[[PyTree], Squares]
"""Function from the gradients of one microbatch to their sums of squares."""
