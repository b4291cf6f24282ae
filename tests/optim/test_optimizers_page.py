"""The table of docs/optimizers.md: its names, bytes of state and rules of muP are those of the code."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxstack.optim.build import build_optimizer
from jaxstack.optim.optimizers import OPTIMIZERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
ROWS = {row[0]: row for row in re.findall(r"^\| `(\w+)` \|.*\| (\d+) \| (yes|no) \|$", PAGE.read_text("utf-8"), re.M)}


def test_every_optimizer_has_a_row():
    assert list(ROWS) and set(ROWS) == {kind.model_fields["name"].default for kind in OPTIMIZERS}


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_bytes_of_state_and_rules_of_mup(kind):
    _, size, has_rule = ROWS[kind.model_fields["name"].default]
    params = {"mlp": {"kernel": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}}
    optimizer = build_optimizer(kind(), lambda step: jnp.asarray(0.1), params)
    state = jax.tree.leaves(jax.eval_shape(optimizer.init, params))
    held = sum(x.size * x.dtype.itemsize for x in state) / 4096**2
    assert held == pytest.approx(float(size), abs=0.04)
    assert (kind.width_powers is not None) == (has_rule == "yes")
