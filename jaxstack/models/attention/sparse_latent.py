"""Configuration of DeepSeek-V3.2's attention; `jaxstack.models.mixers.sparse_latent_attention` computes it."""

from typing import Literal

from pydantic import Field

from jaxstack.models.attention.base import ScoreOptions
from jaxstack.models.attention.latent import LatentAttention


class SparseLatentAttention(LatentAttention):
    """Multi-head latent attention to a few keys, which an indexer chooses (DeepSeek-V3.2, arXiv:2512.02556).

    The indexer scores every key with few and narrow heads; each query then sees the `index_topk` keys of the highest
    scores. In sequences of at most that length this is latent attention. The choice has no gradient: a loss of its own
    trains the indexer, and it alone, to score keys as the attention weighs them.
    """

    name: Literal["sparse_latent"] = "sparse_latent"  # pyright: ignore[reportIncompatibleVariableOverride]
    index_topk: int = Field(default=2048, ge=1)
    """Number of keys that a query sees."""
    index_n_heads: int = Field(default=64, ge=1)
    """Heads of the indexer; they have one key in common."""
    index_head_dim: int = Field(default=128, ge=2)
    """Width of a head of the indexer; its first qk_rope_head_dim channels have rotary positions."""
    indexer_loss_weight: float = Field(default=0.01, ge=0)
    """Weight of the loss that trains the indexers, summed over layers. AdamW's steps hardly depend on it; small, it
    leaves the clipping by the gradient norm to the model's own loss. 0: the loss is not computed."""

    def context_parallel_problem(self, method: str | None) -> str | None:
        return (
            "attention.name sparse_latent chooses among the keys of the whole sequence, which parallel.context splits; "
            "set parallel.context=1"
        )

    def check(self, options: ScoreOptions) -> None:
        """Check that the model's settings are supported.

        Raises:
          ValueError: a setting is not supported, see also `LatentAttention.check`.
        """
        if self.q_lora_rank is None:
            raise ValueError("attention.name sparse_latent needs attention.q_lora_rank, from which its indexer reads.")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"attention.index_head_dim ({self.index_head_dim}) must be at least attention.qk_rope_head_dim "
                f"({self.qk_rope_head_dim})."
            )
        super().check(options)
