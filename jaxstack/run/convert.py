"""Convert Hugging Face checkpoints into run directories, and runs into Hugging Face checkpoints."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.checkpoint.compressed import dense_parameter, named_leaves, write_compressed
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.config.loader import dump_yaml
from jaxstack.data.chat_format import CONFIG as CHAT_CONFIG
from jaxstack.data.chat_format import ChatFormat
from jaxstack.data.tokenizer import CONFIG_FILE as TOKENIZER_FILE
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.errors import ConfigError, nearest
from jaxstack.files import check_new, new_directory, write_file
from jaxstack.models import ModelConfig, Transformer, count_parameters, from_huggingface
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.huggingface.load import read_parameters
from jaxstack.models.huggingface.quantization_config import FORMATS
from jaxstack.models.huggingface.quantized_weights import unsupported_reason
from jaxstack.models.huggingface.save import write_checkpoint
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig
from jaxstack.parameter_paths import flatten, nest
from jaxstack.run.load import read_run_config
from jaxstack.run.setting import open_rules
from jaxstack.run_config import RunConfig, config_from_tree
from jaxstack.stored import StoredModel
from jaxstack.stored.huggingface import SEQUENCE_LENGTH, HuggingFaceCheckpoint
from jaxstack.stored.model import copy_stop_tokens
from jaxstack.stored.run_directory import TrainingRun
from pallas_kernels import PackedWeight

DENSE = "dense"
"""Format of weights as plain numbers."""


@dataclasses.dataclass(frozen=True)
class ImportedRun:
    """Result of an import: a run directory made from a Hugging Face checkpoint.

    Attributes:
      directory: the run directory.
      parameters: number of parameters.
      config: configuration of the run.
    """

    directory: Path
    parameters: int
    config: RunConfig


@dataclasses.dataclass(frozen=True)
class ExportedCheckpoint:
    """Result of an export: a Hugging Face checkpoint made from a run.

    Attributes:
      directory: the directory of the checkpoint.
      model_type: Hugging Face's name of the model family, such as "llama".
      dtype: dtype of the files.
      step: step of the run's checkpoint.
    """

    directory: Path
    model_type: str
    dtype: str
    step: int


def import_checkpoint(
    source: str | Path,
    output: str | Path,
    ignore: Sequence[str] = (),
    warn: Callable[[str], None] = warnings.warn,
) -> ImportedRun:
    """Make a run directory from a Hugging Face checkpoint, with its weights as the checkpoint of step 0.

    Args:
      source: directory of the Hugging Face checkpoint.
      output: run directory to write; must not exist, or be empty. It appears when it is complete.
      ignore: keys of config.json that are unknown and do not change the computation.
      warn: called with each warning.

    Raises:
      ConfigError: `output` exists already, or the checkpoint is of a kind that cannot be expressed; see
        `jaxstack.models.from_huggingface`.
      JaxstackError: writing failed.
    """
    output = Path(output)
    stored = HuggingFaceCheckpoint(Path(source), warn)
    check_new(output)
    model = read_model_config(source, ignore)
    if stored.packed:
        model = model.model_copy(update={"scan_layers": False, "unscanned_end_layers": 0})
    tokenizer = stored.tokenizer if stored.has_tokenizer else None
    config = converted_config(output, model, tokenizer)
    write = _import_packed if stored.packed else _import_plain
    with new_directory(output) as folder:
        write(stored.directory, folder, model, ignore, warn)
        if tokenizer is not None:
            tokenizer.save(folder / "tokenizer")
            if tokenizer.vocab_size > (model.vocab_size or 0):
                warn(
                    f"the tokenizer has {tokenizer.vocab_size} ids, but the model's vocabulary only {model.vocab_size}"
                )
        else:
            warn(f"{source} has no tokenizer.json: add one at {output}/tokenizer to generate and evaluate text")
        copy_stop_tokens(stored, folder)
        write_file(folder / "config.yaml", dump_yaml(config).encode())
    return ImportedRun(output, count_parameters(model).total, config)


def _import_plain(
    source: Path, output: Path, model: ModelConfig, ignore: Sequence[str], warn: Callable[[str], None]
) -> None:
    """Write the weights of a Hugging Face checkpoint as the checkpoint of step 0 in a run directory."""
    rules = open_rules(ParallelConfig(fsdp=-1))
    transformer = from_huggingface(source, mesh=rules, ignore=ignore)
    params, non_params = ModuleArrays(lambda rngs: Transformer(model, rngs)).split(transformer)
    with CheckpointManager(output / "checkpoints", report=warn) as manager:
        manager.save(0, {"params": params, "non_params": non_params}, {"batches": 0, "data": None}, wait=True)


def _import_packed(
    source: Path, output: Path, model: ModelConfig, ignore: Sequence[str], warn: Callable[[str], None]
) -> None:
    """Write a quantized Hugging Face checkpoint as a compressed model, keeping weights quantized where possible."""
    rules = open_rules(ParallelConfig())
    specs = ModuleArrays(lambda rngs: Transformer(model, rngs)).parameter_specs(rules)
    shardings = jax.tree.map(rules.sharding, specs)
    params = read_parameters(source, model, shardings, ignore, packed=True, report=warn)
    leaves = {path: _smallest(leaf) for path, leaf in named_leaves(params).items()}
    write_compressed(output, nest(leaves.items()), 0)


def _smallest(leaf: PackedWeight | jax.Array) -> PackedWeight | jax.Array:
    """Return a matrix in bfloat16 if that loses nothing, otherwise unchanged."""
    if isinstance(leaf, PackedWeight) or leaf.ndim < 2:
        return leaf
    small = leaf.astype(jnp.bfloat16)
    return small if bool(jnp.all(small == leaf)) else leaf


def export_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    dtype: str = "float32",
    format: str = DENSE,
    model_type: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    warn: Callable[[str], None] = warnings.warn,
) -> ExportedCheckpoint:
    """Make a Hugging Face checkpoint from a run, reading and writing one parameter at a time.

    A reward model becomes a sequence classifier with one label, whose head is `score.weight`.

    Args:
      source: run directory.
      output: directory to write; must not exist, or be empty. It appears when it is complete.
      step: step of the run's checkpoint; default: the newest.
      dtype: dtype of the files: float32, bfloat16 or float16.
      format: `dense`, or a format of `quantization_config.FORMATS` for the packed weights of dense layers and experts
        in a compressed model; `dtype` is then that of all other weights.
      model_type: Hugging Face's name of the model family; default: the simplest family that can express the model.
      max_shard_bytes: size limit of each file.
      warn: called with each warning.

    Raises:
      ConfigError: no family can express the model, or `output` exists already; the format stores none of
        the model's weights.
      JaxstackError: the checkpoint is damaged, or writing failed.
    """
    output = Path(output)
    if format not in (DENSE, *FORMATS):
        raise ConfigError(f"format: there is no {format!r}; {nearest(format, (DENSE, *FORMATS))}")
    packed = None if format == DENSE else format
    config = read_run_config(source)
    stored = StoredModel.open(source, warn)
    check_new(output)
    chosen = stored.choose_step(step)
    read = _dense_reader(stored, step, packed, warn)
    tokenizer = stored.tokenizer if stored.has_tokenizer else None
    ids = {} if tokenizer is None else _special_token_ids(tokenizer)
    head = stored.read_reward_head(step) if isinstance(stored, TrainingRun) and stored.is_reward_model else None
    with new_directory(output) as folder:
        family = write_checkpoint(
            read, config.model, folder, model_type, dtype, max_shard_bytes, ids, packed, warn, head
        )
        copy_stop_tokens(stored, folder)
        if tokenizer is not None and (tokenizer_json := tokenizer.tokenizer_json()) is not None:
            write_file(folder / "tokenizer.json", tokenizer_json.encode())
            write_file(folder / CHAT_CONFIG, (tokenizer.chat or ChatFormat()).as_json().encode())
        elif tokenizer is not None:
            tokenizer.save(folder)
            warn(
                f"a {tokenizer.kind} tokenizer has no tokenizer.json: {output}/{TOKENIZER_FILE} describes it, which "
                "jaxstack reads and transformers does not"
            )
        else:
            warn(f"{source} has no tokenizer: {output} is written without one")
    return ExportedCheckpoint(output, family, dtype, chosen)


def _special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return `bos_token_id` and `eos_token_id` for Hugging Face's config.json, from the tokenizer's chat format."""
    tokens = {} if tokenizer.chat is None else tokenizer.chat.tokens
    return {
        f"{name}_id": tokenizer.special_tokens.get(tokens.get(name, ""), tokenizer.document_start)
        for name in ("bos_token", "eos_token")
    }


def _dense_reader(
    stored: StoredModel, step: int | None, format: str | None, warn: Callable[[str], None]
) -> Callable[[str], np.ndarray | PackedWeight]:
    """Return a function that reads a parameter of a run by its path.

    Packed weights are unpacked, except those of dense layers and experts that `format` stores.
    """
    if format is not None and not stored.packed:
        raise ConfigError(
            f"{stored.directory} has no packed weights for --format {format}; make some with python -m "
            "jaxstack.compress, and convert what it writes."
        )
    read = stored.open_parameters(step)
    kept = set() if format is None else _storable(read, stored, format, warn)

    def read_dense(path: str) -> np.ndarray | PackedWeight:
        leaf = read(path)
        return leaf if path in kept else np.asarray(dense_parameter(path, leaf), np.float32)

    return read_dense


def _storable(
    read: Callable[[str], np.ndarray | PackedWeight], stored: StoredModel, format: str, warn: Callable[[str], None]
) -> set[str]:
    """Return the paths of packed (e.g. quantized) weights that the export format can store without unpacking them.

    Other programs multiply with embeddings and heads as plain numbers.

    Raises:
      ConfigError: there are none.
    """
    shapes = ModuleArrays(lambda rngs: Transformer(stored.model, rngs)).abstract_params
    leaves = {path: read(path) for path in map("/".join, flatten(shapes))}
    packed = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, PackedWeight)}
    layers = {path: unsupported_reason(leaf, format) for path, leaf in packed.items() if path.endswith("/kernel")}
    kept = {path for path, reason in layers.items() if reason is None}
    reasons = sorted({reason for reason in layers.values() if reason is not None})
    if not kept:
        matrices = [packed[path] for path in layers]
        fitting = [name for name in FORMATS if any(unsupported_reason(leaf, name) is None for leaf in matrices)]
        raise ConfigError(
            f"--format {format} stores no dense layer of {stored.directory}: {'; '.join(reasons) or 'none is packed'}. "
            f"Choose --format {' or '.join(fitting or [DENSE])}."
        )
    if reasons:
        warn(f"{len(layers) - len(kept)} of {len(layers)} packed layers are written dense: {'; '.join(reasons)}")
    if len(packed) > len(layers):
        warn("the embedding and the head are written dense, as vLLM reads them")
    return kept


def converted_config(output: Path, model: ModelConfig, tokenizer: Tokenizer | None) -> RunConfig:
    """Return the configuration of a run directory made from a Hugging Face checkpoint: its model and tokenizer."""
    length = min(SEQUENCE_LENGTH, model.max_position_embeddings or SEQUENCE_LENGTH)
    tree: dict[str, object] = {
        "run": {"name": output.name, "dir": str(output.parent)},
        "model": model.model_dump(mode="json"),
        "train": {"sequence_length": length},
    }
    if tokenizer is not None:
        tree["data"] = {"tokenizer": {"name": "file", "path": str(output / "tokenizer")}}
    return config_from_tree(tree, f"the configuration of {output}")
