"""Bytes of optimizer state per parameter, from the shapes of the state that the optimizer creates."""

import math

import jax
import jax.numpy as jnp

from jaxstack.optim.base import Optimizer
from jaxstack.optim.build import build_optimizer
from jaxstack.plan.model_shape import ModelShape


def optimizer_bytes(optimizer: Optimizer, shape: ModelShape) -> float:
    """Return the bytes of optimizer state divided by the number of parameters.

    Args:
      optimizer: settings of the optimizer; groups are left out.
      shape: the model, of which one layer, the embedding and the head are counted.
    """
    d, width, head = shape.hidden, shape.feed_forward, shape.head_dim
    keys = shape.key // head
    sizes = {
        "decoder/layers/0/attention/q_proj/kernel": ((d, shape.heads, head), shape.layers),
        "decoder/layers/0/attention/k_proj/kernel": ((d, keys, head), shape.layers),
        "decoder/layers/0/attention/v_proj/kernel": ((d, keys, head), shape.layers),
        "decoder/layers/0/attention/o_proj/kernel": ((shape.heads, head, d), shape.layers),
        "decoder/layers/0/mlp/up_proj/kernel": ((d, width), shape.layers * (1 + shape.gated)),
        "decoder/layers/0/mlp/down_proj/kernel": ((width, d), shape.layers),
        "embedding/table": ((shape.vocabulary, d), 1),
        **({} if shape.tied else {"head": ((d, shape.vocabulary), 1)}),
    }
    plain, total, parameters = optimizer.model_copy(update={"groups": ()}), 0.0, 0
    for path, (dims, count) in sizes.items():
        tree: object = jax.ShapeDtypeStruct(dims, jnp.float32)
        for name in reversed(path.split("/")):
            tree = {name: tree}
        chain = build_optimizer(plain, lambda step: jnp.float32(0), tree)
        state = jax.tree.leaves(jax.eval_shape(chain.init, tree))
        total += count * sum(math.prod(x.shape) * x.dtype.itemsize for x in state)
        parameters += count * math.prod(dims)
    return total / parameters
