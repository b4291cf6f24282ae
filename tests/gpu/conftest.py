"""Tests of what only a GPU can show. Run them with `python -m pytest -m gpu`, or several at a time, with `-n 6`."""

import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # which share the GPU's memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark all tests of this folder, so that no file can forget it."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("gpu")


@pytest.fixture(autouse=True, scope="session")
def a_gpu():
    """Skips where JAX sees no GPU."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU and jax for CUDA: pip install 'jaxstack[cuda]'")


@pytest.fixture
def two_gpus():
    """The first two GPUs; skips where there is but one."""
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    return jax.devices()[:2]


def on_hopper() -> bool:
    """Whether our Mosaic kernels run here."""
    return jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"
