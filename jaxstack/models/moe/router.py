"""Routing of tokens to experts, and the losses that keep the experts' load even.

Dims: B sequences, T tokens per sequence (on this device), E experts, k experts per token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxstack.models.moe.config import MoEConfig


class Routing(NamedTuple):
    """The experts chosen for each token, the weights of their outputs, and the router's losses."""

    experts: Int[Array, "B T k"]
    """Expert of each assignment; E for a dropped one."""
    weights: Float[Array, "B T k"]
    """Weight of each expert's output, float32."""
    loss: Float[Array, ""]
    """Losses of the router, summed over tokens, float32."""


def route(
    config: MoEConfig,
    logits: Float[Array, "B T E"],
    bias: Float[Array, " E"] | None,
    *,
    sequence_axes: tuple[str, ...] = (),
    dropless: bool = False,
) -> Routing:
    """Choose the k experts with the highest scores for each token; compute their weights and the load-balancing losses.

    Args:
      logits: router logits, float32.
      bias: added to the scores for the choice only (Wang et al. 2024, arXiv:2408.15664); None: no bias.
      sequence_axes: mesh axes of a surrounding shard_map that split the sequence; the loss is then this device's share.
      dropless: ignore the capacity of the experts.
    """
    experts_count = config.num_experts
    chosen_count = config.num_experts_per_tok
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
    probabilities: Float[Array, "B T E"],
    counts: Float[Array, "B E"],
    chosen: int,
    sequence_axes: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """Compute the load-balancing loss of the router, weighted by tokens and summed over sequences.

    The loss of a sequence is sum_i f_i P_i, with f_i = E / (k T) x tokens sent to expert i and P_i the mean probability
    (Switch Transformer, arXiv:2101.03961; per sequence as in DeepSeek-V3, arXiv:2412.19437, eq. 17-20). It is 1 per
    token if the load is even, and does not depend on how a batch is split.

    Args:
      probabilities: each token's probabilities, which sum to 1.
      counts: tokens of each sequence sent to each expert.
      chosen: experts per token, k.
      sequence_axes: mesh axes that split the sequence, see `route`.
    """
    tokens = float(probabilities.shape[1])
    if sequence_axes:
        counts = jax.lax.psum(counts, sequence_axes)
        tokens = tokens * jax.lax.axis_size(sequence_axes)
    share = jax.lax.stop_gradient(counts) * (counts.shape[-1] / (chosen * tokens))
    return jnp.sum(share * probabilities.sum(axis=1))


def load_signal(bias: Float[Array, " E"], counts: Float[Array, " E"], chosen: int) -> Float[Array, ""]:
    """Return a zero whose gradient with respect to `bias` is proportional to each expert's load above the mean.

    The gradient is the load above an even load, as a fraction of an even load, times the number of tokens. Being a sum
    over tokens, it is reduced correctly by everything that reduces gradients.
    """
    even = counts.sum() / counts.shape[0]
    excess = jax.lax.stop_gradient((counts - even) * (counts.shape[0] / chosen))
    return jnp.sum((bias - jax.lax.stop_gradient(bias)) * excess)


def capacity(config: MoEConfig, tokens: int) -> int:
    """Return the largest number of tokens that one expert accepts from a sequence of `tokens` tokens."""
    even = tokens * config.num_experts_per_tok / config.num_experts
    return min(tokens, max(1, -int(-(config.capacity_factor or config.num_experts) * even // 1)))


def drop_overflow(experts: Int[Array, "B T k"], experts_count: int, capacity: int) -> Int[Array, "B T k"]:
    """Drop the assignments that exceed an expert's capacity in a sequence: they get the id `experts_count`."""
    flat = experts.reshape(experts.shape[0], -1)
    order = jnp.argsort(flat, axis=1, stable=True)
    ordered = jnp.take_along_axis(flat, order, axis=1)
    first = jax.vmap(lambda row: jnp.searchsorted(row, row, side="left"))(ordered)
    ordered = jnp.where(jnp.arange(flat.shape[1]) - first < capacity, ordered, experts_count)
    return jnp.take_along_axis(ordered, jnp.argsort(order, axis=1), axis=1).reshape(experts.shape)
