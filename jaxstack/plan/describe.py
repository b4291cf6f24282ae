"""A configuration laid out on a mesh without devices: what each would hold and do."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jaxstack.data.config import TokenizerConfig
from jaxstack.data.load_tokenizer import read_tokenizer_file
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.errors import ConfigError
from jaxstack.models import count_parameters, model_flops_per_token
from jaxstack.parallel import AXES
from jaxstack.plan.choose import training_layout
from jaxstack.run.build import make_trainer, resolve_model
from jaxstack.run_config import RunConfig


def describe_plan(config: RunConfig, devices: int | None = None) -> dict[str, Any]:
    """What a run with this configuration would be on `devices` devices, as plain JSON.

    Args:
      devices: default: what the degrees multiply to, or `parallel.simulate_devices`.

    Raises:
      ConfigError: the degrees, the model or the batch do not fit, or the number of devices is not known.
    """
    config, assumed = resolve_plan(config, devices)
    degrees = config.parallel.degrees
    mesh = AbstractMesh(tuple(degrees.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    trainer = make_trainer(config, lambda step: {}, mesh=mesh)
    count, train = count_parameters(config.model), config.train
    tokens = train.global_batch_size * train.sequence_length
    flops = model_flops_per_token(config.model, train.sequence_length) * tokens
    found = {
        "name": config.run.name,
        "devices": math.prod(degrees.values()),
        "parameters_total": count.total,
        "vocabulary_assumed": assumed,
        "tokens_a_step": tokens,
        "model_flops_a_step": flops,
        "model_flops_a_step_and_device": flops / math.prod(degrees.values()),
        "sharding": trainer.describe_sharding(),
    }
    return found if trainer.pipeline is None else {**found, "pipeline": trainer.describe_pipeline()}


def resolve_plan(config: RunConfig, devices: int | None) -> tuple[RunConfig, bool]:
    """The configuration with its degrees and vocabulary, and whether the latter is a guess. JAX keeps off GPUs then."""
    jax.config.update("jax_platforms", "cpu")  # traced functions hold constants; they shall not wake a GPU
    config = training_layout(config, _device_count(config) if devices is None else devices)
    model, assumed = _vocabulary(config)
    return config.model_copy(update={"model": model}), assumed


def _device_count(config: RunConfig) -> int:
    degrees = config.parallel.degrees
    if config.parallel.simulate_devices is not None:
        return config.parallel.simulate_devices
    free = [axis for axis, degree in degrees.items() if degree == -1]
    if free:
        raise ConfigError(
            f"parallel.{free[0]} is -1, the rest of the devices, and nothing says how many there are: give --devices N."
        )
    return math.prod(degrees.values())


def _vocabulary(config: RunConfig) -> tuple[Any, bool]:
    """The model with its vocabulary, and whether its size is a guess: that of a tokenizer that a run would train."""
    model, tokenizer = config.model, config.data.tokenizer
    if model.vocab_size is not None:
        return model, False
    return resolve_model(model, _tokenizer_size(tokenizer)), tokenizer.name in ("auto", "bpe") and not tokenizer.path


def _tokenizer_size(tokenizer: TokenizerConfig) -> int:
    if tokenizer.name == "byte":
        return ByteTokenizer().vocab_size
    if tokenizer.path:
        return read_tokenizer_file(tokenizer.path, tokenizer.document_start).vocab_size
    return tokenizer.vocab_size
