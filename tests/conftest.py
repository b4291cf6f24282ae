"""Every test sees eight simulated CPU devices, so that parallel layouts can be checked on any machine."""

import os

import pytest


def pytest_configure(config):
    """Before a test can import jax; with `-m gpu` it finds the GPUs by itself."""
    if config.option.markexpr != "gpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")


@pytest.fixture(scope="module")
def quick_compilation():
    """XLA's optimisations off: for tests whose time is nearly all compilation, and which do not test the compiler."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
