"""Low-rank adapters (LoRA) in the files of the library PEFT: adapter_config.json and adapter_model.safetensors."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxstack.errors import ConfigError
from jaxstack.models.adapter_stack import AdapterMatrices, LowRank
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.families import choose_family
from jaxstack.models.huggingface.files import read_json
from jaxstack.models.huggingface.tensors import Leaf, even_then_odd, find_leaves

PEFT_CONFIG = "adapter_config.json"
"""File by which a directory with an adapter is recognized."""
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NEUTRAL = {
    "use_dora": (False, None),
    "modules_to_save": ([], None),
    "bias": ("none", None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "trainable_token_indices": ([], {}, None),
}
"""Settings that change more than the dense layers, or in another way, with the values that do not."""


def read_peft(directory: Path, model: ModelConfig) -> AdapterMatrices:
    """Read an adapter of a model with unrolled layers.

    Args:
      directory: has adapter_config.json and adapter_model.safetensors.
      model: configuration of the model that the adapter belongs to.

    Raises:
      ConfigError: the adapter is of another kind, changes other weights than those of dense layers, or is another
        model's.
    """
    settings = read_json(directory / PEFT_CONFIG)
    _check_settings(settings, directory)
    tensors = _read_tensors(directory / _WEIGHTS)
    left = set(tensors)
    family, _ = choose_family(model)
    found = {}
    for leaf in find_leaves(model, family.tensors_in([]), family.prediction_prefix):
        name = leaf.names[0].removesuffix(".weight")
        pair = [f"{name}.lora_{kind}.weight" for kind in ("A", "B")]
        if leaf.path.endswith("/kernel") and all(tensor in tensors for tensor in pair):
            a, b = (tensors[tensor] for tensor in pair)
            found[leaf.path.removesuffix("/kernel")] = _arrange(leaf, a, b, _scale(settings, len(a), directory))
            left.difference_update(pair)
    if left:
        raise ConfigError(f"{directory} has {min(left)}, which belongs to no dense layer of this model.")
    return found


def _check_settings(settings: Mapping[str, Any], directory: Path) -> None:
    """Check that the adapter is of a kind that is read.

    Raises:
      ConfigError: a setting is not supported.
    """
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"{directory} must have an adapter of peft_type LORA; found {settings.get('peft_type')!r}.")
    for name, neutral in _NEUTRAL.items():
        if settings.get(name) not in neutral:
            raise ConfigError(
                f"{directory} has {name}={settings[name]!r}, which adapters that are served together do not support; "
                "merge it into the weights, and serve that model alone."
            )


def _scale(settings: Mapping[str, Any], rank: int, directory: Path) -> float:
    """Return what the product of a layer's matrices of this rank is multiplied by.

    Raises:
      ConfigError: the settings have another rank.
    """
    known = sorted({settings["r"], *(settings.get("rank_pattern") or {}).values()})
    if rank not in known:
        raise ConfigError(
            f"{directory} has matrices of the rank {rank}, where its {PEFT_CONFIG} has {', '.join(map(str, known))}; "
            "copy both files from the same adapter."
        )
    return settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the matrices by the name of their layer's tensor, such as `model.layers.0.self_attn.q_proj.lora_A.weight`.

    Raises:
      ConfigError: there is no such file, or it is damaged.
    """
    try:
        tensors = load_file(str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no {path.name}; save the adapter with safe_serialization=True.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged or not a safetensors file ({error}); fetch it again.") from None
    return {
        name.removeprefix(_PREFIX).replace(".default.", "."): tensor.astype(np.float32)
        for name, tensor in tensors.items()
    }


def _arrange(leaf: Leaf, a: np.ndarray, b: np.ndarray, scale: float) -> LowRank:
    """Return the matrices of a layer, A [rank, in] and B [out, rank] of the file, with our dims and their order.

    Raises:
      ConfigError: they are another model's, or the layer's tensor is stored in a form that they cannot have.
    """
    row = leaf.row
    inputs, outputs = sorted(row.order, key=lambda dims: 0 not in dims)
    sizes = [leaf.piece[dim] for dim in inputs]
    shape = [leaf.piece[dim] for dim in outputs]
    joined = row.joined is not None
    if row.interleaved or leaf.groups > 1 or (joined and row.order[row.joined or 0] != outputs):
        raise ConfigError(f"the layer {leaf.names[0]} is stored in a form for which no adapters are read.")
    rank = len(a)
    found = (a.shape[1:], b.shape)
    wanted = ((math.prod(sizes),), (leaf.joined_size if joined else math.prod(shape), rank))
    if found != wanted:
        raise ConfigError(
            f"the adapter's matrices of {leaf.names[0]} have the shapes {a.shape} and {b.shape}, which do not fit a "
            f"layer with {wanted[0][0]} inputs and {wanted[1][0]} outputs."
        )
    b = b[leaf.start : leaf.start + math.prod(shape)].reshape(*shape, rank)
    if row.pairs:
        b = b[..., even_then_odd(shape[-1]), :]
    return LowRank(a.T.reshape(*sizes, rank), np.moveaxis(b, -1, 0) * scale)
