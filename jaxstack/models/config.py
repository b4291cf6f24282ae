"""Configuration of a decoder-only Transformer. Field names follow Hugging Face's config.json where one exists."""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxstack.config.base import Component, NameIn
from jaxstack.config.loader import build_component, load_yaml
from jaxstack.errors import ConfigError, nearest
from jaxstack.models.activations import ACTIVATIONS
from jaxstack.models.attention import AnyAttention, SoftmaxAttention
from jaxstack.models.attention.base import AttentionSpec, ScoreOptions
from jaxstack.models.attention.latent import LatentAttention
from jaxstack.models.layer import LAYER_TYPES, Layer, Mixer
from jaxstack.models.moe.router import MoEConfig
from jaxstack.models.norm import NORMS
from jaxstack.models.recurrent import GatedDelta, KimiDelta, Recurrent, StateSpace
from jaxstack.models.rope import RopeScaling, Rotation

MOST_PREDICTION_LAYERS = 16
"""Largest `ModelConfig.num_nextn_predict_layers`."""
SOFTMAX_KINDS = ("softmax", "longformer", "block_sparse")


LayerKind = tuple[str, bool, Literal["keeps", "reuses"] | None]
"""(Layer type, has a mixture of experts, use of its keys), from which a layer's record follows."""

NOT_SOFTMAX = (
    "parametrization: mup is known for softmax over scores of queries and keys; attention.name {model.attention.name} "
    f"is another function of them. Use one of {', '.join(SOFTMAX_KINDS)}."
)
ATTENTION_ALONE = (
    "parametrization: mup is known for attention alone; layer_types has layers of {mixer}; leave them out."
)
LATENTS = (
    "parametrization: mup does not know how learning rates of projections to latents depend on the width; set it to "
    "standard, or take another attention.name than {model.attention.name}."
)


class ModelConfig(Component):
    """Shape and components of a decoder-only Transformer; model families differ by these settings, not by code."""

    preset: str | None = None
    """Name of a shipped configuration (`jaxstack/models/presets/`), which the other keys override. In Python:
    `preset_config(name, **changes)`."""
    vocab_size: int | None = Field(default=None, ge=2, le=2**28)
    """Number of rows of the embedding; left out: the tokenizer's vocabulary, padded to a multiple of 64."""
    hidden_size: int = Field(default=256, ge=1, le=2**20)
    """Width of the residual stream."""
    num_layers: int = Field(default=4, ge=1, le=4096)
    """Number of layers."""
    num_heads: int = Field(default=4, ge=1, le=2**16)
    """Number of query heads."""
    num_kv_heads: int | None = Field(default=None, ge=1, le=2**16)
    """Number of key/value heads (grouped-query attention); left out: num_heads."""
    head_dim: int | None = Field(default=None, ge=1, le=2**16)
    """Width of a head; left out: hidden_size / num_heads."""
    intermediate_size: int | None = Field(default=None, ge=1, le=2**24)
    """Width of the feed-forward sublayers; left out: 4 x hidden_size for a plain MLP, 8/3 x hidden_size rounded up to a
    multiple of 64 for a gated one."""
    max_position_embeddings: int | None = Field(default=None, ge=1)
    """Longest sequence in tokens; required for learned positions, otherwise only checked."""

    norm: Annotated[str, NameIn(NORMS)] = "rms_norm"
    """Norm before each sublayer and the head; `rms_norm_unit_offset` is Gemma's."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Epsilon of the norms, added to the variance."""
    pre_norms: bool = True
    """Normalize the input of each sublayer; false needs `post_norms` (OLMo 2). A layer type may say otherwise."""
    post_norms: bool = False
    """Also normalize the output of each sublayer, before it is added to the residual stream (Gemma 2)."""
    qk_norm: bool | Literal["all_heads", "without_gain"] = False
    """Normalize query and key heads by RMSNorm (Qwen 3), or by `norm` if that is rms_norm_unit_offset (Gemma 3).
    all_heads: the heads of a token together, by one RMSNorm over all their channels (OLMo 2). without_gain: by an
    RMSNorm without parameters, in layers with rotary positions (Llama 4)."""

    positions: Literal["rope", "learned", "none"] = "rope"
    """Position encoding: `rope` (rotary), `learned` (a table), or `none`."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for longer contexts, such as `{rope_type: linear, factor: 4.0}`."""
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)
    """Share of the channels of a head that rotate: the first ones, as if they were a smaller head; the others are not
    changed (GLM-4.5, Phi-4-mini)."""
    rope_local_base_freq: float | None = Field(default=None, gt=0)
    """`rope_theta` of the sliding_attention layers, which `rope_scaling` then does not apply to (Gemma 3); left out:
    `rope_theta`."""

    attention: AnyAttention = SoftmaxAttention()
    """Attention kind of all layers, chosen by `name`."""
    layer_types: tuple[Annotated[str, NameIn(LAYER_TYPES)], ...] = ("full_attention",)
    """Type of each layer, repeated over the depth; sliding_attention, a causal window, and chunked_attention, in which
    a query sees the earlier keys of its own chunk of positions (Llama 4), need softmax attention.
    full_attention_no_rope is attention without rotary positions (SmolLM3); attention_only, feed_forward_only, mlp_only
    (dense, also with `moe`) and ssd_only are layers with one sublayer in place of two; ssd and ssd_only have state
    space layers (Mamba-2) in place of attention, delta has gated DeltaNet (Qwen3-Next), kda Kimi Delta Attention.
    delta_pre_norms is delta with norms of its sublayers' inputs only, beside layers with others (OLMo Hybrid)."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Number of keys that a query of a sliding_attention layer sees, itself included."""
    attention_chunk_size: int | None = Field(default=None, ge=1)
    """Number of positions of a chunk in chunked_attention layers; chunks count from the start of a document."""
    delta: GatedDelta = GatedDelta()
    """Gated DeltaNet layers, for `layer_types` delta."""
    kda: KimiDelta = KimiDelta()
    """Layers of Kimi Delta Attention, for `layer_types` kda."""
    ssd: StateSpace = StateSpace()
    """State space layers, for `layer_types` ssd and ssd_only."""
    floor_scale: int | None = Field(default=None, ge=1)
    """Queries of layers without rotary positions are multiplied by 1 + attn_scale ln(1 + floor((position + 1) /
    floor_scale)), as the softmax over more keys is flatter (Llama 4); left out: they are not."""
    attn_scale: float = Field(default=0.1, gt=0)
    """See `floor_scale`."""
    qkv_bias: bool = False
    """Add biases to queries, keys and values."""
    output_bias: bool = False
    """Add a bias to the attention's output projection."""
    attn_logit_softcapping: float | None = Field(default=None, gt=0)
    """Soft cap c of the attention scores, c tanh(score / c); left out: none."""
    query_pre_attn_scalar: float | None = Field(default=None, gt=0)
    """Attention scores are divided by the square root of this; left out: head_dim."""

    mlp: Literal["gated", "plain"] = "gated"
    """Feed-forward sublayers: `gated` (SwiGLU, GeGLU) or `plain`."""
    hidden_act: Annotated[str, NameIn(ACTIVATIONS)] = "silu"
    """Activation of the feed-forward sublayers."""
    mlp_bias: bool = False
    """Add biases to the feed-forward sublayers."""
    moe: MoEConfig | None = None
    """Mixture of experts in place of the feed-forward sublayers; left out: all of them are dense."""

    num_nextn_predict_layers: int = Field(default=0, ge=0, le=MOST_PREDICTION_LAYERS)
    """Number of layers for multi-token prediction after the last layer: each predicts one token further, in training
    with the weight `train.mtp_loss_weight` (DeepSeek-V3 and GLM-4.5 have 1)."""

    num_kv_shared_layers: int = Field(default=0, ge=0)
    """Number of layers, the last ones, without keys and values: they attend to those of the last earlier layer of the
    same type (Gemma 4 E2B and E4B). Needs attention.name gemma4."""
    use_double_wide_mlp: bool = False
    """True gives these layers feed-forward sublayers of twice `intermediate_size` (Gemma 4 E2B)."""
    hidden_size_per_layer_input: int | None = Field(default=None, ge=1)
    """Width of an embedding of each layer, which the layer adds to the residual stream (Gemma 4 E2B and E4B); the table
    has a row of num_layers times as many numbers for each token. Left out: there are none."""
    layer_scalars: bool = False
    """Multiply the output of each layer, the residual stream, by a learned number (Gemma 4)."""
    tie_word_embeddings: bool = False
    """Use the embedding's table as the output head."""
    scale_embeddings: bool | Annotated[float, Field(gt=0)] = False
    """Factor of the embeddings (Granite); true: sqrt(hidden_size) (Gemma)."""
    residual_multiplier: float = Field(default=1.0, gt=0)
    """Factor of each sublayer's output before it is added to the residual stream (Granite)."""
    logits_scaling: float = Field(default=1.0, gt=0)
    """Logits are divided by this (Granite)."""
    final_logit_softcapping: float | None = Field(default=None, gt=0)
    """Soft cap c of the logits, c tanh(logit / c); left out: none."""

    initialization: Literal["normal", "depth_scaled", "fan_in"] = "depth_scaled"
    """Standard deviation of initial matrices. `normal`: initializer_range; `depth_scaled`: the same, but residual
    projections times 1/sqrt(2 num_layers) (GPT-2); `fan_in`: 1/sqrt(inputs), residual projections depth-scaled too."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial embeddings, and of matrices unless `initialization` is fan_in."""
    parametrization: Literal["standard", "mup"] = "standard"
    """`mup`: initial weights, learning rates and weight decay depend on hidden_size / base_width, so that the best
    learning rate of the base width is the best at every width (Yang et al. 2022)."""
    base_width: int | None = Field(default=None, ge=1)
    """hidden_size of the model that the learning rate was tuned on, needed for `mup`. Widen num_heads, num_kv_heads and
    intermediate_size in proportion."""
    base_head_dim: int | None = Field(default=None, ge=1)
    """head_dim of that model, if heads are wider here; left out: head_dim, as wider models have more heads."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the embeddings and of each sublayer's output."""

    attention_implementation: str | None = None
    """Attention backend by name, which never falls back to another; left out: the first that supports the call."""
    scan_layers: bool = True
    """Run the layers as a loop over one compiled layer, which compiles fast; unrolled layers (false) run fastest."""
    unscanned_end_layers: int = Field(default=0, ge=0)
    """Number of layers at each end that are not part of the loop of `scan_layers`. Left out: 0, or 1 with FP8, which
    leaves the first and the last layer in bfloat16."""
    remat: Literal["none", "full", "save_attention", "save_dots", "offload", "save_attention_offload"] = "none"
    """Activations saved for the backward pass; the others are recomputed. `none`: all are saved; `full`: layer inputs
    only; `save_attention`: also attention outputs; `save_dots`: also matmul outputs; `offload`: layer inputs, in host
    memory; `save_attention_offload`: these and, on the device, attention outputs."""

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
        if self.positions == "rope" and (self.rotary_channels % 2 or not self.rotary_channels):
            raise ValueError(
                f"the number of channels of a head that rotate, head_dim ({self.width_per_head}) x "
                f"partial_rotary_factor ({self.partial_rotary_factor}), must be even and not 0 for rotary positions."
            )
        if self.rope_scaling is not None and (problem := self._scaling_problem(self.rope_scaling)):
            raise ValueError(f"rope_scaling of rope_type {self.rope_scaling.rope_type} {problem}")
        if self.positions == "learned" and self.max_position_embeddings is None:
            raise ValueError("positions: learned needs max_position_embeddings (rows of the position table).")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, which needs sliding_window (keys that a query sees).")
        if "chunked_attention" in self.layer_types and self.attention_chunk_size is None:
            raise ValueError(
                "layer_types has chunked_attention, which needs attention_chunk_size (positions of a chunk)."
            )
        if not self.layer_types or len(self.layer_types) > self.num_layers:
            raise ValueError(
                f"layer_types must have between 1 and num_layers ({self.num_layers}) entries; found "
                f"{len(self.layer_types)}."
            )
        if all(LAYER_TYPES[name].mixer is None for name in self.layer_types):
            raise ValueError(
                f"layer_types ({', '.join(self.layer_types)}) must have a type in which tokens see other tokens, such "
                "as full_attention."
            )
        if not (self.pre_norms or self.post_norms):
            raise ValueError("pre_norms: false needs post_norms: true; without any norm activations grow with depth.")
        if self.moe is not None and self.mlp_bias:
            raise ValueError("mlp_bias must be false with moe, whose experts have biases with moe.expert_bias: true.")
        if self.moe is not None and self.moe.swiglu_limit and (self.mlp != "gated" or self.moe.n_shared_experts):
            raise ValueError(
                f"moe.swiglu_limit needs mlp: gated (found {self.mlp}) and no n_shared_experts (found "
                f"{self.moe.n_shared_experts}), to which it does not apply."
            )
        if problem := self._width_problem() or self._sharing_problem():
            raise ValueError(problem)
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(ScoreOptions)}
        options |= {"num_kv_heads": self.kv_heads, "head_dim": self.width_per_head}
        self.attention.check(ScoreOptions(**options))
        return self

    def _scaling_problem(self, scaling: RopeScaling) -> str | None:
        """Return what a scaling of rotary positions needs that this model does not have, or None."""
        if scaling.rope_type == "yarn" and self.rope_theta <= 1:
            return f"needs a rope_theta above 1; found {self.rope_theta}."
        if scaling.rope_type != "longrope":
            return None
        if self.max_position_embeddings is None:
            return "needs max_position_embeddings, which chooses between short_factor and long_factor."
        found = [len(factors) for factors in (scaling.short_factor, scaling.long_factor) if factors is not None]
        if found != [self.rotary_channels // 2] * 2:
            return (
                f"needs one number in short_factor and in long_factor for each pair of channels that rotates "
                f"({self.rotary_channels // 2}); found {' and '.join(map(str, found))}."
            )
        return None

    def _width_problem(self) -> str | None:
        """Return why muP (maximal update parametrization) cannot be used with these settings, or None."""
        if self.parametrization == "standard":
            given = [name for name in ("base_width", "base_head_dim") if getattr(self, name) is not None]
            return f"{given[0]} needs parametrization: mup; set it, or remove {given[0]}." if given else None
        if self.base_width is None:
            return "parametrization: mup needs base_width, the hidden_size that the learning rate was tuned at."
        if self.scale_embeddings is True:
            return (
                "parametrization: mup cannot hold with scale_embeddings, whose factor sqrt(hidden_size) grows with the "
                "width; set scale_embeddings to false (the norms that follow make up for it)."
            )
        if (mixer := next((kind.title for kind in self.mixers() if kind is not self.attention), None)) is not None:
            return ATTENTION_ALONE.replace("{mixer}", mixer)
        if isinstance(self.attention, LatentAttention):
            return LATENTS.replace("{model.attention.name}", self.attention.name)
        if self.attention.name not in SOFTMAX_KINDS:
            return NOT_SOFTMAX.replace("{model.attention.name}", self.attention.name)
        if self.query_pre_attn_scalar is not None and self.base_head_dim not in (None, self.width_per_head):
            return (
                "query_pre_attn_scalar fixes the scale of attention scores, which parametrization: mup derives from "
                "base_head_dim; give one of them."
            )
        return None

    def _sharing_problem(self) -> str | None:
        """Return why layers cannot share keys and values, or have embeddings of their own, or None if they can."""
        shared = self.num_kv_shared_layers
        own = self.num_layers - shared
        if self.num_nextn_predict_layers and (shared or self.hidden_size_per_layer_input):
            return (
                f"num_nextn_predict_layers ({self.num_nextn_predict_layers}) must be 0 with num_kv_shared_layers and "
                "hidden_size_per_layer_input: a layer for multi-token prediction has no keys, values and embeddings "
                "of other layers."
            )
        if self.use_double_wide_mlp and not shared:
            return "use_double_wide_mlp needs num_kv_shared_layers, the layers that it is for; leave it out."
        if not shared:
            return None
        if not self.attention.shares_keys:
            return f"num_kv_shared_layers ({shared}) needs attention.name gemma4; found {self.attention.name}."
        if own < 1:
            return f"num_kv_shared_layers ({shared}) must be less than num_layers ({self.num_layers})."
        if self.use_double_wide_mlp and self.moe is not None:
            return "use_double_wide_mlp is for dense layers, without moe; leave one of the two out."
        names = self._layer_names()
        if missing := sorted(name for name in set(names[own:]) - set(names[:own]) if _has_keys(name)):
            return (
                f"num_kv_shared_layers ({shared}): the last {shared} layers attend to keys of earlier layers of their "
                f"type, but layers 1 to {own} have none of type {missing[0]}; share fewer layers."
            )
        return None

    @property
    def layers_are_independent(self) -> bool:
        """True if a layer reads the residual stream alone, not keys of other layers or embeddings of its own."""
        return not (self.num_kv_shared_layers or self.hidden_size_per_layer_input)

    def check_independent_layers(self, what: str, way_out: str) -> None:
        """Check that a layer's output follows from its input, as it must where layers run apart from each other.

        Args:
          what: what runs them so, such as "a pipeline".
          way_out: end of the message, such as "set parallel.pipeline=1".

        Raises:
          ConfigError: layers also read keys and values of others, or embeddings of their own.
        """
        if not self.layers_are_independent:
            raise ConfigError(
                f"{what} passes only the residual stream from layer to layer, but the layers of this model read more: "
                f"num_kv_shared_layers is {self.num_kv_shared_layers}, hidden_size_per_layer_input is "
                f"{self.hidden_size_per_layer_input}; {way_out}."
            )

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads; equal to `num_heads` where `num_kv_heads` is not set."""
        return self.num_kv_heads or self.num_heads

    @property
    def width_per_head(self) -> int:
        """Number of channels per attention head; hidden_size / num_heads where `head_dim` is not set."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def rotary_channels(self) -> int:
        """Number of channels per attention head that rotate, rounded down as in transformers."""
        return self.attention.rotated_width(int(self.width_per_head * self.partial_rotary_factor))

    @property
    def feed_forward_size(self) -> int:
        """Width of a dense feed-forward sublayer; computed from hidden_size where `intermediate_size` is not set."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        if self.mlp == "plain":
            return 4 * self.hidden_size
        return -(-self.hidden_size * 8 // 3 // 64) * 64

    def feed_forward_width(self, layer: Layer) -> int:
        """Return the width of a layer's dense feed-forward sublayer."""
        wide = self.use_double_wide_mlp and layer.reuses is not None
        return self.feed_forward_size * (2 if wide else 1)

    @property
    def expert_size(self) -> int:
        """Width of one expert; that of a dense feed-forward sublayer where `moe_intermediate_size` is not set."""
        size = self.moe.moe_intermediate_size if self.moe is not None else None
        return size or self.feed_forward_size

    @property
    def embedding_factor(self) -> float:
        """Factor of the embeddings, from `scale_embeddings`."""
        if isinstance(self.scale_embeddings, bool):
            return self.hidden_size**0.5 if self.scale_embeddings else 1.0
        return self.scale_embeddings

    @property
    def score_divisor(self) -> float:
        """Square of the attention scores' divisor: `query_pre_attn_scalar`, or derived from the head width."""
        if self.query_pre_attn_scalar is not None:
            return self.query_pre_attn_scalar
        return self.width_per_head**2 / (self.base_head_dim or self.width_per_head)

    @property
    def attention_scale(self) -> float:
        """Factor that attention scores (query-key products) are multiplied by before the softmax."""
        return self.score_divisor**-0.5

    def heads(self, layer: Layer) -> AttentionSpec:
        """Return the attention settings of a layer: heads, scale, soft cap, window and chunks."""
        heads = AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.width_per_head,
            scale=self.attention_scale,
            soft_cap=self.attn_logit_softcapping,
            window=layer.window,
            chunk=layer.chunk,
            implementation=self.attention_implementation,
        )
        return heads if layer.mixer is None else layer.mixer.layer_heads(heads)

    def rotary_width(self, layer: Layer) -> int:
        """Return the number of channels of a layer's heads that rotate, rounded down as in transformers."""
        return self.attention.rotated_width(int(self.heads(layer).head_dim * self.partial_rotary_factor))

    @property
    def prediction_layer(self) -> Layer:
        """Structure of a layer for multi-token prediction: of the last layer with attention, or else of the last one.

        In hybrids it is not a recurrent one, whose state could not go back to an earlier token when a draft is refused.
        """
        layers = self.layers()
        attending = (layer for layer in layers[::-1] if layer.mixer and not isinstance(layer.mixer, Recurrent))
        return next(attending, layers[-1])

    def layers(self) -> tuple[Layer, ...]:
        """Return what each layer consists of: its token mixer, window, rotation and feed-forward sublayer."""
        return _layers_and_mixers(self)[0]

    def _layer_names(self) -> list[str]:
        """Return the layer type of each layer."""
        return [self.layer_types[i % len(self.layer_types)] for i in range(self.num_layers)]

    def _layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return (layer type, has a mixture of experts, use of its keys) of each layer, from which its record follows.

        The keys of a layer are its own (None), its own and kept for later layers (keeps), or those of another (reuses).
        """
        names = self._layer_names()
        own = self.num_layers - self.num_kv_shared_layers
        last = {name: i for i, name in enumerate(names[:own])}

        def use_of_keys(i: int) -> Literal["keeps", "reuses"] | None:
            if not _has_keys(names[i]) or names[i] not in names[own:]:
                return None
            return "reuses" if i >= own else "keeps" if last[names[i]] == i else None

        mixture = [self.moe is not None and self.moe.is_mixture_layer(i) for i in range(self.num_layers)]
        return tuple((name, mixture[i], use_of_keys(i)) for i, name in enumerate(names))

    def _layer(self, name: str, mixture: bool, keys: Literal["keeps", "reuses"] | None) -> Layer:
        kind = LAYER_TYPES[name]
        local = kind.windowed and self.rope_local_base_freq is not None
        rotates = kind.mixer is not None and kind.rotates and self.positions == "rope"
        return Layer(
            mixer=None if kind.mixer is None else getattr(self, kind.mixer),
            window=self.sliding_window if kind.windowed else None,
            chunk=self.attention_chunk_size if kind.chunked else None,
            rotation=("local" if local else "global") if rotates else None,
            feed_forward=(
                (_feed_forward(self.moe) if mixture and not kind.dense else "dense") if kind.feed_forward else None
            ),
            pre_norms=self.pre_norms or kind.normalizes_inputs,
            post_norms=self.post_norms and not kind.normalizes_inputs,
            keeps=name if keys == "keeps" else None,
            reuses=name if keys == "reuses" else None,
        )

    def windows(self) -> tuple[int | None, ...]:
        """Return each layer's window, the number of keys that a query sees; None for all earlier keys."""
        return tuple(layer.window for layer in self.layers())

    @property
    def dense_layers(self) -> int:
        """Number of layers with a dense feed-forward sublayer, alone or next to experts."""
        return sum(layer.feed_forward in ("dense", "both") for layer in self.layers())

    @property
    def mixture_layers(self) -> int:
        """Number of layers with a mixture of experts."""
        return sum(layer.feed_forward in ("experts", "both") for layer in self.layers())

    def rotations(self) -> dict[str, Rotation]:
        """Return the rotations of queries and keys by the name that layers have for them."""
        found = {}
        for layer in dict.fromkeys(self.layers()):
            width = self.rotary_width(layer)
            if layer.rotation == "local":
                found["local"] = Rotation(width, self.rope_local_base_freq or self.rope_theta)
            elif layer.rotation == "global":
                found["global"] = Rotation(width, self.rope_theta, self.rope_scaling, self.max_position_embeddings)
        return found

    def mixers(self) -> list[Mixer]:
        """Return the configurations of the layers' token mixers, each once."""
        return list(_layers_and_mixers(self)[1])

    @property
    def layer_pattern(self) -> tuple[int, int]:
        """(First layer, length) of the repeating pattern of layers that a scan runs, leaving few layers unscanned.

        The pattern is followed by the layers of an incomplete repetition and by the `end_layers`.
        """
        start, period = _repeated_pattern(self._layer_kinds()[self.end_layers : self.num_layers - self.end_layers])
        return self.end_layers + start, period

    @property
    def end_layers(self) -> int:
        """Number of layers at each end that are not scanned: `unscanned_end_layers`, or fewer, to leave one to scan."""
        return min(self.unscanned_end_layers, (self.num_layers - 1) // 2)


@functools.lru_cache(maxsize=64)
def _layers_and_mixers(model: ModelConfig) -> tuple[tuple[Layer, ...], tuple[Mixer, ...]]:
    """Return the layers of a model and its token mixers, each once; a search of layouts asks for them per layout."""
    kinds = model._layer_kinds()
    records = {kind: model._layer(*kind) for kind in set(kinds)}
    layers = tuple(records[kind] for kind in kinds)
    return layers, tuple(dict.fromkeys(layer.mixer for layer in layers if layer.mixer is not None))


@functools.lru_cache(maxsize=64)
def _repeated_pattern(kinds: tuple[LayerKind, ...]) -> tuple[int, int]:
    """Return (start, period) of the repeated layers with the fewest layers to compile: one period and the rest."""

    def period_of(kinds: tuple[LayerKind, ...]) -> int:
        fits = (p for p in range(1, len(kinds)) if all(kind == kinds[i % p] for i, kind in enumerate(kinds)))
        return next(fits, len(kinds))

    candidates = [(start, period_of(kinds[start:])) for start in range(len(kinds))]
    return min(candidates, key=lambda at: (sum(at) + (len(kinds) - at[0]) % at[1], at[0]))


def _feed_forward(moe: MoEConfig | None) -> Literal["experts", "both"]:
    return "both" if moe is not None and moe.beside_mlp else "experts"


def _near_divisors(number: int, near: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = max(d for d in divisors if d <= max(near, 1))
    above = min((d for d in divisors if d >= near), default=below)
    return f"{below} or {above}" if above != below else str(below)


def _has_keys(layer_type: str) -> bool:
    return LAYER_TYPES[layer_type].mixer == "attention"


_DIRECTORY = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Return the names of the presets that come with the package, sorted."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def preset_config(name: str, **changes: Any) -> ModelConfig:
    """Load the preset with this name as a `ModelConfig`.

    Args:
      changes: fields that differ from the preset.

    Raises:
      ConfigError: there is no such preset, or a change breaks a rule.
    """
    return build_component(ModelConfig, {**load_preset(name), "preset": name, **changes}, f"preset {name}")


def load_preset(name: str) -> dict[str, Any]:
    """Load the `model:` section of a preset's YAML file as plain data.

    Raises:
      ConfigError: there is no such preset.
    """
    if not isinstance(name, str) or name not in preset_names():
        raise ConfigError(f"model.preset: there is no preset {name!r}; {nearest(str(name), preset_names())}")
    return load_yaml(_DIRECTORY / f"{name}.yaml")
