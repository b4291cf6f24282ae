"""Launching Triton's kernels from JAX."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pallas_kernels.triton_interpreter import needs_triton

CHECK = """
import jax, jax.numpy as jnp
from pallas_kernels import Grid, lowering_platform, packed_matmul
from pallas_kernels.weight_only.packed import pack_nearest
from tests.hopper import compile_for_hopper

weight = pack_nearest(Grid(4, 128), jnp.ones((64, 256)))
with lowering_platform("cuda"):
    compiled = compile_for_hopper(packed_matmul, jax.ShapeDtypeStruct((1, 256), jnp.bfloat16), weight)
assert "triton_kernel_call" in compiled.as_text()
"""


@needs_triton
@pytest.mark.longer
def test_a_kernel_is_compiled_without_an_import_of_pytorch(tmp_path):
    """Which Triton would import where it is installed: here an import leaves a file, and fails."""
    marker = tmp_path / "imported"
    (tmp_path / "torch.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise ImportError")
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not marker.exists()
