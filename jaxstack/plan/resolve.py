"""Fills in the parallel degrees and vocabulary size of a configuration, without the run's devices or data."""

import math

import jax

from jaxstack.cost_model.cluster import parse_cluster
from jaxstack.data.config import TokenizerConfig
from jaxstack.data.load_tokenizer import read_tokenizer_file
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig
from jaxstack.run.build import resolve_model
from jaxstack.run.setting import with_training_layout
from jaxstack.run_config import RunConfig


def resolve_plan(config: RunConfig, devices: int | None) -> tuple[RunConfig, bool]:
    """Return (configuration with parallel degrees and vocabulary size filled in, True if that size is only assumed).

    Restricts JAX to CPUs in this process: traced functions hold constants, which must not initialize a GPU.

    Args:
      config: configuration of the run.
      devices: number of devices; default: `parallel.simulate_devices`, or the product of the degrees.

    Raises:
      ConfigError: the degrees, the model or the batch do not fit, or the number of devices is not known.
    """
    jax.config.update("jax_platforms", "cpu")
    # `parallel: auto` plans for H200s: this process has none of the run's devices.
    config = with_training_layout(config, _device_count(config) if devices is None else devices, parse_cluster("h200"))
    model, assumed = resolve_vocabulary(config)
    return config.model_copy(update={"model": model}), assumed


def _device_count(config: RunConfig) -> int:
    degrees = config.parallel.degrees
    if config.parallel.simulate_devices is not None:
        return config.parallel.simulate_devices
    free = [axis for axis, degree in degrees.items() if degree == -1]
    if free:
        raise ConfigError(
            f"parallel.{free[0]} is -1 (all remaining devices), but the number of devices is unknown: give --devices N."
        )
    return math.prod(degrees.values())


def resolve_vocabulary(config: RunConfig) -> tuple[ModelConfig, bool]:
    """Return the model with an unset vocabulary size taken from the tokenizer, and True if the tokenizer is untrained.

    Raises:
      ConfigError: the model's vocabulary is smaller than the tokenizer's, or the tokenizer's file cannot be read.
    """
    model = config.model
    tokenizer = config.data.tokenizer
    if model.vocab_size is not None:
        return model, False
    return resolve_model(model, _tokenizer_size(tokenizer)), tokenizer.name in ("auto", "bpe") and not tokenizer.path


def _tokenizer_size(tokenizer: TokenizerConfig) -> int:
    if tokenizer.name == "byte":
        return ByteTokenizer().vocab_size
    if tokenizer.path:
        return read_tokenizer_file(tokenizer.path, tokenizer.document_start).vocab_size
    return tokenizer.vocab_size
