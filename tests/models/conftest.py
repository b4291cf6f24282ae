"""Compilation is nearly all of the time of these tests, and XLA's optimisations are not what they test."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
