"""A run, or a Hugging Face checkpoint, opened for use: its configuration, tokenizer and parameters on a mesh."""

import functools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.config.loader import build_component, merge_overrides, merge_trees
from jaxstack.data.load_tokenizer import load_tokenizer, read_tokenizer_file
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.decode import Decoder, in_compute_dtype
from jaxstack.decoding.text import TextGenerator
from jaxstack.distributed.devices import cache_compilations, start_devices
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.functional.module import FunctionalModule
from jaxstack.gradients.pipeline_module import StagedModule
from jaxstack.models import ModelConfig, Transformer, unroll_layers
from jaxstack.models.huggingface.load import read_parameters
from jaxstack.models.pretrained import is_run, read_model
from jaxstack.parallel import AxisRules, ParallelConfig, make_mesh, make_rules
from jaxstack.precision.config import PrecisionConfig
from jaxstack.run.build import build_model
from jaxstack.run_config import RunConfig, TrainConfig, config_from_tree, layout_problems, load_config

_SEQUENCE_LENGTH = 1024
"""Tokens a sequence in the configuration of a Hugging Face checkpoint, where it has as many positions."""
GENERATION = "generation_config.json"
"""Where Hugging Face keeps the ids that end a text; a converted run keeps the file too."""


def open_run(directory: str | Path) -> RunConfig:
    """The configuration of an existing run.

    Raises:
      ConfigError: the directory holds no run.
    """
    path = Path(directory) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{directory} is not a run directory (it has no config.yaml); runs are at runs/<run.name>.")
    return load_config(path)


def open_config(directory: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run, or one for a Hugging Face checkpoint.

    Args:
      overrides: `parallel.key=value` and `precision.key=value`. With any of `parallel` the run's own layout does not
        count, but for its simulated devices.

    Raises:
      ConfigError: the directory holds neither, or an override is of another section or wrong.
    """
    if is_run(directory):
        config = open_run(directory)
    else:
        length = min(_SEQUENCE_LENGTH, read_model(directory).max_position_embeddings or _SEQUENCE_LENGTH)
        tree = {"run": {"init_from": str(directory)}, "train": {"sequence_length": length}}
        config = config_from_tree(tree, str(directory))
    changes = merge_overrides({}, overrides)
    if foreign := sorted(changes.keys() - {"parallel", "precision"}):
        raise ConfigError(f"only keys of parallel and precision can be set for a trained model; found {foreign[0]}.")
    simulated = {"simulate_devices": config.parallel.simulate_devices}
    own = {"parallel": (ParallelConfig, simulated), "precision": (PrecisionConfig, config.precision.model_dump())}
    trees = {name: merge_trees({name: own[name][1]}, {name: tree})[name] for name, tree in changes.items()}
    return config.model_copy(update={name: build_component(own[name][0], tree, name) for name, tree in trees.items()})


def open_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a run or a Hugging Face checkpoint.

    Raises:
      JaxstackError: there is none, or it is damaged.
    """
    if is_run(directory):
        return load_tokenizer(Path(directory) / "tokenizer")
    if not (Path(directory) / "tokenizer.json").is_file():
        raise ConfigError(f"{directory} has no tokenizer.json, without which text cannot go in or out; put one there.")
    return read_tokenizer_file(str(directory))


def end_tokens(directory: str | Path) -> list[int]:
    """The ids that end a text besides the tokenizer's document start: `eos_token_id` in Hugging Face's files."""
    names = (GENERATION,) if is_run(directory) else (GENERATION, "config.json")
    for name in names:
        try:
            found = json.loads((Path(directory) / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        ids = found if isinstance(found, list) else [found]
        if ids := [i for i in ids if isinstance(i, int)]:
            return ids
    return []


def choose_step(manager: CheckpointManager, step: int | None) -> int:
    """`step` if there is such a checkpoint, the newest intact one for None.

    Raises:
      JaxstackError: there is none.
    """
    if step is None:
        latest = manager.latest_step()
        if latest is None:
            raise JaxstackError(f"{manager.directory} holds no checkpoint yet; train the run first.")
        return latest
    steps = manager.all_steps()
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"there is no checkpoint of step {step} in {manager.directory}; there are: {known}.")
    return step


def check_tokenizer(folder: Path, step: int, extra: Any) -> None:
    """Raises JaxstackError where the tokenizer in `folder` is not the one that a checkpoint's extra data names."""
    data = extra.get("data") if isinstance(extra, dict) else None
    trained = data.get("tokenizer") if isinstance(data, dict) else None
    if trained is not None and folder.is_dir() and load_tokenizer(folder).hash != trained:
        raise JaxstackError(f"{folder} is not the tokenizer of checkpoint {step}: restore the files there.")


def restore_parameters(
    directory: str | Path, model: ModelConfig, module: FunctionalModule, rules: AxisRules, step: int | None
) -> tuple[Any, Any, int]:
    """(params, rest, step) of a run's checkpoint or of Hugging Face files (step 0), laid out on the mesh of `rules`.

    The optimizer's state is not read.
    """
    if not is_run(directory):
        if step is not None:
            raise ConfigError(f"{directory} is a Hugging Face checkpoint, which has no steps; leave --step out.")
        shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
        non_params = jax.jit(lambda key: module.init(key)[1])(jax.random.key(0))
        return read_parameters(directory, model, shardings), non_params, 0
    manager = CheckpointManager(Path(directory) / "checkpoints", report=lambda text: print(text, file=sys.stderr))
    chosen = choose_step(manager, step)
    stored = module.plain if isinstance(module, StagedModule) else module
    specs = stored.parameter_specs(rules)

    def wanted(x: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rules.sharding(spec))

    params = jax.tree.map(wanted, stored.abstract_params, specs)
    non_params = jax.tree.map(lambda x: wanted(x, jax.P()), module.abstract_non_params)
    tree, extra = manager.restore(chosen, {"params": params, "non_params": non_params}, subset=True)
    check_tokenizer(Path(directory) / "tokenizer", chosen, extra)
    params = tree["params"]
    if isinstance(module, StagedModule):
        shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
        params = jax.jit(module.stage_parameters, out_shardings=shardings)(params)
    return params, tree["non_params"], chosen


def decoding_layout(config: RunConfig, devices: int, given: bool) -> ParallelConfig:
    """How a model is laid out to generate: as its configuration says where that is `given`, else over `tensor`, on as
    many devices as divide its heads and widths.

    Raises:
      ConfigError: the layout does not fit the model or the devices.
    """
    if given:
        parallel = config.parallel
        if -1 in parallel.degrees.values() or math.prod(parallel.degrees.values()) > devices:
            parallel = parallel.resolve(devices)
        if problems := _decoding_problems(config, parallel):
            raise ConfigError(" ".join(problems))
        return parallel
    choices = (ParallelConfig(tensor=degree) for degree in range(devices, 0, -1) if config.model.kv_heads % degree == 0)
    return next(parallel for parallel in choices if parallel.tensor == 1 or not _decoding_problems(config, parallel))


def _decoding_problems(config: RunConfig, parallel: ParallelConfig) -> list[str]:
    rows = parallel.data * parallel.fsdp * parallel.expert
    train = TrainConfig(global_batch_size=rows, sequence_length=2 * parallel.tensor * parallel.context)
    return layout_problems(config.model_copy(update={"parallel": parallel, "train": train}))


def open_decoder(
    directory: str | Path, overrides: Sequence[str] = (), *, step: int | None = None, vocab_size: int | None = None
) -> tuple[Decoder, int]:
    """(a decoder with the parameters of a run or a Hugging Face checkpoint, their step); see `open_config`."""
    config = open_config(directory, overrides)
    devices = start_devices(config.parallel.simulate_devices)
    cache_compilations()
    parallel = decoding_layout(config, devices, any(word.startswith("parallel.") for word in overrides))
    rules = make_rules(make_mesh(parallel, jax.devices()[: math.prod(parallel.degrees.values())]))
    dtype = jnp.dtype(config.precision.compute_dtype(jax.devices()[0].platform))
    unrolled = config.model.model_copy(update={"scan_layers": False})
    stored = config.model if is_run(directory) else unrolled  # a run keeps its layers as they were trained
    module = FunctionalModule(build_model(config.model_copy(update={"model": stored}), dtype))
    params, non_params, chosen = restore_parameters(directory, stored, module, rules, step)
    if config.adapters.rules:
        plain = FunctionalModule(lambda rngs: Transformer(stored, rngs, dtype=dtype))
        layout = jax.tree.map(rules.sharding, plain.parameter_specs(rules))
        merge = jax.jit(module.merge_adapters, out_shardings=layout, donate_argnums=0)
        params, module = merge(*module.split_adapters(params), non_params), plain
    if stored != unrolled:
        params = in_compute_dtype(module, params, rules)
        module = FunctionalModule(lambda rngs: Transformer(unrolled, rngs, dtype=dtype))
        shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
        params = jax.jit(functools.partial(unroll_layers, stored), out_shardings=shardings)(params)
    return Decoder(module, params, non_params, rules, vocab_size=vocab_size), chosen


def open_generator(
    directory: str | Path, overrides: Sequence[str] = (), *, step: int | None = None, document_start: bool = True
) -> tuple[TextGenerator, int]:
    """(a text generator of a run or a Hugging Face checkpoint, its step).

    Args:
      overrides: `parallel.key=value` and `precision.key=value`.
      step: checkpoint to take; default: the newest.
      document_start: whether a text begins with the tokenizer's document-start id, as in training.

    Raises:
      ConfigError: the directory holds no model, or an override does not fit.
      JaxstackError: there is no checkpoint, or it is damaged.
    """
    is_run(directory)
    tokenizer = open_tokenizer(directory)
    decoder, chosen = open_decoder(directory, overrides, step=step, vocab_size=tokenizer.vocab_size)
    opening = [tokenizer.document_start] if document_start else []
    return TextGenerator(decoder, tokenizer, opening, {tokenizer.document_start, *end_tokens(directory)}), chosen
