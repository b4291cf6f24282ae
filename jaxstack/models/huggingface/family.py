"""A family of Hugging Face models: how it converts keys of config.json and names of tensors."""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxstack.config.loader import build_component
from jaxstack.errors import ConfigError
from jaxstack.models.config import MOST_PREDICTION_LAYERS, ModelConfig
from jaxstack.models.huggingface.config_fields import Row
from jaxstack.models.huggingface.tensors import Tensor
from jaxstack.models.layer import LAYER_TYPES

HARMLESS = frozenset(
    # Names of files and classes, the program that wrote them, and the dtype.
    ["model_type", "architectures", "auto_map", "_name_or_path", "transformers_version", "torch_dtype", "dtype"]
    # Settings of other programs.
    + ["use_cache", "cache_implementation", "pretraining_tp", "_attn_implementation_autoset", "gradient_checkpointing"]
    + ["output_attentions", "output_hidden_states", "return_dict", "keys_to_ignore_at_inference"]
    # Token ids belong to the tokenizer, tasks and labels to other heads.
    + ["bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "task_specific_params", "id2label", "label2id"]
    # Dropout is not part of the function; `model.dropout` is for the new run to decide.
    + ["attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout"]
)
"""Keys of config.json that do not change what the model computes."""

NESTED = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""Prefixes of a text model's tensors in multimodal files, old and new -> those in its own files."""

# Fields that do not change what the model computes, or that the comparison below has under another name.
_NOT_COMPARED = frozenset(
    ["preset", "initialization", "initializer_range", "dropout", "attention_implementation", "remat"]
    + ["scan_layers", "unscanned_end_layers", "parametrization", "base_width", "base_head_dim"]
    + ["num_kv_heads", "head_dim", "intermediate_size", "query_pre_attn_scalar", "layer_types", "sliding_window"]
    + ["attention_chunk_size", "floor_scale", "attn_scale"]
)
_NOT_COMPARED_OF_EXPERTS = frozenset(
    ["moe_intermediate_size", "capacity_factor", "router_aux_loss_coef", "router_z_loss_coef", "exchange_factor"]
    + ["implementation"]
)


class OtherModel(ConfigError):
    """A model that a family cannot express.

    Attributes:
      different: the fields in which it differs from the model that the family's config.json would describe.
    """

    def __init__(self, model_type: str, different: list[str]):
        super().__init__(f"{model_type} cannot express this model: {'; '.join(different)}.")
        self.different = different

    @property
    def distance(self) -> tuple[bool, int]:
        """Measure of the differences: True if layers have other token mixers, and the number of fields."""
        return any(text.startswith("token mixers") for text in self.different), len(self.different)


@dataclasses.dataclass(frozen=True)
class Family:
    """Conversion of one Hugging Face `model_type`: its config.json and the tensors of its checkpoints.

    Attributes:
      model_type, architecture: names in config.json.
      rows: conversion between config.json and `ModelConfig`.
      tensors: conversion between parameters and tensors of the files.
      alternatives: further rows, which apply in place of those of the same parameters to files that have their tensors.
      copies: tensors that each layer for multi-token prediction has in the files, and that are written but not read.
      prediction_prefix: prefix of the tensors of a layer for multi-token prediction, of which files have one at most.
        None: such layers, if the family has `copies`, follow the model's last layer.
      prefix: prefix of all tensor names except the head's; files of the bare model leave it out.
      nested: prefixes of tensor names in files of a multimodal model -> those in files of the text model.
      ignored: keys of config.json that do not change what this family computes.
      buffers: regular expression of tensors in old files that are not parameters.
    """

    model_type: str
    architecture: str
    rows: tuple[Row, ...]
    tensors: tuple[Tensor, ...]
    alternatives: tuple[Tensor, ...] = ()
    copies: tuple[Tensor, ...] = ()
    prediction_prefix: str | None = None
    prefix: str = "model."
    nested: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    buffers: str = r".*rotary_emb\.inv_freq"

    @property
    def most_predictions(self) -> int:
        """Largest number of layers for multi-token prediction that the files can have."""
        if self.prediction_prefix is not None:
            return 1
        return MOST_PREDICTION_LAYERS if self.copies else 0

    def predicts(self, layers: int, names: Iterable[str]) -> bool:
        """Return True if there are tensors of a layer for multi-token prediction, after so many layers of the model."""
        if self.prediction_prefix is not None:
            return any(name.startswith(self.prediction_prefix) for name in names)
        return any(re.match(rf"({self.prefix})?layers\.{layers}\.", name) for name in names)

    def tensors_in(self, names: Collection[str]) -> tuple[Tensor, ...]:
        """Return the rows for files with tensors of these names."""

        def has(row: Tensor) -> bool:
            return any(name.endswith(row.name.split("{layer}")[-1]) for name in names)

        return (*self.tensors, *filter(has, self.alternatives))

    def read(self, config: Mapping[str, Any], ignore: Collection[str] = ()) -> ModelConfig:
        """Convert a config.json to a model configuration.

        Args:
          ignore: unknown keys that are allowed.

        Raises:
          ConfigError: a key is missing, unknown, or has a value that the model does not support.
        """
        known = {key for row in self.rows for key in row.keys}
        strange = sorted(config.keys() - known - HARMLESS - self.ignored - set(ignore))
        if strange:
            shown = ", ".join(f"{key} ({str(config[key])[:40]})" for key in strange)
            raise ConfigError(
                f"config.json of a {self.model_type} has keys that jaxstack does not know: {shown}. It may compute "
                "something else than this model; if you know that a key does not matter, convert the checkpoint with "
                f"python -m jaxstack.convert --ignore-key {strange[0]}, and give the run that it writes."
            )
        fields: dict[str, Any] = {}
        for row in self.rows:
            try:
                fields |= row.read(config)
            except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
                keys = ", ".join(f"{key}: {config[key]!r}" for key in row.keys if key in config)
                raise ConfigError(f"config.json has a value of a wrong kind among {keys} ({error}).") from None
        fields = {key: value for key, value in fields.items() if value is not None}
        return build_component(ModelConfig, fields, "config.json")

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Convert a model configuration to a config.json, without token ids and dtype.

        Layers for multi-token prediction are left out if the files cannot have so many; the function stays the same.

        Raises:
          OtherModel: the family cannot express the model; the message names the fields.
          ConfigError: its config.json would be none of this family.
        """
        if model.num_nextn_predict_layers > self.most_predictions:
            model = model.model_copy(update={"num_nextn_predict_layers": 0})
        config: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        for row in self.rows:
            config |= row.write(model)
        try:
            found = self.read(config)
        except ConfigError as error:
            missing = str(error).replace("config.json has no", "its config.json would have no")
            raise ConfigError(f"{self.model_type} cannot express this model: {missing}") from None
        different = differences(model, found)
        if different:
            raise OtherModel(self.model_type, different)
        return config


@dataclasses.dataclass(frozen=True)
class Multimodal:
    """A multimodal `model_type`, of which only the text model is read. A model is written as the text model alone.

    Attributes:
      text: family of the text model, which `text_config` in config.json describes.
      defaults: keys that `text_config` may leave out, with the values that transformers assumes.
      ignored: keys of config.json about other inputs than text.
    """

    text: Family
    defaults: Mapping[str, Any]
    ignored: frozenset[str]

    def text_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of the text model.

        Raises:
          ConfigError: there is no `text_config`, or it is of another family.
        """
        said = config.get("text_config")
        kind = said.get("model_type", self.text.model_type) if isinstance(said, Mapping) else None
        if not isinstance(said, Mapping) or kind != self.text.model_type:
            raise ConfigError(
                f"config.json of a {config['model_type']} must have a text_config with model_type "
                f"{self.text.model_type}; found {kind!r}."
            )
        around = {key: value for key, value in config.items() if key not in self.ignored | {"text_config"}}
        return {**self.defaults, **around, **said, "model_type": kind}


def differences(wanted: ModelConfig, found: ModelConfig) -> list[str]:
    """Return the configuration fields in which two models differ in what they compute, each as `field a, not b`."""
    ours = _computed(wanted)
    theirs = _computed(found)
    if wanted.max_position_embeddings is None or wanted.positions == "rope":
        theirs["max_position_embeddings"] = ours["max_position_embeddings"]  # only a bound for rotary positions
    return [f"{key} {ours[key]}, not {theirs[key]}" for key in ours if ours[key] != theirs[key]]


def _computed(model: ModelConfig) -> dict[str, Any]:
    values = {key: value for key, value in model.model_dump(mode="json").items() if key not in _NOT_COMPARED}
    layers = model.layers()
    if model.positions == "rope" and not any(layer.rotation for layer in layers):
        values["positions"] = "none"
    if values["positions"] != "rope":
        values.update(rope_theta=None, rope_scaling=None, partial_rotary_factor=None)
    mixers = {kind.mixer for kind in LAYER_TYPES.values() if kind.mixer}
    values |= {name: None for name in mixers if getattr(model, name) not in model.mixers()}
    if values["ssd"]:
        values["ssd"] |= dict.fromkeys(("time_step_min", "time_step_max"))  # of the initialization
    if not any(layer.feed_forward for layer in layers):
        values.update(mlp=None, hidden_act=None, mlp_bias=None)
    local = values.pop("rope_local_base_freq")
    used = local if any(model.windows()) else None
    rotations = model.rotations()
    moe = values["moe"]
    if moe is not None:
        moe = {key: value for key, value in moe.items() if key not in _NOT_COMPARED_OF_EXPERTS}
        moe["moe_intermediate_size"] = model.expert_size
    attends = values["attention"] is not None
    if not attends:
        values.update(num_heads=None, qk_norm=None, qkv_bias=None, output_bias=None, attn_logit_softcapping=None)
    return {
        **values,
        "moe": moe,
        "rope_local_base_freq": used or values["rope_theta"],
        "num_kv_heads": model.kv_heads if attends else None,
        "head_dim": model.width_per_head if attends else None,
        "intermediate_size": model.feed_forward_size if model.dense_layers else None,
        # Some files have a power of it.
        "query_pre_attn_scalar": float(f"{model.score_divisor:.10g}") if attends else None,
        "scale_embeddings": model.embedding_factor,
        "windows a layer": list(model.windows()),
        "chunks a layer": [layer.chunk for layer in model.layers()],
        "floor_scale and attn_scale": (model.floor_scale, model.attn_scale if model.floor_scale else None),
        "layers with scaled rotary positions": [
            i for i, layer in enumerate(model.layers()) if layer.rotation and rotations[layer.rotation].scaling
        ],
        "layers without rotary positions": [i for i, layer in enumerate(model.layers()) if layer.rotation is None],
        "layers with norms of inputs, of outputs": [(layer.pre_norms, layer.post_norms) for layer in layers],
        "token mixers": [getattr(layer.mixer, "name", None) for layer in layers],
        "layers with experts": [i for i, layer in enumerate(layers) if layer.feed_forward in ("experts", "both")],
        "layers of one sublayer": [
            i for i, layer in enumerate(model.layers()) if not (layer.mixer and layer.feed_forward)
        ],
    }
