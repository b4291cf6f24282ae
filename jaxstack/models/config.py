"""The shape of a decoder-only Transformer. Field names follow Hugging Face's config.json where one exists."""

from typing import Any, Literal

from pydantic import Field, model_validator

from jaxstack.config.base import Component
from jaxstack.models.attention import AnyAttention, SoftmaxAttention
from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.moe.config import MoEConfig

LayerType = Literal["full_attention", "sliding_attention"]


class RopeScaling(Component):
    """How rotary frequencies are stretched for contexts longer than the one trained on."""

    rope_type: Literal["linear", "llama3"]
    """`linear`: positions divided by `factor`; `llama3`: by wavelength, as in Llama 3.1."""
    factor: float = Field(gt=0)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @model_validator(mode="after")
    def _check(self) -> "RopeScaling":
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor ({self.high_freq_factor})."
            )
        return self


class ModelConfig(Component):
    """One decoder-only Transformer; the families differ by these components, not by code."""

    preset: str | None = None
    """Name of a shipped shape whose values the other keys override in a configuration file; see
    `jaxstack/models/presets/`. In Python: `preset_config(name, **changes)`."""
    vocab_size: int | None = Field(default=None, ge=2)
    """Rows of the embedding; left out: the tokenizer's vocabulary, padded to a multiple of 64."""
    hidden_size: int = Field(default=256, ge=1)
    """Width of the residual stream."""
    num_layers: int = Field(default=4, ge=1)
    """Layers."""
    num_heads: int = Field(default=4, ge=1)
    """Query heads."""
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Key/value heads (grouped-query attention); left out: num_heads."""
    head_dim: int | None = Field(default=None, ge=1)
    """Left out: hidden_size / num_heads."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Left out: 4 x hidden_size for a plain MLP, 8/3 of it rounded up to a multiple of 64 for a gated one."""
    max_position_embeddings: int | None = Field(default=None, ge=1)
    """Longest sequence; needed for learned positions, otherwise only a bound that is checked."""

    norm: Literal["rms_norm", "rms_norm_unit_offset", "layer_norm"] = "rms_norm"
    """`rms_norm`, `rms_norm_unit_offset` (Gemma), `layer_norm`."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance."""
    post_norms: bool = False
    """Also normalise what each sublayer returns, before it joins the residual (Gemma 2)."""
    qk_norm: bool = False
    """RMS-normalise every query and key head (Qwen 3); with `norm: rms_norm_unit_offset` by that norm (Gemma 3)."""

    positions: Literal["rope", "learned", "none"] = "rope"
    """`rope`, `learned`, `none`."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """`{rope_type: linear, factor: 4.0}`, or `rope_type: llama3` with the keys of Llama 3.1."""
    rope_local_base_freq: float | None = Field(default=None, gt=0)
    """`rope_theta` of the sliding_attention layers, which are then not scaled (Gemma 3); left out: as all others."""

    attention: AnyAttention = SoftmaxAttention()
    """Attention kind of all layers, by `name`."""
    layer_types: tuple[LayerType, ...] = ("full_attention",)
    """With softmax attention, whether each layer sees all keys or a window; repeated over the depth."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Keys that a query of a sliding_attention layer sees, itself included."""
    qkv_bias: bool = False
    """Biases on queries, keys and values."""
    output_bias: bool = False
    """Bias of the attention's output projection."""
    attn_logit_softcapping: float | None = Field(default=None, gt=0)
    """Cap c of the attention scores, c tanh(score / c)."""
    query_pre_attn_scalar: float | None = Field(default=None, gt=0)
    """Attention scores are divided by its square root; left out: head_dim."""

    mlp: Literal["gated", "plain"] = "gated"
    """`gated` (SwiGLU, GeGLU) or `plain`."""
    hidden_act: Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"] = "silu"
    """`silu`, `gelu`, `gelu_tanh`, `relu`, `relu_squared`."""
    mlp_bias: bool = False
    """Biases in the MLP."""
    moe: MoEConfig | None = None
    """A mixture of experts in place of the feed-forward sublayers; left out: all of them are dense."""

    tie_word_embeddings: bool = False
    """The head uses the embedding's table."""
    scale_embeddings: bool = False
    """Multiply embeddings by sqrt(hidden_size) (Gemma)."""
    final_logit_softcapping: float | None = Field(default=None, gt=0)
    """Cap of the logits."""

    initialization: Literal["normal", "depth_scaled", "fan_in"] = "depth_scaled"
    """`normal`: std initializer_range everywhere; `depth_scaled`: the same, residual projections by 1/sqrt(2 layers)
    (GPT-2); `fan_in`: std 1/sqrt(inputs), residual projections depth-scaled too."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On embeddings and on what each sublayer adds to the residual."""

    attention_implementation: str | None = None
    """Attention backend by name; left out: the first of the table that can do it. An explicit one never falls back."""
    scan_layers: bool = True
    """One compiled layer run in a loop (compiles fast) instead of all layers unrolled (runs fastest)."""
    unscanned_end_layers: int = Field(default=0, ge=0)
    """Of the layers at each end, how many stay out of the loop of `scan_layers`; with FP8, which leaves the first and
    the last layer in bfloat16, 1 where it is left out."""
    remat: Literal["none", "full", "save_attention", "save_dots", "offload", "save_attention_offload"] = "none"
    """What the backward pass finds saved: everything; layer inputs only; also attention outputs; also matmul outputs;
    layer inputs in host memory; these and, on the device, attention outputs."""

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be divisible by num_heads ({self.num_heads}) where head_dim is "
                f"left out; nearest num_heads: {_near_divisors(self.hidden_size, self.num_heads)}, or give head_dim."
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be divisible by num_kv_heads ({self.kv_heads}); "
                f"nearest num_kv_heads: {_near_divisors(self.num_heads, self.kv_heads)}."
            )
        if self.positions == "rope" and self.width_per_head % 2:
            raise ValueError(f"head_dim ({self.width_per_head}) must be even for rotary positions.")
        if self.positions == "learned" and self.max_position_embeddings is None:
            raise ValueError("positions: learned needs max_position_embeddings (rows of the position table).")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, which needs sliding_window (keys that a query sees).")
        if not self.layer_types or len(self.layer_types) > self.num_layers:
            raise ValueError(
                f"layer_types must have between 1 and num_layers ({self.num_layers}) entries; found "
                f"{len(self.layer_types)}."
            )
        if self.moe is not None and self.mlp_bias:
            raise ValueError("mlp_bias must be false with moe: experts have no biases.")
        self.attention.check(self)
        return self

    @property
    def kv_heads(self) -> int:
        """Key/value heads with the default filled in."""
        return self.num_kv_heads or self.num_heads

    @property
    def width_per_head(self) -> int:
        """head_dim with the default filled in."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def feed_forward_size(self) -> int:
        """intermediate_size with the default filled in."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        if self.mlp == "plain":
            return 4 * self.hidden_size
        return -(-self.hidden_size * 8 // 3 // 64) * 64

    @property
    def expert_size(self) -> int:
        """moe.moe_intermediate_size with the default filled in."""
        size = self.moe.moe_intermediate_size if self.moe is not None else None
        return size or self.feed_forward_size

    def is_mixture(self, layer: int) -> bool:
        """Whether the feed-forward sublayer of the layer of this index, from 0, is a mixture of experts."""
        return self.moe is not None and self.moe.is_mixture(layer)

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied with."""
        return (self.query_pre_attn_scalar or self.width_per_head) ** -0.5

    def heads(self, window: int | None) -> AttentionSpec:
        """What a layer with this window gives its attention kind."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.width_per_head,
            scale=self.attention_scale,
            soft_cap=self.attn_logit_softcapping,
            window=window,
            implementation=self.attention_implementation,
        )

    def windows(self) -> tuple[int | None, ...]:
        """Per layer, the keys that a query sees (None: all before it)."""
        kinds = [self.layer_types[i % len(self.layer_types)] for i in range(self.num_layers)]
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in kinds)

    def layer_kinds(self) -> list[tuple[int | None, bool]]:
        """Per layer, its window and whether it is a mixture of experts: layers of one kind have one structure."""
        return [(window, self.is_mixture(layer)) for layer, window in enumerate(self.windows())]

    @property
    def layer_pattern(self) -> tuple[int, int]:
        """(layers before it, length) of the pattern that, repeated, gives the rest; that with the fewest single layers.

        The last repetition may be cut short, and ends before the `ends`.
        """
        kinds = self.layer_kinds()[self.ends : self.num_layers - self.ends]

        def repeats_after(kinds: list[Any]) -> int:
            fits = (p for p in range(1, len(kinds)) if all(kind == kinds[i % p] for i, kind in enumerate(kinds)))
            return next(fits, len(kinds))

        found = [(lead, repeats_after(kinds[lead:])) for lead in range(len(kinds))]
        lead, period = min(found, key=lambda at: (sum(at) + (len(kinds) - at[0]) % at[1], at[0]))
        return self.ends + lead, period

    @property
    def ends(self) -> int:
        """`unscanned_end_layers`, but for what a model of so few layers has not."""
        return min(self.unscanned_end_layers, (self.num_layers - 1) // 2)


def _near_divisors(number: int, near: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = max(d for d in divisors if d <= max(near, 1))
    above = min((d for d in divisors if d >= near), default=below)
    return f"{below} or {above}" if above != below else str(below)
