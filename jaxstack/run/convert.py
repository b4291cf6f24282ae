"""Run directories made of Hugging Face checkpoints, and Hugging Face checkpoints made of runs."""

import argparse
import functools
import json
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.config.loader import dump_yaml
from jaxstack.data.chat_format import CONFIG as CHAT_CONFIG
from jaxstack.data.chat_format import ChatFormat
from jaxstack.data.load_tokenizer import load_tokenizer, read_tokenizer_file
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.distributed.devices import start_devices
from jaxstack.errors import ConfigError
from jaxstack.files import write_file
from jaxstack.functional.module import FunctionalModule
from jaxstack.models import ModelConfig, Transformer, adapted_layers, count_parameters, from_huggingface
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.huggingface.load import nest
from jaxstack.models.huggingface.save import write_checkpoint
from jaxstack.models.pretrained import is_run
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
from jaxstack.run.build import build_model
from jaxstack.run.load import GENERATION, choose_step, end_tokens, open_run
from jaxstack.run_config import RunConfig, config_from_tree

_SEQUENCE_LENGTH = 1024
"""Tokens a sequence in the configuration of a converted model, where it has as many positions."""


def convert(args: argparse.Namespace) -> None:
    """What `python -m jaxstack.convert` does."""
    source, output = Path(args.source), Path(args.output)
    if not is_run(source):
        from_checkpoint(source, output, args.ignore_key)
        return
    if not args.max_shard_gb > 0:
        raise ConfigError(f"--max-shard-gb must be above 0; found {args.max_shard_gb}.")
    to_checkpoint(source, output, args.step, args.dtype, args.model_type, int(args.max_shard_gb * 10**9))


def from_checkpoint(source: Path, output: Path, ignore: Sequence[str] = ()) -> None:
    """Makes a run directory, with the weights as the checkpoint of step 0.

    Raises:
      ConfigError: as `from_huggingface`, or `output` is a run directory already.
    """
    if (output / "config.yaml").exists() or (output / "checkpoints").exists():
        raise ConfigError(f"{output} is a run directory already; give another one.")
    model = read_model_config(source, ignore)
    tokenizer = read_tokenizer_file(str(source)) if (source / "tokenizer.json").is_file() else None
    config = _make_config(output, model, tokenizer)
    rules = make_rules(make_mesh(ParallelConfig(fsdp=start_devices())))
    transformer = from_huggingface(source, mesh=rules, ignore=ignore)
    params, non_params = FunctionalModule(lambda rngs: Transformer(model, rngs)).split(transformer)
    with CheckpointManager(output / "checkpoints", report=_warn) as manager:
        manager.save(0, {"params": params, "non_params": non_params}, {"batches": 0, "data": None}, wait=True)
    if tokenizer is not None:
        tokenizer.save(output / "tokenizer")
        if tokenizer.vocab_size > (model.vocab_size or 0):
            _warn(f"the tokenizer has {tokenizer.vocab_size} ids, the model only {model.vocab_size} rows for them")
    else:
        _warn(f"{source} has no tokenizer.json: put one at {output}/tokenizer to generate and evaluate text")
    if ends := end_tokens(source):
        write_file(output / GENERATION, (json.dumps({"eos_token_id": ends}) + "\n").encode())
    write_file(output / "config.yaml", dump_yaml(config).encode())
    print(f"{output}: {count_parameters(model).total:,} parameters of {source}")


def to_checkpoint(
    source: Path, output: Path, step: int | None, dtype: str, model_type: str | None, max_shard_bytes: int
) -> None:
    """Makes a Hugging Face checkpoint of a run's, reading and writing a parameter at a time.

    Raises:
      ConfigError: no family can express the model, or `output` holds a checkpoint already.
      JaxstackError: the checkpoint is damaged, or writing failed.
    """
    config = open_run(source)
    manager = CheckpointManager(source / "checkpoints", report=_warn)
    chosen = choose_step(manager, step)
    folder = source / "tokenizer"
    tokenizer = load_tokenizer(folder) if folder.is_dir() else None
    ids = {} if tokenizer is None else _token_ids(tokenizer)
    kind = write_checkpoint(
        _leaf_reader(manager, chosen, config), config.model, output, model_type, dtype, max_shard_bytes, ids
    )
    if ends := end_tokens(source):
        write_file(output / GENERATION, (json.dumps({"eos_token_id": ends}) + "\n").encode())
    if tokenizer is not None and (model_json := tokenizer.model_json()) is not None:
        write_file(output / "tokenizer.json", model_json.encode())
        write_file(output / CHAT_CONFIG, (tokenizer.chat or ChatFormat()).as_json().encode())
    else:
        _warn(f"{source} has no tokenizer.json: {output} is written without one")
    print(f"{output}: {kind}, {dtype}, {source} at step {chosen}")


def _token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids for config.json: of the tokens that the tokenizer's chats begin and end with, or else document starts."""
    tokens = {} if tokenizer.chat is None else tokenizer.chat.tokens
    return {
        f"{name}_id": tokenizer.special_tokens.get(tokens.get(name, ""), tokenizer.document_start)
        for name in ("bos_token", "eos_token")
    }


def _leaf_reader(manager: CheckpointManager, step: int, config: RunConfig) -> Callable[[str], np.ndarray]:
    """Reads a parameter at a time, by its path in the model without adapters; adapters are merged."""
    model = build_model(config, jnp.float32)
    shapes: Any = FunctionalModule(model).abstract_params
    adapted = adapted_layers(nnx.eval_shape(lambda: model(nnx.Rngs(0))))

    def stored(path: str) -> np.ndarray:
        leaf = functools.reduce(operator.getitem, path.split("/"), shapes)
        wanted = {"params": nest({path: np.empty(leaf.shape, leaf.dtype)})}
        tree, _ = manager.restore(step, wanted, subset=True)
        return jax.tree.leaves(tree)[0]

    def read(path: str) -> np.ndarray:
        layer, _, name = path.rpartition("/")
        if name != "kernel" or layer not in adapted:
            return stored(path)
        adapter = adapted[layer].adapter
        parts = ["a", "b"] if adapter.magnitude is None else ["a", "b", "magnitude"]
        return np.asarray(adapter.merge(stored(path), *(stored(f"{layer}/adapter/{part}") for part in parts)))

    return read


def _make_config(output: Path, model: ModelConfig, tokenizer: Tokenizer | None) -> RunConfig:
    length = min(_SEQUENCE_LENGTH, model.max_position_embeddings or _SEQUENCE_LENGTH)
    tree: dict[str, Any] = {
        "run": {"name": output.name, "dir": str(output.parent)},
        "model": model.model_dump(mode="json"),
        "train": {"sequence_length": length},
    }
    if tokenizer is not None:
        tree["data"] = {"tokenizer": {"name": "file", "path": str(output / "tokenizer")}}
    return config_from_tree(tree, f"the configuration of {output}")


def _warn(text: str) -> None:
    print(text, file=sys.stderr)
