"""Reads calibration text: sequences of a run's own training text, or of given files."""

from collections.abc import Callable

import numpy as np

from jaxstack.compress.config import CalibrationConfig
from jaxstack.data.build_shards import available_cores
from jaxstack.data.config import DataConfig, SourceConfig, TokenizerConfig
from jaxstack.data.loader import Data, open_data
from jaxstack.errors import ConfigError
from jaxstack.run_config import RunConfig
from jaxstack.stored import StoredModel

_LONGEST_DEFAULT = 2048
"""Tokens of a sequence for a Hugging Face checkpoint, unless the model has fewer positions."""


def read_calibration(
    stored: StoredModel,
    config: RunConfig,
    calibration: CalibrationConfig,
    report: Callable[[str], None] = lambda text: None,
) -> list[dict[str, np.ndarray]]:
    """Read calibration text as batches of `tokens`, with packing also `positions` and `segment_ids`, int32 [B, T].

    The rows are the first ones of the training order, without augmentation.

    Args:
      stored: the model on disk.
      config: its configuration, from `jaxstack.run.load.run_config`.
      calibration: how many sequences, of which text.
      report: called with each line of progress while data is prepared.

    Raises:
      ConfigError: there is no text, or too little of it.
    """
    if not calibration.data and not stored.held_out_text:
        raise ConfigError(
            f"{stored.directory} is a Hugging Face checkpoint, with no training text to calibrate on: name files in "
            "calibration.data of the recipe, or at the end of the command, as 'calibration.data=[texts/*.txt]'."
        )
    length = calibration.sequence_length or _default_length(config, stored.held_out_text)
    longest = config.model.max_position_embeddings
    if longest is not None and length > longest:
        raise ConfigError(
            f"calibration.sequence_length ({length:,}) must not exceed the model's max_position_embeddings "
            f"({longest:,}); lower it in the recipe, or end the command with calibration.sequence_length={longest}."
        )
    data = open_data(
        _data_section(stored, config.data, calibration.data),
        sequence_length=length,
        seed=config.run.seed,
        report=report,
        workers=available_cores(),
    )
    try:
        _check_enough(data, calibration.sequences, length)
        size = _batch_size(calibration)
        numbers = range(calibration.sequences // size)
        return [_inputs(data, number, size) for number in numbers]
    finally:
        data.close()


def _default_length(config: RunConfig, trained_here: bool) -> int:
    if trained_here:
        return config.train.sequence_length
    return min(_LONGEST_DEFAULT, config.model.max_position_embeddings or _LONGEST_DEFAULT)


def _data_section(stored: StoredModel, section: DataConfig, paths: tuple[str, ...]) -> DataConfig:
    """Return the data configuration for calibration: the run's own without augmentations, or of the given files."""
    if not paths:
        return section.model_copy(update={"augmentations": ()})
    return section.model_copy(
        update={
            "sources": tuple(SourceConfig(path=path) for path in paths),
            "held_out": (),
            "held_out_fraction": 0.0,
            "tokenizer": TokenizerConfig(name="file", path=str(stored.tokenizer_folder)),
            "augmentations": (),
        }
    )


def _check_enough(data: Data, sequences: int, length: int) -> None:
    rows = sum(data.rows_per_epoch)
    if rows < sequences:
        shorter = data.train_tokens // sequences
        ways = ["give more text in calibration.data"]
        if rows:
            ways.append(f"set calibration.sequences to at most {rows:,}")
        if shorter >= 2:
            ways.append(f"set calibration.sequence_length to at most {shorter:,}")
        raise ConfigError(
            f"the calibration text has {data.train_tokens:,} tokens, {rows:,} sequences of {length:,}; "
            f"calibration.sequences is {sequences:,}. To fix it, {', or '.join(ways)}."
        )


def _batch_size(calibration: CalibrationConfig) -> int:
    """Return the largest batch size, up to the configured one, that divides the number of calibration sequences."""
    wanted = min(calibration.batch_size, calibration.sequences)
    return next(size for size in range(wanted, 0, -1) if calibration.sequences % size == 0)


def _inputs(data: Data, number: int, size: int) -> dict[str, np.ndarray]:
    batch = data.batch(number, global_batch_size=size, rows=range(size))
    return {name: batch[name] for name in ("tokens", "positions", "segment_ids") if name in batch}
