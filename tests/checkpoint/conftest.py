"""Managers whose warnings are collected, and processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.manager import CheckpointManager

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def open_manager(tmp_path, warnings):
    """Makes managers of one directory; closes them at the end."""
    managers = []

    def make(**config) -> CheckpointManager:
        manager = CheckpointManager(tmp_path / "checkpoints", CheckpointConfig(**config), report=warnings.append)
        managers.append(manager)
        return manager

    yield make
    for manager in managers:
        manager.close()


@pytest.fixture
def run_python():
    """Runs a piece of Python in a process of its own, with the repository importable."""

    def run(code: str, *arguments) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            capture_output=True, text=True, timeout=120, cwd=REPOSITORY,
        )  # fmt: skip

    return run
