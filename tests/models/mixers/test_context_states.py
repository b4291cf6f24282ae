"""How recurrent mixers compute sequences that are split over devices: what `auto` chooses, and what that sends."""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxstack.models.mixers.context_states import gathers_states
from jaxstack.models.recurrent import GatedDelta
from jaxstack.observe.collectives import bytes_over_axis
from tests.small_runs import make_trainer, small_config

RECURRENT = (
    "model.layer_types=[delta]",
    "model.delta={num_heads: 8, head_dim: 4, num_key_heads: 4, key_head_dim: 6}",
    "model.num_layers=1",
)


KIND = GatedDelta(num_heads=8, head_dim=4, num_key_heads=4, key_head_dim=6)


def gathers(devices: int, length: int, heads: int = 8, kind: GatedDelta = KIND) -> bool:
    """The choice inside a `shard_map`, where each device has so many tokens and heads."""
    found = []

    def body(x: jax.Array) -> jax.Array:
        found.append(gathers_states("parts", kind, x))
        return x

    mesh = Mesh(np.array(jax.devices()[:devices]), ("parts",))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(None, "parts"), out_specs=P(None, "parts"))
    jax.eval_shape(mapped, jax.ShapeDtypeStruct((1, devices * length, heads, 4), np.float32))
    return found[0]


def test_what_sends_fewer_bytes_is_chosen():
    """A device sends its tokens to the two devices, half of them away; or the maps of the states of its two parts."""
    exchange = KIND.exchange(1)
    equal = 2 * 2 * exchange.state_bytes / (4 * exchange.token_numbers)
    below, above = int(equal), int(equal) + 1
    assert not gathers(2, below) and gathers(2, above)
    assert not gathers(4, above), "more devices, fewer heads of each"


def test_heads_that_devices_do_not_divide_are_not_exchanged():
    six = KIND.model_copy(update={"num_heads": 6, "num_key_heads": 6})
    assert gathers(4, 8, heads=6, kind=six) and not gathers(2, 8, heads=6, kind=six)


def test_parts_shorter_than_the_convolution_are_not_gathered():
    six = KIND.model_copy(update={"num_heads": 6, "num_key_heads": 6})
    assert gathers(4, 6, heads=6, kind=six) and not gathers(4, 4, heads=6, kind=six)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("length", "chosen"), [(16, "all_to_all"), (512, "all_gather")])
def test_a_step_sends_the_bytes_of_the_cheaper_method(length, chosen):
    def sent(method: str) -> int:
        overrides = (*RECURRENT, "parallel.context=2", "parallel.fsdp=1", f"parallel.context_method={method}")
        trainer = make_trainer(small_config(*overrides, f"train.sequence_length={length}"))
        with contextlib.closing(trainer.batches(0)) as batches:
            batch = next(batches)[0]
        text = trainer.program.compile(trainer.program.lower(batch)).as_text()
        return bytes_over_axis(text, dict(trainer.rules.mesh.shape), "context")

    found = {method: sent(method) for method in ("auto", "all_to_all", "all_gather")}
    assert found["auto"] == found[chosen] == min(found.values()), found
    assert found["all_to_all"] != found["all_gather"]
