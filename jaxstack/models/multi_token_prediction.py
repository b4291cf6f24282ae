"""Multi-token prediction of DeepSeek-V3 (arXiv:2412.19437, section 2.2), GLM-4.5 and Qwen3-Next.

Layer d, counted from 1, predicts token i + d + 1 at position i from the final hidden state of layer d - 1, at first the
model's, and the embedding of token i + d. Embedding and output head are the model's. The report writes the hidden state
first; the released weights have the embedding first, as here.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxstack.models.adapters import set_adapter_dropout_keys
from jaxstack.models.block import Block, shard_residual
from jaxstack.models.config import ModelConfig
from jaxstack.models.dropout import fold_key
from jaxstack.models.initialization import make_initializer
from jaxstack.models.layer import CacheRoom, Context, LayerCache
from jaxstack.models.layer_sums import total_loss
from jaxstack.models.layer_weights import Weights, gather_weights
from jaxstack.models.linear import Linear
from jaxstack.models.norm import make_norm
from jaxstack.models.remat import name_layer_input, rematerialise
from jaxstack.parallel import shard
from jaxstack.parallel.sharding_context import current_rules
from pallas_kernels import sequence_order

Embed = Callable[[Int[Array, "B T"]], tuple[Float[Array, "B T D"], Context]]
"""Tokens -> the input of the model's first layer for them, and the `Context` of all layers."""


class Prediction(NamedTuple):
    """Prediction of a later token at every position of a batch.

    Attributes:
      hidden: input of the output head.
      labels: the tokens, int32; `ignore` where there is none in the same document.
      layer_loss: losses of the layer's own, such as its router's, summed over tokens.
    """

    hidden: Float[Array, "B T D"]
    labels: Int[Array, "B T"]
    layer_loss: Float[Array, ""]


class PredictionLayer(Block):
    """A layer like the model's last one that is not recurrent, with a projected embedding and hidden state as input."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, config.prediction_layer, rngs)
        d = config.hidden_size
        self.embedding_norm = make_norm(config.norm, d, config.norm_eps)
        self.hidden_norm = make_norm(config.norm, d, config.norm_eps)
        self.projection = Linear((2 * d,), (d,), ("embed", "norm"), rngs=rngs, initialize=make_initializer(config))
        self.final_norm = make_norm(config.norm, d, config.norm_eps)
        self.hidden_scale = 1 / config.logits_scaling

    def predict(
        self,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        context: Context,
        cache: LayerCache | None = None,
        key: Key[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None, Float[Array, ""]]:
        """Return the input of the output head, the updated cache, and the layer's own losses, summed over tokens.

        Args:
          hidden: final hidden states of the model, or of the prediction layer before this one.
          embedded: embeddings of the tokens that these states predict.
          context, cache, key: as in `Block`.
        """
        pair = shard_residual(self.embedding_norm(embedded)), shard_residual(self.hidden_norm(hidden))
        x = shard_residual(self.projection(jnp.concatenate(pair, axis=-1)))
        x, cache, sums = self(x, context, cache, key)
        x = shard_residual(self.final_norm(x))
        if self.hidden_scale != 1:
            x = x * jnp.asarray(self.hidden_scale, x.dtype)
        return shard(x, "batch", "length", "act_embed"), cache, total_loss(sums)


class MultiTokenPrediction(nnx.Module):
    """The `config.num_nextn_predict_layers` prediction layers of a model, each of which looks one token further."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.layers = nnx.List([PredictionLayer(config, rngs) for _ in range(config.num_nextn_predict_layers)])
        for p in jax.tree.leaves(nnx.state(self.layers, nnx.Param), is_leaf=lambda p: isinstance(p, nnx.Variable)):
            p.set_metadata(sum_where_used=True)  # each of them passes `gather_weights` once
        self.remat = config.remat
        self.first = config.num_layers
        """Number of the first prediction layer, counted with the model's layers."""

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        batch: Mapping[str, jax.Array],
        embed: Embed,
        key: Key[Array, "..."] | None,
        ignore: int,
    ) -> Iterator[Prediction]:
        """Yield the prediction of each layer, in order.

        A later token that lies in another document, or does not count as a label, is not predicted.

        Args:
          hidden: the model's final hidden states, whose dtype is that of the computation.
          batch: `tokens`, `labels` int32 [B, T]; optionally `segment_ids` int32 [B, T].
          embed: embeds tokens as the model does.
          key: draws dropout masks: one key, or [B, T], one for each token; None: no dropout.
          ignore: label of positions that do not count.
        """
        dtype = hidden.dtype
        documents = batch.get("segment_ids")
        for depth, layer in enumerate(self.layers, 1):
            embedded, context = embed(shift(batch["tokens"], depth, 0))
            context = context._replace(with_losses=True)
            labels = shift(batch["labels"], depth, ignore)
            if documents is not None:
                labels = jnp.where(shift(documents, depth, -1) == documents, labels, ignore)
            graphdef, state = nnx.split(layer)
            layer_key = fold_key(key, self.first + depth - 1)

            def run(
                hidden: jax.Array,
                embedded: jax.Array,
                weights: Weights,
                graphdef: nnx.GraphDef = graphdef,
                context: Context = context,
                layer_key: jax.Array | None = layer_key,
            ) -> tuple[jax.Array, jax.Array]:
                layer = set_adapter_dropout_keys(nnx.merge(graphdef, gather_weights(weights, dtype)), layer_key)
                hidden, _, layer_loss = layer.predict(name_layer_input(hidden), embedded, context, None, layer_key)
                return hidden, layer_loss

            hidden, layer_loss = rematerialise(run, self.remat, scanned=False)(hidden, embedded, state)
            yield Prediction(hidden, labels, layer_loss)

    def make_shared_cache(self, room: CacheRoom, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create the empty cache of the first layer for the sequences of an engine."""
        return self.layers[0].make_cache(lambda mixer: mixer.make_shared_cache(room, dtype), None)

    def decode(
        self,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        context: Context,
        cache: LayerCache,
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        """Run the first layer while decoding; return the input of the output head, and the updated cache."""
        graphdef, state = nnx.split(self.layers[0])
        layer = nnx.merge(graphdef, gather_weights(state, hidden.dtype))
        hidden, cache, _ = layer.predict(hidden, embedded, context, cache)
        return hidden, cache


def shift(x: Int[Array, "B T"], count: int, fill: int) -> Int[Array, "B T"]:
    """Return for each token of a sequence the element of x at the token `count` places later, or `fill` at its end.

    On a mesh that splits sequences over `context`, x has the order of `pallas_kernels.sequence_order`.
    """
    rules = current_rules()
    axes = () if rules is None else rules.table["length"]
    parts = 1 if rules is None else rules.degree(axes)
    if rules is None or parts == 1:
        return jnp.pad(x, ((0, 0), (0, count)), constant_values=fill)[:, count:]
    local = rules.manual.issuperset(axes)
    # Token ids are few bytes: gathering them costs less than finding out which devices hold the neighbours.
    whole = jax.lax.all_gather(x, axes, axis=1, tiled=True) if local else x
    length = whole.shape[1]
    order = np.asarray(sequence_order(length, parts))
    later = order + count
    source = np.argsort(order)[np.minimum(later, length - 1)]
    found = jnp.where(later < length, whole[:, source], fill)
    if not local:
        return found
    return jax.lax.dynamic_slice_in_dim(found, jax.lax.axis_index(axes) * x.shape[1], x.shape[1], axis=1)
