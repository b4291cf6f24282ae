"""Sizes of a model that the planner's formulas need: widths, parameters by kind, and FLOPs of the attention."""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.models.adapters import AdapterConfig
from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.config import ModelConfig
from jaxstack.models.count import count_mixers, count_parameters, layers_in_training
from jaxstack.models.mixers import mixer_module
from jaxstack.models.recurrent import Recurrent
from jaxstack.optim.base import Optimizer
from jaxstack.optim.build import build_optimizer
from jaxstack.parameter_paths import match


class RecurrentLayers(NamedTuple):
    """Layers of a model that have the same recurrent mixer."""

    kind: Recurrent
    """The mixer."""
    number: int
    """Number of these layers."""
    flops: float
    """FLOPs of one layer's recurrence for each token, forward and backward."""


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Widths and parameter counts of a model, for the planner's formulas.

    Attributes:
      layers: number of layers, those for multi-token prediction included.
      predictions: number of layers for multi-token prediction, which a pipeline computes with the head.
      dense_layers: number of layers with a dense feed-forward sublayer.
      mixtures: number of layers with a mixture of experts.
      hidden: width of the residual stream.
      query: heads x head_dim.
      key: kv_heads x head_dim.
      attending: number of layers with attention, which has keys.
      attending_query: mean of `query` over these layers.
      attending_key: mean of `key` over these layers.
      key_source: numbers of a token, such as a latent's, from which keys and values can be computed where they are
        needed; 0 if there are none. A mean over the layers with attention.
      expansion: parameters that compute keys and values from these.
      recurrent: the layers with states instead.
      heads: number of query heads.
      head_dim: width of a head.
      feed_forward: width of a dense feed-forward sublayer.
      gated: True if the feed-forward sublayers have a gate.
      experts: number of routed experts of a mixture; 0 without experts.
      routed: number of them that compute a token.
      expert_width: width of one expert.
      shared_width: width of all shared experts together.
      exchange_factor: rows of one all-to-all relative to an even load.
      vocabulary: rows of the embedding.
      layer_inputs: numbers per token of the embeddings of all layers; 0 without them.
      tied: True if embedding and head are one table.
      attention_parameters: parameters of the token mixers' matrices, as a mean over layers.
      dense_parameters: parameters of a dense feed-forward sublayer.
      expert_parameters: parameters of all routed experts of one layer.
      router_and_shared_parameters: parameters of router and shared experts of one layer.
      active_expert_parameters: parameters of the routed experts that compute one token.
      down_parameters: parameters of the last matmul of a sublayer's MLP that compute one token.
      total: all parameters.
      matmul: parameters that multiply a token's activations.
    """

    layers: int
    predictions: int
    dense_layers: int
    mixtures: int
    hidden: int
    query: int
    key: int
    attending: int
    attending_query: int
    attending_key: int
    key_source: int
    expansion: int
    recurrent: tuple["RecurrentLayers", ...]
    heads: int
    head_dim: int
    feed_forward: int
    gated: bool
    experts: int
    routed: int
    expert_width: int
    shared_width: int
    exchange_factor: float
    vocabulary: int
    layer_inputs: int
    tied: bool
    attention_parameters: float
    dense_parameters: int
    expert_parameters: int
    router_and_shared_parameters: int
    active_expert_parameters: int
    down_parameters: float
    total: int
    matmul: int

    @property
    def tables(self) -> int:
        """Number of parameters outside of the layers: embedding and output head, table of the layers' embeddings."""
        return self.vocabulary * (self.hidden * (1 if self.tied else 2) + self.layer_inputs)

    @property
    def all_experts(self) -> int:
        """Number of parameters of the routed experts of all layers."""
        return self.mixtures * self.expert_parameters

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of all layers, without the routed experts."""
        return self.total - self.tables - self.all_experts

    @property
    def active_width(self) -> float:
        """Mean over layers of the feed-forward width that is active for one token."""
        mixture = self.routed * self.expert_width + self.shared_width
        return (self.dense_layers * self.feed_forward + self.mixtures * mixture) / self.layers

    @property
    def active_layer_parameters(self) -> float:
        """Mean over layers of the number of matrix parameters that are active for one token."""
        mixture = self.active_expert_parameters + self.router_and_shared_parameters
        feed_forward = self.dense_layers * self.dense_parameters + self.mixtures * mixture
        return self.attention_parameters + feed_forward / self.layers


def model_shape(model: ModelConfig) -> ModelShape:
    """Return the widths and parameter counts of a model from its configuration, whose `vocab_size` must be set."""
    assert model.vocab_size is not None
    d = model.hidden_size
    inner = 3 if model.mlp == "gated" else 2
    count = count_parameters(model)
    moe = model.moe
    kinds = [layer.feed_forward for layer in layers_in_training(model)]
    layers = len(kinds)
    query, key = _mean_widths([model.heads(layer) for layer in layers_in_training(model)])
    mixing = [layer for layer in layers_in_training(model) if layer.mixer is not None]
    attention = [layer for layer in mixing if not isinstance(layer.mixer, Recurrent)]
    attending_query, attending_key = _mean_widths([model.heads(layer) for layer in attention])
    sources = [layer.mixer.key_source(model.num_heads) for layer in attention if layer.mixer is not None]
    source, expansion = (sum(sizes) // len(sources) for sizes in zip(*sources, strict=True)) if sources else (0, 0)
    dense_layers = kinds.count("dense") + kinds.count("both")
    mixtures = kinds.count("experts") + kinds.count("both")
    expert = d * model.expert_size * inner if moe else 0
    shared = moe.n_shared_experts * model.expert_size if moe else 0
    widths = [model.feed_forward_width(layer) for layer in layers_in_training(model)]
    width = sum(widths) // layers
    dense = d * width
    active = (moe.num_experts_per_tok * model.expert_size + shared) * d if moe else 0
    return ModelShape(
        layers=layers,
        predictions=model.num_nextn_predict_layers,
        dense_layers=dense_layers,
        mixtures=mixtures,
        hidden=d,
        query=query,
        key=key,
        attending=len(attention),
        attending_query=attending_query,
        attending_key=attending_key,
        key_source=source,
        expansion=expansion,
        recurrent=_recurrent_layers(model),
        heads=model.num_heads,
        head_dim=model.width_per_head,
        feed_forward=width,
        gated=model.mlp == "gated",
        experts=moe.num_experts if moe else 0,
        routed=moe.num_experts_per_tok if moe else 0,
        expert_width=model.expert_size if moe else 0,
        shared_width=shared,
        exchange_factor=moe.exchange_factor if moe else 0.0,
        vocabulary=model.vocab_size,
        layer_inputs=model.num_layers * (model.hidden_size_per_layer_input or 0),
        tied=model.tie_word_embeddings,
        attention_parameters=count_mixers(model).matmul / layers,
        dense_parameters=dense * inner,
        expert_parameters=moe.num_experts * expert if moe else 0,
        router_and_shared_parameters=d * moe.num_experts + shared * d * inner if moe else 0,
        active_expert_parameters=moe.num_experts_per_tok * expert if moe else 0,
        down_parameters=(dense_layers * dense + mixtures * active) / layers,
        total=count.total,
        matmul=count.matmul,
    )


def _mean_widths(heads: Sequence[AttentionSpec]) -> tuple[int, int]:
    """Return the means of heads x head_dim and of kv_heads x head_dim; 0 of no layers."""
    count = len(heads) or 1
    query = sum(spec.num_heads * spec.head_dim for spec in heads) // count
    return query, sum(spec.num_kv_heads * spec.head_dim for spec in heads) // count


def _recurrent_layers(model: ModelConfig) -> tuple[RecurrentLayers, ...]:
    """Return the layers with states, by their mixer."""
    layers = [layer for layer in layers_in_training(model) if isinstance(layer.mixer, Recurrent)]
    counts = collections.Counter(layer.mixer for layer in layers)
    found = []
    for kind, layer in {layer.mixer: layer for layer in layers}.items():
        assert isinstance(kind, Recurrent)
        found.append(RecurrentLayers(kind, counts[kind], mixer_module(kind).flops_per_token(model, layer, 1)))
    return tuple(found)


def optimizer_bytes(optimizer: Optimizer, shape: ModelShape) -> float:
    """Return the bytes of optimizer state per parameter that is trained.

    Args:
      optimizer: settings of the optimizer; groups are left out.
      shape: the model, of which one layer, the embedding and the head are counted.
    """
    plain = optimizer.model_copy(update={"groups": ()})
    total = 0.0
    parameters = 0
    for path, inputs, outputs, count in _matrices(shape):
        dims = (*inputs, *outputs)
        tree: object = jax.ShapeDtypeStruct(dims, jnp.float32)
        for name in reversed(path.split("/")):
            tree = {name: tree}
        chain = build_optimizer(plain, lambda step: jnp.float32(0), tree)
        state = jax.tree.leaves(jax.eval_shape(chain.init, tree))
        total += count * sum(math.prod(x.shape) * x.dtype.itemsize for x in state)
        parameters += count * math.prod(dims)
    return total / parameters


def adapter_share(adapters: AdapterConfig, shape: ModelShape) -> float:
    """Return the number of parameters of adapters as a fraction of the base model's, vectors left out.

    Adapters are for the matrices of layers alone, those of routed experts included.
    """
    added = 0
    for path, inputs, outputs, count in _matrices(shape):
        rule = next((rule for rule in adapters.rules if re.search(rule.path, path)), None)
        if rule is not None and path.startswith("decoder/"):
            wide = math.prod(inputs)
            high = math.prod(outputs)
            added += count * (rule.rank * (wide + high) + (high if rule.method == "dora" else 0))
    return added / _count_matrices(shape)


def trained_share(optimizer: Optimizer, adapters: AdapterConfig, shape: ModelShape) -> float:
    """Return the number of trained parameters, including adapters, as a fraction of the base model's parameters.

    Vectors and routers are left out.

    Args:
      optimizer: its groups may freeze parameters.
      adapters: low-rank adapters, with which all other parameters are frozen unless a group says otherwise.
      shape: the model.
    """
    if not adapters.rules and all(group.frozen is None for group in optimizer.groups):
        return 1.0
    groups = [*((group.path, group.frozen) for group in optimizer.groups), (".*", None)]
    frozen_by_default = bool(adapters.rules)
    trained = 0
    for path, inputs, outputs, count in _matrices(shape):
        frozen = match(path, groups)
        if not (frozen_by_default if frozen is None else frozen):
            trained += count * math.prod(inputs) * math.prod(outputs)
    return trained / _count_matrices(shape) + adapter_share(adapters, shape)


def _count_matrices(shape: ModelShape) -> int:
    """Return the number of elements of all matrices of a model, routed experts included."""
    return sum(m.number * math.prod(m.inputs) * math.prod(m.outputs) for m in _matrices(shape))


class _Matrix(NamedTuple):
    """Path that a matrix of a model has in layer 0, its dims, and the number of such matrices."""

    path: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    number: int


def _matrices(shape: ModelShape) -> list[_Matrix]:
    """Return the matrices of a model's layers, one for each routed expert, its embedding and head; no routers."""
    d = shape.hidden
    head = shape.head_dim
    heads = shape.heads
    keys = shape.key // head
    layer = "decoder/layers/0"
    both = shape.dense_layers + shape.mixtures > shape.layers  # a mixture next to an MLP
    widths = (
        ("mlp/dense" if both else "mlp", shape.feed_forward, shape.dense_layers),
        ("mlp/experts" if both else "mlp", shape.expert_width, shape.mixtures * shape.experts),
        ("mlp/shared_experts", shape.shared_width, shape.mixtures if shape.shared_width else 0),
    )
    found = [
        _Matrix(f"{layer}/attention/q_proj/kernel", (d,), (heads, head), shape.layers),
        _Matrix(f"{layer}/attention/k_proj/kernel", (d,), (keys, head), shape.layers),
        _Matrix(f"{layer}/attention/v_proj/kernel", (d,), (keys, head), shape.layers),
        _Matrix(f"{layer}/attention/o_proj/kernel", (heads, head), (d,), shape.layers),
        _Matrix("embedding/table", (shape.vocabulary,), (d,), 1),
    ]
    for path, width, count in widths:
        if count:
            into = ("gate_proj", "up_proj") if shape.gated else ("up_proj",)
            found += [_Matrix(f"{layer}/{path}/{name}/kernel", (d,), (width,), count) for name in into]
            found.append(_Matrix(f"{layer}/{path}/down_proj/kernel", (width,), (d,), count))
    return found if shape.tied else [*found, _Matrix("head", (d,), (shape.vocabulary,), 1)]
