"""Configuration of a mixture of experts. Field names follow Hugging Face's config.json where one exists."""

from typing import Literal

from pydantic import Field, model_validator

from jaxstack.config.base import Component


class MoEConfig(Component):
    """Configuration of a mixture of experts that replaces the feed-forward sublayers; left out: all are dense."""

    num_experts: int = Field(ge=1, le=2**16)
    """Number of routed experts per layer."""
    num_experts_per_tok: int = Field(default=2, ge=1)
    """Number of routed experts that compute each token."""
    moe_intermediate_size: int | None = Field(default=None, ge=1)
    """Width of an expert; left out: model.intermediate_size."""
    n_shared_experts: int = Field(default=0, ge=0)
    """Number of additional experts that compute every token, as one MLP of this many times the width (DeepSeekMoE)."""

    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """Scores from router logits: `softmax` over all experts, or `sigmoid` of each (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """Scale a token's chosen scores to sum to 1. With softmax that is the softmax over the chosen logits (Mixtral)."""
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    """Factor of the routed experts' sum."""
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
        return self

    def is_mixture_layer(self, layer: int) -> bool:
        """Return True if layer number `layer`, counted from 0, has a mixture of experts."""
        return layer >= self.first_k_dense_replace and (layer + 1) % self.decoder_sparse_step == 0
