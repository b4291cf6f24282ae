"""Adam-mini: which values share a second moment, and a step computed by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.optim.base import RunInfo
from jaxstack.optim.optimizers import AdamMini
from jaxstack.optim.optimizers.adam_mini import AdamMiniState
from tests.marks import longer

SHAPES = {
    "embedding/table": ((11, 4), (11, 1)),
    "head": ((4, 11), (1, 11)),
    "layers/0/attention/q_proj/kernel": ((3, 4, 2, 5), (3, 1, 2, 1)),
    "layers/0/attention/v_proj/kernel": ((3, 4, 2, 5), (3, 1, 2, 5)),
    "layers/0/attention/o_proj/kernel": ((3, 2, 5, 4), (3, 1, 1, 4)),
    "layers/0/attention/k_proj/bias": ((3, 2, 5), (3, 1, 1)),
    "layers/0/mlp/up_proj/kernel": ((3, 4, 6), (3, 1, 6)),
    "layers/0/norm/scale": ((3, 4), (3, 1)),
    "final_norm/scale": ((4,), (1,)),
}


@pytest.mark.parametrize("path", [*list(SHAPES)[:4], *longer(*list(SHAPES)[4:])])
def test_second_moments_are_means_over_heads_neurons_and_tokens(path):
    shape, wanted = SHAPES[path]
    core = AdamMini(b1=0.0, b2=0.5).core(RunInfo())
    gradient = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    updates, state = core.update({path: jnp.asarray(gradient)}, core.init({path: jnp.zeros(shape)}))
    assert isinstance(state, AdamMiniState) and state.nu[path].shape == wanted
    dims = tuple(d for d, size in enumerate(wanted) if size == 1 and shape[d] > 1)
    mean = np.mean(gradient**2, axis=dims, keepdims=True)
    np.testing.assert_allclose(state.nu[path], 0.5 * mean, rtol=1e-5)
    np.testing.assert_allclose(updates[path], gradient / np.sqrt(mean), rtol=1e-4)
