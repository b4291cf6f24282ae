"""Name and policy by which `jax.checkpoint` saves what the Hopper kernel of a feed-forward's first half computes."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

_NAME = "activated_product"


def name_products(product: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Give the input of an activation and the activation the name by which a `jax.checkpoint` policy can save them."""
    return checkpoint_name(product, _NAME), checkpoint_name(hidden, _NAME)


def save_activated_product(primitive: Primitive, *args: Any, **parameters: Any) -> bool:
    """Return True, as a `jax.checkpoint` policy, for the results of a kernel that contains a matmul.

    A policy that saves the results of matmuls would otherwise recompute this one: it is not a `dot_general`.
    """
    return jax.checkpoint_policies.save_only_these_names(_NAME)(primitive, *args, **parameters)
