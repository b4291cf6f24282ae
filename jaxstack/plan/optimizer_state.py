"""Bytes of optimizer state per trained parameter, and the share of parameters that is trained."""

import math
import re

import jax
import jax.numpy as jnp

from jaxstack.models.adapters import AdapterConfig
from jaxstack.optim.base import Optimizer
from jaxstack.optim.build import build_optimizer
from jaxstack.plan.model_shape import ModelShape
from jaxstack.tree_rules import match


def optimizer_bytes(optimizer: Optimizer, shape: ModelShape) -> float:
    """Return the bytes of optimizer state per parameter that is trained.

    Args:
      optimizer: settings of the optimizer; groups are left out.
      shape: the model, of which one layer, the embedding and the head are counted.
    """
    plain = optimizer.model_copy(update={"groups": ()})
    total = 0.0
    parameters = 0
    for path, (inputs, outputs, count) in _matrices(shape).items():
        dims = (*inputs, *outputs)
        tree: object = jax.ShapeDtypeStruct(dims, jnp.float32)
        for name in reversed(path.split("/")):
            tree = {name: tree}
        chain = build_optimizer(plain, lambda step: jnp.float32(0), tree)
        state = jax.tree.leaves(jax.eval_shape(chain.init, tree))
        total += count * sum(math.prod(x.shape) * x.dtype.itemsize for x in state)
        parameters += count * math.prod(dims)
    return total / parameters


def trained_share(optimizer: Optimizer, adapters: AdapterConfig, shape: ModelShape) -> float:
    """Return the number of trained parameters, including adapters, as a fraction of the base model's parameters.

    Vectors are left out, and routed experts count as trained if the model has no adapters.

    Args:
      optimizer: its groups may freeze parameters.
      adapters: low-rank adapters, with which all other parameters are frozen unless a group says otherwise.
      shape: the model.
    """
    if not adapters.rules and all(group.frozen is None for group in optimizer.groups):
        return 1.0
    groups = [*((group.path, group.frozen) for group in optimizer.groups), (".*", None)]
    frozen_by_default = bool(adapters.rules)
    trained = 0.0 if frozen_by_default else float(shape.all_experts)
    total = float(shape.all_experts)
    for path, (inputs, outputs, count) in _matrices(shape).items():
        wide = math.prod(inputs)
        high = math.prod(outputs)
        total += count * wide * high
        frozen = match(path, groups)
        if not (frozen_by_default if frozen is None else frozen):
            trained += count * wide * high
        # Adapters are for the layers' dense matrices alone.
        rule = next((rule for rule in adapters.rules if re.search(rule.path, path)), None)
        if rule is not None and path.startswith("decoder/"):
            trained += count * (rule.rank * (wide + high) + (high if rule.method == "dora" else 0))
    return trained / total


def _matrices(shape: ModelShape) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Return the shapes of a model's dense matrices: path in layer 0 -> (input dims, output dims, number of layers).

    Embedding and head count as one layer each; routed experts are left out.
    """
    d = shape.hidden
    width = shape.feed_forward
    head = shape.head_dim
    heads = shape.heads
    keys = shape.key // head
    layers = shape.layers
    gate = {"decoder/layers/0/mlp/gate_proj/kernel": ((d,), (width,), layers)} if shape.gated else {}
    return {
        "decoder/layers/0/attention/q_proj/kernel": ((d,), (heads, head), layers),
        "decoder/layers/0/attention/k_proj/kernel": ((d,), (keys, head), layers),
        "decoder/layers/0/attention/v_proj/kernel": ((d,), (keys, head), layers),
        "decoder/layers/0/attention/o_proj/kernel": ((heads, head), (d,), layers),
        **gate,
        "decoder/layers/0/mlp/up_proj/kernel": ((d,), (width,), layers),
        "decoder/layers/0/mlp/down_proj/kernel": ((width,), (d,), layers),
        "embedding/table": ((shape.vocabulary,), (d,), 1),
        **({} if shape.tied else {"head": ((d,), (shape.vocabulary,), 1)}),
    }
