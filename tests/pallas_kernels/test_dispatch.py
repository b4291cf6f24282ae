"""A row that XLA cannot partition is refused where XLA would have to, and only there."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import NotSupported, record_choices
from pallas_kernels.dispatch import Backend, select

BACKENDS = (
    Backend("kernel", "first", lambda request: None, lambda x: x, opaque=True),
    Backend("plain", "everything", lambda request: None, lambda x: x),
)


def chosen(implementation=None):
    return select("operation", BACKENDS, implementation, "a call").name


def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def test_without_a_mesh_or_with_one_device_nothing_is_refused():
    assert chosen() == "kernel"
    with jax.set_mesh(mesh(data=1)):
        assert chosen() == chosen("kernel") == "kernel"


def test_an_opaque_row_is_refused_under_a_mesh_that_xla_partitions_over():
    with jax.set_mesh(mesh(data=2, tensor=4)), record_choices() as choices:
        assert chosen() == "plain"
        with pytest.raises(NotSupported, match=r"data=2, tensor=4\): call it inside jax.shard_map"):
            chosen("kernel")
    assert "cannot partition" in dict(choices[0].refused)["kernel"]


@pytest.mark.parametrize(("manual", "name"), [({"data", "tensor"}, "kernel"), ({"data"}, "plain")])
def test_inside_shard_map_only_the_axes_left_to_xla_count(manual, name):
    found = []

    def local(x):
        found.append(chosen())
        return x

    spec = PartitionSpec("data")
    function = jax.shard_map(local, mesh=mesh(data=2, tensor=2), in_specs=spec, out_specs=spec, axis_names=manual)
    jax.eval_shape(jax.jit(function), jnp.zeros((4, 4)))
    assert found == [name]
