"""Triton's interpreter, which runs kernels on a CPU.

Triton decides at its import whether kernels are interpreted, so a test module whose kernels are has a main part, and
`run_interpreted` runs that in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "jax_triton")),
    reason="needs Triton: pip install 'jaxstack[cuda]'",
)
_ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(module: str, *words: str) -> subprocess.CompletedProcess:
    """`python -m MODULE WORDS...` with kernels interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=500, check=False)


class Array:
    """A numpy array with what Triton's interpreter asks of a torch tensor on the CPU."""

    def __init__(self, array, name):
        self.array, self.dtype = array, name

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return Array(self.array, self.dtype)

    def set_(self, *_):
        pass

    copy_ = set_

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    stride = size


def let_numpy_index():
    """Triton's interpreter makes integers of arrays of one element, which numpy 2.5 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend
