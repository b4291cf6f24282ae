"""What the package offers can be imported, and nothing offered is missing for type checkers."""

import ast
import subprocess
import sys
from pathlib import Path

import pallas_kernels


def test_every_name_is_there():
    for name in pallas_kernels.__all__:
        assert getattr(pallas_kernels, name).__name__ == name


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(pallas_kernels.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(pallas_kernels.__all__)


def test_mosaic_is_imported_when_a_kernel_is_called_only():
    """It would make every start a quarter longer."""
    script = (
        "import sys, pallas_kernels\n"
        "for name in pallas_kernels.__all__: getattr(pallas_kernels, name)\n"
        "from pallas_kernels.mosaic_api import plgpu\n"
        "name = 'jax.experimental.pallas.mosaic_gpu'\n"
        "before = name in sys.modules\n"
        "plgpu.SMEM\n"
        "print(before, name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "True"], done.stderr
