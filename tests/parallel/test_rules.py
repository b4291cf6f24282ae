"""Logical axes to mesh axes: layouts of parameters and activations."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxstack.errors import ConfigError
from jaxstack.parallel import AXES, ParallelConfig, logical_axis_rules, make_mesh, make_rules, shard


def rules(data: int = 1, fsdp: int = 1, tensor: int = 1, context: int = 1, **more):
    degrees = ParallelConfig(data=data, fsdp=fsdp, tensor=tensor, context=context)
    return make_rules(make_mesh(degrees), **more)


def test_the_mesh_has_all_axes_in_order():
    assert make_mesh().axis_names == AXES == ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    assert make_mesh().shape["data"] == 8
    assert make_mesh(ParallelConfig(fsdp=-1), jax.devices()[:4]).shape["fsdp"] == 4
    with pytest.raises(ConfigError, match="nearest"):
        make_mesh(ParallelConfig(data=3))


def test_neighbours_are_on_the_tensor_axis():
    mesh = make_mesh(ParallelConfig(data=2, tensor=4))
    assert [d.id for d in mesh.devices.reshape(2, 4)[0]] == [0, 1, 2, 3]


def test_specs():
    both = rules(2, 2, 2)
    assert both.spec(("batch", "length", "act_mlp")) == P(("data", "fsdp"), None, "tensor")
    assert rules(8).spec(("batch", None)) == P("data", None)
    assert both.spec(("act_heads",), (3,)) == P(None), "a dim that does not divide stays whole"
    assert rules(tensor=8, sequence=True).spec(("batch", "residual_length", "act_embed")) == P(None, "tensor", None)
    with pytest.raises(ValueError, match="unknown logical axis 'embd'"):
        both.spec(("embd",))
    with pytest.raises(ValueError, match="two dims"):
        both.spec(("heads", "mlp"))


def test_parameters():
    both = rules(1, 4, 2)
    assert both.parameter_spec(("embed", "mlp"), (32, 64)) == P("fsdp", "tensor")
    assert both.parameter_spec(("layers", "heads", "head_dim", "embed"), (4, 8, 16, 32)) == P(
        None, "tensor", None, "fsdp"
    )
    assert both.parameter_spec(("norm",), (32,)) == P(None)
    assert both.parameter_spec(("layers", "norm"), (4, 32)) == P(None, None), "a stack of vectors"
    assert both.parameter_spec(("embed", "mlp"), (30, 64)) == P(None, "tensor"), (
        "fsdp does not divide the only free dim"
    )
    assert both.parameter_spec(("position", "embed"), (64, 30)) == P("fsdp", None), "the largest dim that it divides"


def test_devices_that_share_a_sequence_share_the_parameters_too():
    both = rules(fsdp=2, context=4)
    assert both.weight_axes == ("fsdp", "context")
    assert both.parameter_spec(("embed", "mlp"), (32, 64)) == P(("fsdp", "context"), None)
    assert both.parameter_spec(("embed", "mlp"), (12, 64)) == P(None, ("fsdp", "context")), "8 divides 64 only"
    assert both.parameter_spec(("embed", "mlp"), (12, 63)) == P("fsdp", None), "no dim has 8 parts, one has 2"
    assert both.parameter_spec(("norm",), (32,)) == P(None)
    with_data = rules(data=2, context=4)
    assert with_data.stored_spec(("embed", "mlp"), (32, 64), zero=1) == P("context", "data")
    assert with_data.stored_spec(("embed", "mlp"), (32, 63), zero=1) == P(("context", "data"), None)


def test_somebody_elses_parameters_get_fsdp_on_their_largest_dim():
    both = rules(2, 4)
    assert both.parameter_spec(None, (16, 64)) == P(None, "fsdp")
    assert both.parameter_spec(None, (7, 9)) == P(None, None)
    assert both.parameter_spec(None, (64,)) == P(None)
    assert both.parameter_spec(None, ()) == P()


def test_shard_places_an_activation():
    both = rules(2, 2, 2)

    @jax.jit
    def placed(x):
        with logical_axis_rules(both):
            return shard(x, "batch", "length", "act_mlp")

    found = placed(jnp.zeros((4, 8, 16))).sharding
    assert found.is_equivalent_to(both.sharding(P(("data", "fsdp"), None, "tensor")), 3)


def test_shard_does_nothing_without_rules_but_checks_its_names():
    x = jnp.ones((2, 3))
    assert shard(x, "batch", None) is x
    with pytest.raises(ValueError, match="rank 2"):
        shard(x, "batch")


def test_rules_end_with_their_context_also_after_an_error():
    with pytest.raises(RuntimeError), logical_axis_rules(make_mesh()):
        raise RuntimeError
    x = jnp.ones((2, 3))
    assert shard(x, "no such axis", None) is x


def test_rules_can_be_replaced():
    replaced = rules(2, 2, 2, overrides={"mlp": (), "head_dim": ("tensor",)})
    assert replaced.parameter_spec(("embed", "mlp"), (32, 64)) == P("fsdp", None)
