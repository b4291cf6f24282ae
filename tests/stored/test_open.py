"""Directories of runs and checkpoints, and what was meant by wrong ones."""

import pytest

from jaxstack.errors import ConfigError
from jaxstack.stored import StoredModel


def test_a_folder_within_a_run_is_answered_with_the_run(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints" / "6").mkdir(parents=True)
    (run / "config.yaml").touch()
    assert StoredModel.open(run)
    for folder in (run / "checkpoints", run / "checkpoints" / "6"):
        with pytest.raises(ConfigError, match=f"did you mean {run}\\?"):
            StoredModel.open(folder)
