"""Trains a configuration by the command that a user types, for benchmarks that measure a trained run."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def train_run(config: str, folder: Path, overrides: Sequence[str] = ()) -> Path:
    """Train a configuration in a new run directory of `folder`; return that directory.

    Args:
      config: a configuration file, relative to the root of the repository.
      folder: of run directories.
      overrides: further words of the configuration, `section.key=value`.

    Raises:
      SystemExit: training ended with an error, which it has told.
    """
    command = [sys.executable, "-m", "jaxstack.train", "--config", config, f"run.dir={folder}", "run.name=trained"]
    ended = subprocess.run([*command, *overrides], cwd=ROOT, check=False).returncode
    if ended:
        raise SystemExit(f"{' '.join([config, *overrides])}: training ended with {ended}")
    return folder / "trained"
