"""The shape of a mixture of experts. Field names follow Hugging Face's config.json where one exists."""

from typing import Literal

from pydantic import Field, model_validator

from jaxstack.config.base import Component


class MoEConfig(Component):
    """The feed-forward sublayers that are a mixture of experts: `model.moe`. Left out of a model, all are dense."""

    num_experts: int = Field(ge=1)
    """Routed experts a layer."""
    num_experts_per_tok: int = Field(default=2, ge=1)
    """Experts that compute each token."""
    moe_intermediate_size: int | None = Field(default=None, ge=1)
    """Width of an expert; left out: model.intermediate_size."""
    n_shared_experts: int = Field(default=0, ge=0)
    """Experts beside them that compute every token, as one MLP of so many times the width (DeepSeekMoE)."""

    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """What router logits become: probabilities over all experts, or a score each (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """Scale a token's chosen scores to sum to 1. With softmax that is the softmax over the chosen logits (Mixtral)."""
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    """What the routed experts' sum is multiplied with."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """An expert takes at most this times an even share of each sequence's tokens, the first of them; left out: all."""

    router_aux_loss_coef: float = Field(default=0.001, ge=0)
    """Weight of the load-balancing loss, which is 1 a layer where every expert has an even share."""
    router_z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the squared log-sum-exp of the router's logits (ST-MoE)."""
    balance_bias: bool = False
    """A bias on the scores that choose, not on those that weigh, moved against each step's load (DeepSeek-V3)."""

    first_k_dense_replace: int = Field(default=0, ge=0)
    """Layers at the start that are dense."""
    decoder_sparse_step: int = Field(default=1, ge=1)
    """Of the others every so many-th is a mixture: 2 makes every second one."""

    exchange_factor: float = Field(default=1.5, gt=0)
    """With parallel.expert: rows of one exchange as a multiple of an even load. What does not fit goes in further
    rounds, so results do not depend on it; memory and time do."""
    implementation: str | None = None
    """Backend of the grouped matmul by name; left out: the first that can do it."""

    @model_validator(mode="after")
    def _check(self) -> "MoEConfig":
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be at most num_experts ({self.num_experts})."
            )
        return self

    def is_mixture(self, layer: int) -> bool:
        """Whether the layer of this index, from 0, is a mixture of experts."""
        return layer >= self.first_k_dense_replace and (layer + 1) % self.decoder_sparse_step == 0
