"""Row-parallel products whose sums stand in a `shard_map`: the results of plain products, and when they are chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.parallel import ParallelConfig, StepLayout, logical_axis_rules, make_mesh, make_rules, project_sum
from pallas_kernels import lowering_platform, record_choices
from tests.compilation import run_jitted

NEEDS_MOSAIC = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")


def rules(data=1, tensor=2, first=0, sequence=False):
    devices = jax.devices()[first : first + data * tensor]
    return make_rules(make_mesh(ParallelConfig(data=data, tensor=tensor), devices), sequence=sequence)


def project(y, kernel, rules, sums, unsuitable=None):
    with logical_axis_rules(rules, StepLayout(peer_sums=sums)):
        return project_sum(y, kernel, unsuitable)


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (1, 4)])
@pytest.mark.parametrize("inner", [(12,), (4, 3)])
def test_products_are_those_of_one_device(data, tensor, inner):
    generator = np.random.default_rng(0)
    y = jnp.asarray(generator.standard_normal((2, 5, *inner)), jnp.float32)
    kernel = jnp.asarray(generator.standard_normal((*inner, 6)), jnp.float32)
    found = run_jitted(functools.partial(project, rules=rules(data, tensor), sums="always"), y, kernel)
    np.testing.assert_allclose(found, jnp.tensordot(y, kernel, len(inner)), rtol=1e-5, atol=1e-5)


@NEEDS_MOSAIC
@pytest.mark.parametrize(
    ("changes", "rows", "sums", "unsuitable", "backends"),
    [
        ({}, 64, "auto", None, ["mosaic"]),
        ({"first": 2}, 64, "auto", None, []),
        ({}, 4096, "auto", None, []),
        ({"tensor": 4}, 64, "auto", None, []),
        ({"sequence": True}, 64, "auto", None, []),
        ({}, 64, "never", None, []),
        ({}, 64, "auto", "the layers have adapters", []),
        ({"first": 2}, 64, "always", None, ["xla"]),
    ],
    ids=["small", "not_the_first_devices", "large", "not_tried", "sequence", "never", "adapters", "always"],
)
def test_small_sums_on_the_first_devices_are_the_kernels(changes, rows, sums, unsuitable, backends):
    """Kernels address devices by their numbers in the mesh."""
    y = jnp.zeros((1, rows, 2048), jnp.bfloat16)
    kernel = jnp.zeros((2048, 1024), jnp.bfloat16)
    run = functools.partial(project, rules=rules(**changes), sums=sums, unsuitable=unsuitable)
    with lowering_platform("cuda"), record_choices() as choices:
        found = jax.eval_shape(run, y, kernel)
    assert [choice.backend for choice in choices] == backends
    assert (found is None) == (not backends)
