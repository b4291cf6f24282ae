"""Every test sees eight simulated CPU devices, so that parallel layouts can be checked on any machine.

Most of the tests' time would be XLA's, which optimises programs that run once: on a CPU it leaves that out, here and in
the processes that tests start. What is tested is the same program of XLA's operations, turned into machine code more
simply. Tests about memory, and those that compile for GPUs, turn it on by `tests.compilation.fully_optimized`.
"""

import gc
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from jaxstack import heartbeat
from tests import shapes
from tests.marks import SLOW_MARKS, mark_slow_tests
from tests.skips import TIME_IS_OVER, SkipReasons

pytest_plugins = ["pytester"]

# The time of an example depends on how busy the machine is, so that a slow one is no failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

DEFAULT_SELECTION = "not gpu and not slow"
"""The marks expression that pyproject.toml gives to every run of the tests."""
MOST_MAPPINGS = 15_000
"""Memory mappings of a process, after which its compiled programs are freed."""
STOP_AT = "JAXSTACK_TESTS_STOP_AT"
"""Variable with the Unix time of `--stop-after`, which the processes of pytest-xdist inherit."""


def pytest_addoption(parser, pluginmanager):
    """The first hook: no `conftest.py` further down has imported jax yet, which with `-m gpu` finds GPUs by itself."""
    parser.addoption("--strict-skips", action="store_true", help="fail on a skip for a reason not in tests/skips.py")
    parser.addoption("--stop-after", type=float, metavar="SECONDS", help="skip the tests that have not begun by then")
    shapes.install()
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # has the environment of the process that started it
    if pluginmanager.get_plugin("pytestconfig").known_args_namespace.markexpr != "gpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        # A release of XLA without this option ignores it.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters")
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes of `-n` share the GPU's memory


def pytest_configure(config):
    gc.disable()  # until all modules are imported, which leaves no garbage
    # Tests look at what commands print, which must not depend on how busy the machine is.
    heartbeat.SECONDS = 1e6
    for mark, reason in SLOW_MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {reason}")
    # Who names a file or a test asks for all of it, the slow ones too.
    if config.option.markexpr == DEFAULT_SELECTION and any(".py" in argument for argument in config.args):
        config.option.markexpr = "not gpu"
    if "PYTEST_XDIST_WORKER" not in os.environ:
        if config.option.stop_after is not None:
            os.environ[STOP_AT] = str(time.time() + config.option.stop_after)
        config.pluginmanager.register(SkipReasons(config), "skip-reasons")


def pytest_ignore_collect(collection_path, config):
    """Leave out with `-m gpu` the modules that have no such test: importing them takes most of a minute."""
    if config.option.markexpr == "gpu" and collection_path.suffix == ".py":
        return True if collection_path.parent != Path(__file__).parent / "gpu" else None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests before pytest selects by `-m`."""
    mark_slow_tests(items)
    # What stays until the end is not looked through again at each collection of garbage, and those come less often.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Frees the compiled programs of a process that has very many, between two modules.

    Each of XLA's programs on a CPU takes several memory mappings, of which Linux allows a process 65,530; the compiler
    crashes at the next one.
    """
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture
def unchecked_shapes():
    """For tests of what a function itself says about arguments of wrong shapes or types."""
    with shapes.unchecked():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    if time.time() > float(os.environ.get(STOP_AT, "inf")):
        pytest.skip(TIME_IS_OVER)
