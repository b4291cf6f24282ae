"""Routing of tokens to experts: its configuration, and the losses that keep the experts' load even.

The configuration's field names follow Hugging Face's config.json where one exists.

Dims: B sequences, T tokens per sequence (on this device), E experts, k experts per token.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field, model_validator

from jaxstack.config.base import Component
from pallas_kernels.batch_invariant.rows import row_total, softmax


class MoEConfig(Component):
    """Configuration of a mixture of experts that replaces the feed-forward sublayers; left out: all are dense."""

    num_experts: int = Field(ge=1, le=2**16)
    """Number of routed experts per layer."""
    num_experts_per_tok: int = Field(default=2, ge=1)
    """Number of routed experts that compute each token."""
    moe_intermediate_size: int | None = Field(default=None, ge=1)
    """Width of an expert; left out: model.intermediate_size."""
    expert_bias: bool = False
    """Add biases to the projections of the routed experts (gpt-oss)."""
    swiglu_limit: float | None = Field(default=None, gt=0)
    """Clamp of the routed experts' gates: they compute gate sigmoid(1.702 gate) (up + 1) with gates of at most this and
    values between its negative and itself (gpt-oss). Left out: `hidden_act`, not clamped."""
    n_shared_experts: int = Field(default=0, ge=0)
    """Number of additional experts that compute every token, as one MLP of this many times the width (DeepSeekMoE)."""

    shared_expert_gate: bool = False
    """Multiply the output of the shared experts by sigmoid(w x), a number for each token (Qwen3-Next)."""
    beside_mlp: bool = False
    """Add the experts' outputs to those of a dense MLP, which they do not replace; each of the two has norms of its
    own, and the experts' weights have learned factors (Gemma 4)."""
    router_bias: bool = False
    """Add a learned bias to the router's logits (gpt-oss)."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """Scores from router logits: `softmax` over all experts, or `sigmoid` of each (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """Scale a token's chosen scores to sum to 1. With softmax that is the softmax over the chosen logits (Mixtral)."""
    weight_inputs: bool = False
    """Multiply a routed expert's input by its weight, in place of its output (Llama 4)."""
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    """Factor of the routed experts' sum."""
    n_group: int = Field(default=1, ge=1)
    """Number of groups of experts; a token's experts are in its `topk_group` best groups. A group's score is the sum of
    its two best scores with sigmoid (DeepSeek-V3), and its best one with softmax (DeepSeek-V2)."""
    topk_group: int = Field(default=1, ge=1)
    """Number of groups that a token's experts may be in."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """Capacity of an expert: this times an even share of each sequence's tokens; later tokens are dropped. Left out: no
    token is dropped."""

    router_aux_loss_coef: float = Field(default=0.001, ge=0)
    """Weight of the load-balancing loss, which is 1 per layer if every expert has an even share."""
    router_z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the squared log-sum-exp of the router's logits (ST-MoE)."""
    balance_bias: bool = False
    """Add a bias to the scores that choose experts (not to the weights of their outputs), and update it against each
    step's load (DeepSeek-V3)."""

    first_k_dense_replace: int = Field(default=0, ge=0)
    """Number of layers at the start that are dense."""
    decoder_sparse_step: int = Field(default=1, ge=1)
    """A later layer is a mixture if its number, counted from 1, is a multiple of this: 2 makes every second one."""

    exchange_factor: float = Field(default=1.5, gt=0)
    """Rows of one all-to-all, with parallel.expert, as a multiple of an even load. Rows that do not fit are sent in
    further rounds, so the results do not depend on it, but memory and time do."""
    implementation: str | None = None
    """Backend of the grouped matmul by name; left out: the first that supports the call."""

    @model_validator(mode="after")
    def _check(self) -> "MoEConfig":
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be at most num_experts ({self.num_experts})."
            )
        if self.beside_mlp and self.n_shared_experts:
            raise ValueError(
                f"n_shared_experts ({self.n_shared_experts}) must be 0 with beside_mlp, whose MLP computes every token."
            )
        if self.shared_expert_gate and not self.n_shared_experts:
            raise ValueError("shared_expert_gate needs shared experts; set n_shared_experts to at least 1.")
        if self.weight_inputs and self.expert_bias:
            raise ValueError("weight_inputs must be false with expert_bias, which applies to weighted outputs.")
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"n_group ({self.n_group}) must divide num_experts ({self.num_experts}), and topk_group "
                f"({self.topk_group}) must be at most n_group."
            )
        size = self.num_experts // self.n_group
        if self.num_experts_per_tok > self.topk_group * size or (
            self.scoring_func == "sigmoid" and size < 2 < self.n_group
        ):
            raise ValueError(
                f"topk_group ({self.topk_group}) groups of {size} experts have too few for num_experts_per_tok "
                f"({self.num_experts_per_tok}) or for the two best scores of a group."
            )
        return self

    def is_mixture_layer(self, layer: int) -> bool:
        """Return True if layer number `layer`, counted from 0, has a mixture of experts."""
        return layer >= self.first_k_dense_replace and (layer + 1) % self.decoder_sparse_step == 0


ROUTER = "router"
"""Name of the routers' sums among the `LayerSums`."""


class RouterSums(NamedTuple):
    """Sums of what a layer's router does, or with a dim of layers those of all layers; sums of several parts add up.

    All sums are float32, and only `loss` has a gradient. Rows of layers without a router are 0.
    """

    loss: Float[Array, ""]
    """Losses of the router or of all routers, summed over tokens."""
    load: Float[Array, "*layers E"]
    """Assignments of tokens to each expert, before any is dropped."""
    entropy: Float[Array, "*layers"]
    """Entropy of each token's probabilities of the experts in nats, summed over the assignments."""
    dropped: Float[Array, "*layers"] | None
    """Assignments dropped by the capacity of experts; None: there is no capacity."""
    experts: Int[Array, "*layers B T k"] | None = None
    """Experts chosen for each token, before any is dropped; None: not recorded."""
    changed: Float[Array, "*layers"] | None = None
    """Tokens whose experts were given and are not those that the router would choose; None: none were given."""
    given: Float[Array, "*layers"] | None = None
    """Tokens whose experts were given."""

    def of_layers(self, numbers: Int[Array, "*n"], count: int) -> "RouterSums":
        """Return the sums of all `count` layers of a model, where these are the sums [*n] of the layers `numbers`."""

        def place(x: jax.Array) -> jax.Array:
            return jnp.zeros((count, *x.shape[numbers.ndim :]), x.dtype).at[numbers].set(x)

        return RouterSums(jnp.sum(self.loss), *jax.tree.map(place, tuple(self[1:])))

    def metrics(self, name: str) -> dict[str, Float[Array, ""]]:
        """Return the metrics of the sums of all layers [L], see docs/observe.md."""
        assignments = self.load.sum(axis=-1)
        fullest = self.load.max(axis=-1) * (self.load.shape[-1] / jnp.maximum(assignments, 1.0))
        total = jnp.maximum(assignments.sum(), 1.0)
        found = {
            f"{name}_entropy": self.entropy.sum() / total,
            "expert_load": fullest.sum() / jnp.maximum(jnp.sum(assignments > 0), 1.0),
            "expert_overload": fullest.max() - 1.0,
            "expert_overload_layer": jnp.argmax(fullest),
        }
        if self.dropped is not None:
            found[f"{name}_dropped"] = self.dropped.sum() / total
        if self.changed is not None and self.given is not None:
            found[f"{name}_changed"] = self.changed.sum() / jnp.maximum(self.given.sum(), 1.0)
        return found


class Routing(NamedTuple):
    """The experts chosen for each token, the weights of their outputs, and sums over the tokens."""

    experts: Int[Array, "B T k"]
    """Expert of each assignment; E for a dropped one."""
    weights: Float[Array, "B T k"]
    """Weight of each expert's output, float32."""
    sums: RouterSums
    """The router's losses and balance, summed over tokens."""
    chosen: Int[Array, "B T k"]
    """The experts of each token before any is dropped."""


def route(
    config: MoEConfig,
    logits: Float[Array, "B T E"],
    bias: Float[Array, " E"] | None,
    *,
    sequence_axes: tuple[str, ...] = (),
    dropless: bool = False,
    experts: Int[Array, "B T k"] | None = None,
) -> Routing:
    """Choose the k experts with the highest scores for each token; compute their weights and the load-balancing losses.

    Args:
      logits: router logits, float32.
      bias: added to the scores for the choice only (Wang et al. 2024, arXiv:2408.15664); None: no bias.
      sequence_axes: mesh axes of a surrounding shard_map that split the sequence; the sums are then this device's
        share.
      dropless: ignore the capacity of the experts.
      experts: the chosen experts, from 0 to E - 1, so that only their weights depend on the scores (routing replay, Ma
        et al. 2025, arXiv:2510.11370), or -1 for tokens whose experts are those with the highest scores; None: so are
        those of all. Fewer than k send each token to fewer experts, as calibration does.
    """
    experts_count = config.num_experts
    chosen_count = config.num_experts_per_tok
    probabilities = softmax(logits)
    scores = probabilities if config.scoring_func == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores if bias is None else scores + bias
    ranked = _within_best_groups(config, jax.lax.stop_gradient(ranked))
    best = jax.lax.top_k(ranked, chosen_count)[1]
    changed = given = None
    if experts is None:
        experts = best
    else:
        experts = experts.astype(jnp.int32)
        known = experts >= 0
        same = (best[..., None] == experts[..., None, :]).any(-1).all(-1)
        given = jnp.sum(known[..., 0], dtype=jnp.float32)
        changed = jnp.sum(known[..., 0] & ~same, dtype=jnp.float32)
        experts = jnp.where(known, experts, best[..., : experts.shape[-1]])
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (row_total(weights) + 1e-20)
    weights = weights * config.routed_scaling_factor
    counts = jax.nn.one_hot(experts, experts_count, dtype=jnp.float32).sum(axis=(1, 2))
    if config.scoring_func == "sigmoid":
        probabilities = scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)
    loss = config.router_aux_loss_coef * balance_loss(probabilities, counts, chosen_count, sequence_axes)
    if config.router_z_loss_coef:
        loss += config.router_z_loss_coef * jnp.square(jax.nn.logsumexp(logits, axis=-1)).sum()
    if bias is not None:
        loss += load_signal(bias, counts.sum(axis=0), chosen_count)
    dropped = None
    chosen = experts
    if config.capacity_factor is not None and not dropless:
        experts = drop_overflow(experts, experts_count, capacity(config, experts.shape[1]))
        weights = jnp.where(experts < experts_count, weights, 0.0)
        dropped = jnp.sum(experts == experts_count, dtype=jnp.float32)
    entropy = chosen_count * jnp.sum(jax.scipy.special.entr(jax.lax.stop_gradient(probabilities)))
    sums = RouterSums(loss, counts.sum(axis=0), entropy, dropped, changed=changed, given=given)
    return Routing(experts, weights, sums, chosen)


def _within_best_groups(config: MoEConfig, ranked: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
    """Return the scores that rank experts, -inf for those outside of a token's best groups."""
    if config.topk_group == config.n_group:
        return ranked
    groups = ranked.reshape(*ranked.shape[:-1], config.n_group, -1)
    best = jax.lax.top_k(groups, 2 if config.scoring_func == "sigmoid" else 1)[0].sum(-1)
    chosen = jax.nn.one_hot(jax.lax.top_k(best, config.topk_group)[1], config.n_group).sum(-2) > 0
    return jnp.where(chosen[..., None], groups, -jnp.inf).reshape(ranked.shape)


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
