"""XLA's optimisations: off in most tests on a CPU (see `conftest`), on where a test is about them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

_FAST = {
    "cpu": {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    "gpu": {"xla_gpu_autotune_level": 0},
}


@contextlib.contextmanager
def fully_optimized() -> Iterator[None]:
    """What is compiled in here, or in a function with this decorator, is compiled as in a run."""
    usual = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", usual)


def run_jitted(function: Any, *arguments: Any) -> Any:
    """function(*arguments) as one program, compiled without what costs most of a small test's time."""
    return jax.jit(function).lower(*arguments).compile(compiler_options=_FAST[jax.default_backend()])(*arguments)
