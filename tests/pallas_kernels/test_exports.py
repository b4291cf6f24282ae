"""What the package offers can be imported, and nothing offered is missing for type checkers."""

import ast
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
