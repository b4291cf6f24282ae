"""Every test sees eight simulated CPU devices, so that parallel layouts can be checked on any machine.

Most of the tests' time would be XLA's, which optimises programs that run once: on a CPU it leaves that out, here and in
the processes that tests start. What is tested is the same program of XLA's operations, turned into machine code more
simply. Tests about memory, and those that compile for GPUs, turn it on by `tests.compilation.fully_optimized`.
"""

import os

import pytest

from tests import shapes


def pytest_addoption(parser, pluginmanager):
    """The first hook: no `conftest.py` further down has imported jax yet, which with `-m gpu` finds GPUs by itself."""
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


@pytest.fixture
def unchecked_shapes():
    """For tests of what a function itself says about arguments of wrong shapes or types."""
    with shapes.unchecked():
        yield
