"""Configuration of multi-head latent attention; `jaxstack.models.mixers.latent_attention` computes it."""

from typing import Literal

from pydantic import Field

from jaxstack.models.attention.base import ScoreOptions
from jaxstack.models.layer import Mixer


class LatentAttention(Mixer):
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434): keys and values come from one small latent.

    A token is projected to a latent of `kv_lora_rank` channels, from which each head's values and a part of its keys
    are computed, and to `qk_rope_head_dim` rotated channels of the keys, which all heads share. The decoding cache
    stores these two only. A head of queries and keys has qk_nope_head_dim + qk_rope_head_dim channels, which is
    `model.head_dim`.
    """

    name: Literal["latent"] = "latent"
    kv_lora_rank: int = Field(default=512, ge=1)
    """Width of the latent of keys and values."""
    q_lora_rank: int | None = Field(default=None, ge=1)
    """Width of a latent of queries; left out: queries are projected directly."""
    qk_nope_head_dim: int = Field(default=128, ge=1)
    """Channels of a head of queries and keys that are not rotated."""
    qk_rope_head_dim: int = Field(default=64, ge=2)
    """Channels of a head of queries and keys with rotary positions; those of the keys are the same for all heads."""
    v_head_dim: int = Field(default=128, ge=1)
    """Channels of a head of values."""
    rope_interleave: bool = True
    """Rotate the pairs of channels (2 i, 2 i + 1), as DeepSeek's checkpoints are trained; false: (i, i + half)."""
    latent_norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of the norms of the latents."""

    @property
    def key_width(self) -> int:
        """Channels of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def rotated_width(self, head_dim: int) -> int:
        return self.qk_rope_head_dim

    def context_parallel_problem(self, method: str | None) -> str | None:
        return None

    def key_source(self, heads: int) -> tuple[int, int]:
        expanded = heads * (self.qk_nope_head_dim + self.v_head_dim)
        return self.kv_lora_rank + self.qk_rope_head_dim, self.kv_lora_rank * expanded

    def exchanges_heads(self, method: str | None) -> bool:
        return method == "all_to_all"

    def check(self, options: ScoreOptions) -> None:
        """Check that the model's settings are supported.

        There are no windows, soft caps, biases and norms of heads, and equally many heads of all kinds.

        Raises:
          ValueError: a setting is not supported.
        """
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"attention.qk_rope_head_dim ({self.qk_rope_head_dim}) must be even.")
        if options.head_dim != self.key_width:
            raise ValueError(
                f"head_dim ({options.head_dim}) must be qk_nope_head_dim + qk_rope_head_dim ({self.key_width}) with "
                "attention.name latent."
            )
        given = {
            "layer_types: sliding_attention": "sliding_attention" in options.layer_types,
            "layer_types: chunked_attention": "chunked_attention" in options.layer_types,
            f"attn_logit_softcapping ({options.attn_logit_softcapping})": options.attn_logit_softcapping is not None,
            f"num_kv_heads ({options.num_kv_heads}) other than num_heads": options.num_kv_heads != options.num_heads,
            f"qk_norm ({options.qk_norm})": options.qk_norm,
            "qkv_bias": options.qkv_bias,
            "output_bias": options.output_bias,
            f"partial_rotary_factor ({options.partial_rotary_factor})": options.partial_rotary_factor != 1,
        }
        if wrong := next((name for name, found in given.items() if found), None):
            raise ValueError(f"{wrong} is not supported with attention.name latent; leave it out.")
