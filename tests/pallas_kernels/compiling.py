"""Compiles without the optimisations that cost most of a small test's time and do not change what it checks."""

from typing import Any

import jax

_FAST = {
    "cpu": {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    "gpu": {"xla_gpu_autotune_level": 0},
}


def run_jitted(function: Any, *arguments: Any) -> Any:
    """function(*arguments) as one compiled program."""
    options = _FAST[jax.default_backend()]
    return jax.jit(function).lower(*arguments).compile(compiler_options=options)(*arguments)
