"""Opens a Hugging Face checkpoint for text generation with only a few layers in memory at a time."""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jaxstack.decoding.layer_window import WindowDecoder
from jaxstack.errors import ConfigError
from jaxstack.functional.module import FunctionalModule
from jaxstack.models.huggingface.partial_load import ModelParts
from jaxstack.models.huggingface.quantization_config import is_quantized
from jaxstack.models.pretrained import is_run
from jaxstack.run.build import build_model
from jaxstack.run.load import Run, read_config, read_stop_tokens, read_tokenizer
from jaxstack.run.setting import Setting


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
      overrides: `precision.key=value`; see `jaxstack.run.load.read_config`.
      report: called with a line on the memory that the weights take.

    Raises:
      ConfigError: the directory is a run, or several devices are asked for, or as `jaxstack.run.load.load`.
    """
    if resident_layers < 1:
        raise ConfigError(f"--resident-layers must be at least 1; found {resident_layers}.")
    if is_run(directory):
        raise ConfigError(
            f"--resident-layers reads single layers from safetensors, and {directory} is a run; convert it first: "
            f"python -m jaxstack.convert {directory} --output DIR."
        )
    if is_quantized(directory):
        raise ConfigError(
            f"--resident-layers reads plain weights, and those of {directory} are quantized; leave it out."
        )
    config = read_config(directory, overrides)
    if math.prod(config.parallel.degrees.values()) > 1:
        raise ConfigError("--resident-layers uses one device; leave the keys of parallel out.")
    setting = Setting.of(config, "decode", chosen=True)
    model = config.model.model_copy(update={"scan_layers": False})
    module = FunctionalModule(build_model(config.model_copy(update={"model": model}), setting.dtype))
    non_params = jax.jit(lambda key: module.init(key)[1])(jax.random.key(0))
    tokenizer = read_tokenizer(directory)
    stored = ModelParts(directory, model)
    decoder = WindowDecoder(
        module, stored, non_params, setting.rules, resident=resident_layers, vocab_size=tokenizer.vocab_size
    )
    report(f"{decoder.window_bytes / 1e6:,.1f} of {decoder.total_bytes / 1e6:,.1f} MB of weights in memory at most")
    stop_tokens = frozenset({tokenizer.document_start, *read_stop_tokens(directory)})
    return Run(Path(directory), config, 0, tokenizer, decoder, stop_tokens)
