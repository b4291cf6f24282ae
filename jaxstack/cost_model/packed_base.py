"""The compressed model that a run with adapters keeps packed, and the device memory that it takes."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from jaxstack.checkpoint import compressed
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.errors import ConfigError
from jaxstack.local_sgd.folder import FolderDiLoCo
from jaxstack.run_config import RunConfig
from jaxstack.stored.run_directory import PACKED_BASE, base_weights
from pallas_kernels import PackedWeight

PACKED_STATE = (0, 11)
"""First version of jax with which integers of 4 bits were tried as arguments of a compiled step."""


def find_packed_base(config: RunConfig, say: Callable[[str], None] = lambda line: None) -> Path | None:
    """Return the directory of the compressed model whose weights a run keeps packed beside its adapters; None: none.

    That is the base of a run that goes on, or else the compressed model of `run.init_from`, where the run supports it.

    Args:
      config: configuration of the run, whose layout is resolved.
      say: called with the reason why a packed model is read as plain numbers.

    Raises:
      ConfigError: the run goes on from one that keeps its base packed, which this layout or precision does not support.
    """
    if not config.adapters.rules:
        return None
    for owner in (config.directory, config.run.branch_from):
        if owner is not None and compressed.is_compressed(Path(owner) / PACKED_BASE):
            if reason := _unpacked_reason(config):
                raise ConfigError(
                    f"{owner} trains adapters beside weights that stay packed, which this run cannot: {reason}; "
                    "go on with the settings that it began with, or start a new run from its base."
                )
            return Path(owner) / PACKED_BASE
    source = config.run.init_from
    if source is None or not compressed.is_compressed(source):
        return None
    if CheckpointManager(config.directory / "checkpoints").all_steps():  # of a run whose base was unpacked
        return None
    if reason := _unpacked_reason(config):
        say(f"note: the weights of {source} are unpacked, as {reason}")
        return None
    return Path(source)


def _unpacked_reason(config: RunConfig) -> str | None:
    """Return why a run with adapters does not keep a compressed model packed; None if it does."""
    if config.parallel.workers > 1 or isinstance(config.local_sgd, FolderDiLoCo):
        return "workers exchange plain weights"
    kept_whole = {"data"} if config.model.moe is not None else {"data", "fsdp"}
    split = [axis for axis, degree in config.parallel.degrees.items() if degree > 1 and axis not in kept_whole]
    if split:
        return f"parallel.{split[0]} splits them"
    if jax.__version_info__ < PACKED_STATE:
        return f"jax {jax.__version__} passes no integers of 4 bits to a compiled step; a newer one does"
    if config.model.scan_layers:
        return "model.scan_layers stacks them; set it to false"
    if any(rule.fp8 for rule in config.precision.fp8_rules):
        return "precision.fp8 quantizes them anew"
    if config.policy.loss is not None:
        return "jaxstack.reinforce samples with plain weights"
    return None


def packed_weights(directory: Path | None) -> Mapping[str, PackedWeight]:
    """Return the shapes of the weights that stay packed, by path; {} where there is no such model or weight."""
    return {} if directory is None else base_weights(compressed.describe_compressed(directory))


class PackedSize(NamedTuple):
    """Size of the weights that stay packed; each device holds all of them."""

    values: int = 0
    """Number of weights."""
    bytes: float = 0.0
    """Bytes in device memory, where integers of up to 4 bits take half a byte, and those of up to 8 bits one."""

    @classmethod
    def of(cls, weights: Mapping[str, PackedWeight]) -> "PackedSize":
        """Return the size of weights, whose arrays may be `jax.ShapeDtypeStruct`."""
        values = 0
        size = 0.0
        for weight in weights.values():
            bits = weight.format.bits_of
            for name, array in weight.arrays.items():
                each = 8 * array.dtype.itemsize if name not in bits else 4 if bits[name] <= 4 else 8
                size += array.size * each / 8
            values += math.prod(weight.shape)
        return cls(values, size)
