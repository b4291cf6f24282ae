"""Which experts a token goes to and with what weight, and the losses that keep the experts evenly loaded.

Dims: B sequences, T tokens of a sequence (of this device), E experts, k experts a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.models.moe.config import MoEConfig


class Routing(NamedTuple):
    """The choice for each token: `experts` int32 [B, T, k], where E stands for dropped, and `weights` float32."""

    experts: jax.Array
    weights: jax.Array
    loss: jax.Array
    """[] float32: the losses of the router, summed over tokens."""


def route(
    config: MoEConfig,
    logits: jax.Array,
    bias: jax.Array | None,
    *,
    sequence_axes: tuple[str, ...] = (),
    dropless: bool = False,
) -> Routing:
    """Top-k routing of float32 logits [B, T, E].

    Args:
      bias: [E], added to the scores for the choice alone (Wang et al. 2024, arXiv:2408.15664); None: no bias.
      sequence_axes: mesh axes of a surrounding shard_map over which the sequence is split; the loss is then this
        device's share.
      dropless: whether to disregard the capacity.
    """
    experts_count, chosen_count = config.num_experts, config.num_experts_per_tok
    probabilities = jax.nn.softmax(logits, axis=-1)
    scores = probabilities if config.scoring_func == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores if bias is None else scores + bias
    experts = jax.lax.top_k(jax.lax.stop_gradient(ranked), chosen_count)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    weights = weights * config.routed_scaling_factor
    counts = jax.nn.one_hot(experts, experts_count, dtype=jnp.float32).sum(axis=(1, 2))
    if config.scoring_func == "sigmoid":
        probabilities = scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)
    loss = config.router_aux_loss_coef * balance_loss(probabilities, counts, chosen_count, sequence_axes)
    if config.router_z_loss_coef:
        loss += config.router_z_loss_coef * jnp.square(jax.nn.logsumexp(logits, axis=-1)).sum()
    if bias is not None:
        loss += load_signal(bias, counts.sum(axis=0), chosen_count)
    if config.capacity_factor is not None and not dropless:
        experts = drop_overflow(experts, experts_count, capacity(config, experts.shape[1]))
        weights = jnp.where(experts < experts_count, weights, 0.0)
    return Routing(experts, weights, loss)


def balance_loss(
    probabilities: jax.Array, counts: jax.Array, chosen: int, sequence_axes: tuple[str, ...] = ()
) -> jax.Array:
    """Each sequence's balance loss times its tokens, summed: sum_i f_i P_i, with f_i = E / (k T) x tokens sent to
    expert i and P_i the mean probability (Switch Transformer, arXiv:2101.03961; per sequence as in DeepSeek-V3,
    arXiv:2412.19437, eq. 17-20). It is 1 a token where the load is even, and the same however a batch is split.

    Args:
      probabilities: [B, T, E], rows that sum to 1.
      counts: [B, E] tokens sent to each expert.
    """
    tokens = float(probabilities.shape[1])
    if sequence_axes:
        counts = jax.lax.psum(counts, sequence_axes)
        tokens = tokens * jax.lax.axis_size(sequence_axes)
    share = jax.lax.stop_gradient(counts) * (counts.shape[-1] / (chosen * tokens))
    return jnp.sum(share * probabilities.sum(axis=1))


def load_signal(bias: jax.Array, counts: jax.Array, chosen: int) -> jax.Array:
    """0, with a gradient of `bias` [E] that is each expert's load above an even one, in units of an even one, times
    the tokens. As a sum over tokens it passes through every reduction that gradients pass through."""
    even = counts.sum() / counts.shape[0]
    excess = jax.lax.stop_gradient((counts - even) * (counts.shape[0] / chosen))
    return jnp.sum((bias - jax.lax.stop_gradient(bias)) * excess)


def capacity(config: MoEConfig, tokens: int) -> int:
    """Tokens of a sequence of `tokens` that an expert takes."""
    even = tokens * config.num_experts_per_tok / config.num_experts
    return min(tokens, max(1, -int(-(config.capacity_factor or config.num_experts) * even // 1)))


def drop_overflow(experts: jax.Array, experts_count: int, capacity: int) -> jax.Array:
    """`experts` [B, T, k] with E in place of those beyond the first `capacity` of an expert in its sequence."""
    flat = experts.reshape(experts.shape[0], -1)
    order = jnp.argsort(flat, axis=1, stable=True)
    ordered = jnp.take_along_axis(flat, order, axis=1)
    first = jax.vmap(lambda row: jnp.searchsorted(row, row, side="left"))(ordered)
    ordered = jnp.where(jnp.arange(flat.shape[1]) - first < capacity, ordered, experts_count)
    return jnp.take_along_axis(ordered, jnp.argsort(order, axis=1), axis=1).reshape(experts.shape)
