"""What the package offers can be imported, and importing it loads as little as possible."""

import ast
import subprocess
import sys
from pathlib import Path

import pallas_kernels


def test_every_name_is_there():
    for name in pallas_kernels.__all__:
        assert getattr(pallas_kernels, name).__name__ == name


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(pallas_kernels.__file__).with_suffix(".pyi").read_text())
    seen = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(pallas_kernels.__all__)


def run(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_imports_nothing_of_it():
    """Each name is imported on first use; type checkers for tests are never imported."""
    script = (
        "import sys, pallas_kernels\n"
        "print(sum(name.startswith(('pallas_kernels.', 'jax.')) for name in sys.modules))\n"
        "pallas_kernels.flash_attention\n"
        "print('pallas_kernels.attention.api' in sys.modules, 'pallas_kernels.fp8.api' in sys.modules)\n"
        "print('beartype' in sys.modules)"
    )
    assert run(script) == ["0", "True", "False", "False"]


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
    assert run(script) == ["False", "True"]
