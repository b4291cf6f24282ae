"""Split sequences in the model, the batch and the evaluation; layouts are in test_layouts.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxstack.data.device_batches import BatchShardings, arrange
from jaxstack.errors import ConfigError
from jaxstack.loss import language_model_loss
from jaxstack.parallel import (
    ParallelConfig,
    context_axis,
    context_bandwidth,
    logical_axis_rules,
    make_mesh,
    make_rules,
)
from pallas_kernels import record_choices, sequence_order
from pallas_kernels.attention.context_layout import LINK_BANDWIDTH, NETWORK_BANDWIDTH
from tests.hopper import hopper_topology
from tests.small_runs import LENGTH, batch_at, make_trainer, small_config


def rules(**degrees):
    parallel = ParallelConfig(**degrees)
    return make_rules(make_mesh(parallel, jax.devices()[: int(np.prod(list(degrees.values())))]))


def test_a_batch_is_put_in_order_with_explicit_positions():
    layout = rules(data=2, context=4)
    experts = np.random.default_rng(0).integers(0, 4, (4, LENGTH, 3, 2))
    batch = {**batch_at(0, 4), "weights": np.ones((4, LENGTH)), "experts": experts}
    found = arrange(batch, layout)
    order = sequence_order(LENGTH, 4)
    assert found["positions"].tolist() == [order.tolist()] * 4
    for name in ("tokens", "labels", "segment_ids", "experts"):
        np.testing.assert_array_equal(found[name], batch[name][:, order])
    assert found["weights"] is batch["weights"]
    shardings = BatchShardings(layout, 4)
    for name, ndim in (("tokens", 2), ("experts", 4)):
        assert shardings.of(name, ndim).spec == P("data", "context")
    assert shardings.of("weights", 2).spec == P("data")
    assert shardings.of("tokens", 3).spec == P("data", None, "context"), "pairs of answers"
    assert arrange(batch, rules(data=2)) is batch


def test_positions_that_restart_at_documents_are_kept():
    positions = np.arange(LENGTH)[None].repeat(2, 0) % 5
    found = arrange({**batch_at(0, 2), "positions": positions}, rules(context=2))
    np.testing.assert_array_equal(found["positions"], positions[:, sequence_order(LENGTH, 2)])


def test_a_length_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="parallel.context=4.*nearest: 8 or 16"):
        arrange({"tokens": np.zeros((2, 12), np.int32)}, rules(context=4))


def test_a_model_asks_for_positions():
    trainer = make_trainer(small_config("parallel.context=2"))
    tokens = jnp.zeros((2, LENGTH), jnp.int32)
    with pytest.raises(ValueError, match="`positions` must be given"), logical_axis_rules(trainer.rules):
        trainer.trained_module.hidden(tokens)


def test_a_kernel_by_name_that_cannot_compute_parts_is_refused():
    over = ("parallel.context=2", "parallel.context_method=ring", "model.attention_implementation=reference")
    trainer = make_trainer(small_config(*over))
    with pytest.raises(ConfigError, match="it cannot compute the gradients for a part of the keys"):
        trainer.compile(trainer.peek_batch())


@pytest.mark.exhaustive
def test_held_out_loss_is_that_of_one_device():
    held_out = [batch_at(step, 4) for step in (7, 8)]
    losses = []
    for overrides in ((), ("parallel.context=4",)):
        trainer = make_trainer(small_config("train.global_batch_size=4", *overrides))
        trainer.evaluator._data = held_out
        losses.append(trainer.evaluate())
    assert losses[0]["eval_items"] == losses[1]["eval_items"]
    assert losses[1]["eval_loss"] == pytest.approx(losses[0]["eval_loss"], rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("degrees", [{"context": 2}, {"context": 2, "tensor": 2}], ids=str)
def test_where_a_surrounding_shard_map_has_taken_the_axis(degrees):
    """Arrays are this device's part; the loss is of its own tokens, and gradients are summed by who took the axis."""
    trainer = make_trainer(small_config(*(f"parallel.{axis}={degree}" for axis, degree in degrees.items())))
    batch = batch_at(3, 4)
    layout = trainer.rules
    module = trainer.module
    params = jax.device_get(trainer.state.params)

    def loss(params, batch):
        found = language_model_loss(module.merge(params, {}), batch)
        return found.total / 100

    def part(params, batch):
        with logical_axis_rules(layout.within(["context"])):
            assert context_axis() == "context"
            value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.lax.psum((value, gradients), "context")

    mapped = jax.shard_map(
        part, mesh=layout.mesh, in_specs=(P(), P(None, "context")), out_specs=P(), axis_names={"context"},
        check_vma=False,
    )  # fmt: skip
    with record_choices() as choices:
        found = jax.jit(mapped)(params, dict(arrange(batch, layout)))
    assert any(choice.operation == "context_attention" for choice in choices)
    wanted = jax.jit(jax.value_and_grad(loss))(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)


@pytest.mark.compiles_for_gpu
def test_devices_of_several_processes_send_over_the_network():
    devices = hopper_topology(16).devices  # of two hosts, a process each
    for degrees, wanted in (({"data": 8, "context": 2}, LINK_BANDWIDTH), ({"context": 16}, NETWORK_BANDWIDTH)):
        with logical_axis_rules(make_rules(make_mesh(ParallelConfig(**degrees), devices))):
            assert context_bandwidth() == wanted
