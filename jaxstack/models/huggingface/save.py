"""Export of models to Hugging Face checkpoints, one parameter at a time."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxstack.errors import ConfigError, JaxstackError, nearest
from jaxstack.models.adapters import adapted_layers, merge_adapters
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.families import choose_family
from jaxstack.models.huggingface.files import CONFIG, claim_directory, write_json, write_weights
from jaxstack.models.huggingface.quantization_config import FP8, KEY, MXFP4, Scheme, make_quantization_config
from jaxstack.models.huggingface.quantized_weights import store, store_mxfp4
from jaxstack.models.huggingface.tensors import Leaf, find_copies, find_leaves
from jaxstack.models.transformer import Transformer
from pallas_kernels import PackedWeight

DTYPES = ("float32", "bfloat16", "float16")
MAX_SHARD_BYTES = 5 * 10**9


def to_huggingface(
    model: Any,
    directory: str | Path,
    *,
    config: ModelConfig | None = None,
    family: str | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> str:
    """Export a model to a Hugging Face checkpoint that `transformers` can load; return its model_type.

    Args:
      model: a `Transformer`, whose adapters are merged, or its parameters as nested dicts, on this process's devices.
      directory: a directory without a checkpoint; created if it does not exist.
      config: configuration of the model; required with nested dicts.
      family: the model_type; default: the plainest family that can express the model.
      dtype: dtype of the files: float32, bfloat16 or float16.
      max_shard_bytes: largest size of a file; larger checkpoints have several files with an index.

    Raises:
      ConfigError: no family can express the model, or the directory already has a checkpoint.
      JaxstackError: writing failed.
    """
    if isinstance(model, Transformer):
        config = config or model.config
        model = merge_adapters(nnx.clone(model)) if adapted_layers(model) else model
        flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
        arrays: Any = {"/".join(map(str, path)): variable.get_value() for path, variable in flat}
    else:
        named = jax.tree_util.tree_flatten_with_path(model)[0]
        arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): array for path, array in named}
    if config is None:
        raise TypeError("parameters without a Transformer need config=ModelConfig(...).")
    return write_checkpoint(arrays.__getitem__, config, Path(directory), family, dtype, max_shard_bytes)


def write_checkpoint(
    read: Callable[[str], Any],
    config: ModelConfig,
    directory: Path,
    family: str | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra: dict[str, Any] | None = None,
    format: str | None = None,
    warn: Callable[[str], None] = warnings.warn,
    reward_head: np.ndarray | None = None,
) -> str:
    """Write a Hugging Face checkpoint, reading one parameter at a time; return its model_type.

    Args:
      read: returns the parameter of a path; with `format` it may be a `PackedWeight`, which is written as it is stored.
      extra: further keys of config.json.
      format: format of packed weights, of `quantization.FORMATS`, which must be able to store each of them.
      warn: called with each warning.
      reward_head: weights [D] float32 of a reward model, for a checkpoint of a sequence classifier with one label.

    Raises:
      ConfigError: see `to_huggingface`; or this family stores a packed weight in another way than the format, or
        `transformers` has no sequence classifier of it.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: there is no {dtype!r}; {nearest(dtype, DTYPES)}")
    chosen, said = choose_family(config, family)
    if config.num_nextn_predict_layers > chosen.most_predictions:
        most = f"more than {chosen.most_predictions}" if chosen.most_predictions else "no"
        warn(f"a {chosen.model_type} has {most} layers for multi-token prediction; they are left out")
        config = config.model_copy(update={"num_nextn_predict_layers": 0})
    said |= {"torch_dtype": dtype, **(extra or {})}
    if reward_head is not None:
        said |= _classifier_keys(chosen.model_type, said["architectures"][0])
    leaves = find_leaves(config, chosen.tensors, chosen.prediction_prefix)
    leaves += find_copies(config, leaves, chosen.copies)
    claim_directory(directory)
    schemes: dict[str, Scheme] = {}

    def quantize(leaves: list[Leaf], weights: list[PackedWeight]) -> Iterator[tuple[str, np.ndarray]]:
        leaf = leaves[0]
        if format is None or not (leaf.is_matrices if format == MXFP4 else leaf.is_matrix):
            raise ConfigError(f"{chosen.model_type} stores {leaf.path} in another order; write it with --format dense.")
        if format == MXFP4:
            yield from ((leaf.names[0] + part, tensor) for part, tensor in store_mxfp4(weights).items())
            return
        for number, name in enumerate(leaf.names):
            module = name.removesuffix(".weight")
            matrix = weights[0].take(jnp.int32(number)) if leaf.leading_dims else weights[0]
            schemes[module], tensors = store(matrix, format)
            yield from ((f"{module}.{part}", tensor) for part, tensor in tensors.items())

    tensors = _tensors(leaves, read, jnp.dtype(dtype), quantize)
    if reward_head is not None:
        tensors = itertools.chain(tensors, [(_HEAD, _cast(_HEAD, reward_head[None], jnp.dtype(dtype)))])
    write_weights(directory, tensors, max_shard_bytes)
    if format is not None:
        linear = [leaf for leaf in leaves if leaf.is_linear and (format != FP8 or "router" not in leaf.path)]
        modules = {name.removesuffix(".weight") for leaf in linear for name in leaf.names}
        said[KEY] = make_quantization_config(schemes, (modules | {"lm_head"}) - schemes.keys(), format)
    # Written last, because a directory without it is not a checkpoint.
    write_json(directory / CONFIG, said)
    return chosen.model_type


_HEAD = "score.weight"
"""Name of the head of a sequence classifier in `transformers`."""
_CLASSIFIERS = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "smollm3", "phi3", "olmo2", "olmo3"),
    *("gpt_oss", "deepseek_v2", "deepseek_v3", "gpt2"),
)
"""Families of which `transformers` has a sequence classifier that reads the hidden state of the last token."""


def _classifier_keys(model_type: str, architecture: str) -> dict[str, Any]:
    """Return keys of config.json that make a language model a sequence classifier with one label.

    Raises:
      ConfigError: `transformers` has none of this family.
    """
    if model_type not in _CLASSIFIERS:
        raise ConfigError(
            f"transformers has no sequence classifier of the family {model_type}, for a reward model's head; "
            f"give --model-type one of {', '.join(_CLASSIFIERS)} that fits the model, or use the run itself "
            "(jaxstack.run.load.load_reward_model)."
        )
    name = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    labels = {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    return {"architectures": [f"{name}ForSequenceClassification"], **labels}


def _tensors(
    leaves: list[Leaf],
    read: Callable[[str], Any],
    dtype: np.dtype,
    quantize: Callable[[list[Leaf], list[PackedWeight]], Iterator[tuple[str, np.ndarray]]],
) -> Iterator[tuple[str, np.ndarray]]:
    groups: dict[tuple[str, ...], list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.names, []).append(leaf)  # several leaves where the checkpoint has one fused tensor
    for names, group in groups.items():
        arrays = [read(leaf.path) for leaf in group]
        if isinstance(arrays[0], PackedWeight):
            yield from quantize(group, arrays)
            continue
        for number, name in enumerate(names):
            parts = [
                leaf.row.write(_piece(array, np.unravel_index(number, leaf.shape[: leaf.leading_dims]), name))
                for leaf, array in zip(group, arrays, strict=True)
            ]
            yield name, _cast(name, group[0].row.join(parts, group[0].groups), dtype)


def _piece(array: jax.Array | np.ndarray, at: tuple[np.intp, ...], name: str) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise JaxstackError(f"{name} lies on several processes: convert the run's checkpoint in one process instead.")
    return np.asarray(array[tuple(map(int, at))]) if at else np.asarray(array)


def _cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == np.float16 and array.size and math.isfinite(most := float(np.abs(array).max())) and most > 65504:
        raise ConfigError(f"{name} has values up to {most:.3g}, which float16 cannot hold; take bfloat16.")
    return array.astype(dtype)
