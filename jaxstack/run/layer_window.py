"""Opens a Hugging Face checkpoint for text generation with only a few layers in memory at a time."""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jaxstack.decoding.layer_window import WindowDecoder
from jaxstack.errors import ConfigError
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.run.build import build_model
from jaxstack.run.load import Run, run_config, stop_tokens
from jaxstack.run.setting import Setting
from jaxstack.stored import StoredModel


def open_window(
    directory: str | Path,
    resident_layers: int,
    overrides: Sequence[str] = (),
    *,
    report: Callable[[str], None] = warnings.warn,
) -> Run:
    """Open a Hugging Face checkpoint for text generation; its layers are read from disk when they are needed.

    Args:
      directory: directory with config.json, safetensors and a tokenizer.
      resident_layers: number of layers in device memory at a time, the output head counted as one.
      overrides: `precision.key=value`; see `jaxstack.run.load.run_config`.
      report: called with a line on the memory that the weights take.

    Raises:
      ConfigError: the directory is a run, or several devices are asked for, or as `jaxstack.run.load.load`.
    """
    if resident_layers < 1:
        raise ConfigError(f"--resident-layers must be at least 1; found {resident_layers}.")
    stored = StoredModel.open(directory, report)
    config = run_config(stored, overrides)
    model = config.model.model_copy(update={"scan_layers": False})
    layers = stored.open_layers(model)
    if math.prod(config.parallel.degrees.values()) > 1:
        raise ConfigError("--resident-layers uses one device; leave the keys of parallel out.")
    setting = Setting.of(config, "decode", chosen=True)
    module = ModuleArrays(build_model(config.model_copy(update={"model": model}), setting.dtype))
    non_params = jax.jit(lambda key: module.init(key)[1])(jax.random.key(0))
    tokenizer = stored.tokenizer
    decoder = WindowDecoder(
        module, layers, non_params, setting.rules, resident=resident_layers, vocab_size=tokenizer.vocab_size
    )
    report(f"{decoder.window_bytes / 1e6:,.1f} of {decoder.total_bytes / 1e6:,.1f} MB of weights in memory at most")
    return Run(stored.directory, config, 0, tokenizer, decoder, stop_tokens(stored))
