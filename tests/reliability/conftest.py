"""`python -m pytest tests/reliability --full` runs the scorecard at its full length; `--record` keeps the figures."""

import datetime
import json
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.runs import REPOSITORY, Runs

SKIPPING = "not gpu and not slow"
"""What pyproject.toml leaves out."""
RESULTS = Path(__file__).parent / "results.jsonl"


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="the scorecard at its full length (an hour)")
    parser.addoption("--kills", type=int, help="of rows 1 and 2; default: 100 and 30 at full length, 2 and 1 otherwise")
    parser.addoption("--fault-minutes", type=float, help="of random faults; default: 60 at full length, 3 otherwise")
    parser.addoption("--record", action="store_true", help=f"append the figures to {RESULTS.name}")


def pytest_configure(config):
    # Nearly all of these are slow: who names them, asks for them.
    if config.option.markexpr == SKIPPING and any("reliability" in argument for argument in config.args):
        config.option.markexpr = "not gpu"


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full", default=False):
        for item in items:
            item.add_marker(pytest.mark.timeout(7200))


@pytest.fixture(scope="session")
def full(pytestconfig) -> bool:
    """Whether to run at full length."""
    return bool(pytestconfig.getoption("--full", default=False))


@pytest.fixture(scope="session")
def kills(pytestconfig, full) -> int:
    """How often row 2 kills a rank."""
    return pytestconfig.getoption("--kills", default=None) or (30 if full else 1)


@pytest.fixture(scope="session")
def fault_minutes(pytestconfig, full) -> float:
    """Time of random faults."""
    return pytestconfig.getoption("--fault-minutes", default=None) or (60 if full else 3)


@pytest.fixture(scope="session")
def all_runs(tmp_path_factory) -> Runs:
    """Data and compiled steps of all small runs of a session."""
    return Runs(tmp_path_factory.mktemp("reliability"))


@pytest.fixture(scope="module")
def runs(all_runs, request) -> Runs:
    """Starts small runs. Each module has its own run directories, as a run goes on with one that it finds."""
    return all_runs.below(request.module.__name__.rpartition(".")[2])


@pytest.fixture
def record(pytestconfig, full, request) -> Callable[..., None]:
    """`record(row, test, figure)`: prints the figure of a passed test, and keeps it where it was asked for."""

    def keep(row: int, test: str, figure: str) -> None:
        print(f"\nscorecard row {row}: {test}: {figure}")
        if not pytestconfig.getoption("--record", default=False):
            return
        import jax

        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=REPOSITORY, check=False
        )
        line = {
            "row": row, "test": test, "figure": figure, "full": full, "name": request.node.name,
            "device": jax.devices()[0].device_kind, "versions": {"jax": jax.__version__},
            "python": platform.python_version(), "commit": commit.stdout.strip(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    return keep
