"""Compiles without the optimisations that cost most of a small test's time and do not change what it checks."""

from typing import Any

import jax

_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def run_jitted(function: Any, *arguments: Any) -> Any:
    """function(*arguments) as one compiled program."""
    return jax.jit(function).lower(*arguments).compile(compiler_options=_FAST)(*arguments)
