"""The tests check shapes in signatures (`tests.shapes`), and the library runs without these checks."""

import importlib
import subprocess
import sys

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from pallas_kernels import flash_attention, linear_cross_entropy, rms_norm
from tests import shapes


def test_a_wrong_rank_is_refused():
    x = jnp.zeros((2, 8, 4))
    with pytest.raises(TypeCheckError, match="B T N H"):
        flash_attention(x, x, x)
    with pytest.raises(TypeCheckError, match="weight"):
        rms_norm(x, jnp.zeros((1, 4)))


def test_dims_of_one_name_must_agree():
    with pytest.raises(TypeCheckError, match="labels"):
        linear_cross_entropy(jnp.zeros((2, 8, 4)), jnp.zeros((4, 16)), jnp.zeros((2, 7), jnp.int32))


def test_unchecked_the_function_itself_names_the_rule():
    x = jnp.zeros((2, 8, 4))
    with shapes.unchecked(), pytest.raises(ValueError, match=r"q must be \[B, T, N, H\]"):
        flash_attention(x, x, x)


@pytest.mark.parametrize("name", shapes.CHECKED)
def test_every_checked_module_exists(name):
    importlib.import_module(name)


def test_users_need_no_type_checker():
    script = (
        "import sys\n"
        "sys.modules['beartype'] = None\n"
        "import jax.numpy as jnp\n"
        "from pallas_kernels import rms_norm\n"
        "print(rms_norm(jnp.ones((2, 4))).shape)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "(2, 4)", done.stderr
