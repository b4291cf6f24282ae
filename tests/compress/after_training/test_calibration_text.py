"""Calibration text: rows of the run's data or of files, and the message where there is too little."""

from pathlib import Path

import numpy as np
import pytest

from jaxstack.compress.after_training.calibrate import read_calibration
from jaxstack.compress.config import CalibrationConfig
from jaxstack.data.loader import open_data
from jaxstack.errors import ConfigError
from jaxstack.run_config import RunConfig, load_config
from jaxstack.stored import StoredModel


@pytest.fixture
def run(tmp_path: Path) -> tuple[StoredModel, RunConfig]:
    """The directory and the configuration of a run on a text of 4000 bytes."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i:04d} of a text\n" for i in range(200)), encoding="utf-8")
    config = load_config(
        None,
        [
            f"data.sources=[{{path: {text}}}]",
            "data.tokenizer.name=byte",
            f"data.cache_dir={tmp_path / 'cache'}",
            "train.sequence_length=64",
        ],
    )
    (tmp_path / "config.yaml").write_text("", encoding="utf-8")
    return StoredModel.open(tmp_path), config


def test_rows_of_the_run_in_batches_of_one_size(run: tuple[StoredModel, RunConfig]):
    stored, config = run
    batches = read_calibration(stored, config, CalibrationConfig(sequences=12, batch_size=8))
    assert [batch["tokens"].shape for batch in batches] == [(6, 64), (6, 64)]
    assert set(batches[0]) == {"tokens", "positions", "segment_ids"}
    data = open_data(config.data, sequence_length=64, seed=config.run.seed)
    expected = data.batch(0, global_batch_size=12, rows=range(12))["tokens"]
    data.close()
    np.testing.assert_array_equal(np.concatenate([batch["tokens"] for batch in batches]), expected)


def test_too_short_a_text_is_one_message_with_the_numbers(run: tuple[StoredModel, RunConfig]):
    stored, config = run
    with pytest.raises(
        ConfigError, match=r"has 3,\d\d\d tokens, 6\d sequences of 64; calibration.sequences is 128"
    ) as e:
        read_calibration(stored, config, CalibrationConfig())
    assert "at most 6" in str(e.value) and "calibration.sequence_length to at most" in str(e.value)
    with pytest.raises(ConfigError, match=r"to at most 6\d\.$"):  # no length gives so many sequences
        read_calibration(stored, config, CalibrationConfig(sequences=4000))


def test_more_positions_than_the_model_has_are_one_message(run: tuple[StoredModel, RunConfig]):
    stored, config = run
    model = config.model.model_copy(update={"max_position_embeddings": 32})
    with pytest.raises(ConfigError, match=r"sequence_length \(48\) must not exceed .* \(32\)"):
        short = config.model_copy(update={"model": model})
        read_calibration(stored, short, CalibrationConfig(sequences=8, sequence_length=48))


def test_a_checkpoint_without_text_asks_for_files(tmp_path: Path, run: tuple[StoredModel, RunConfig]):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="no training text of its own to calibrate on"):
        read_calibration(StoredModel.open(tmp_path / "hf"), run[1], CalibrationConfig())
