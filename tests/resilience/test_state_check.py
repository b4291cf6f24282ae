"""Flipped bits in one copy of a state on simulated devices, and parameters that are not finite."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.errors import JaxstackError
from jaxstack.parallel import ParallelConfig, make_mesh
from jaxstack.resilience.replica_check import ReplicaCheck, SilentCorruption, StateCheck
from tests.resilience.bits import flip_copy


@functools.cache
def mesh():
    """The mesh of all tests here; not made at import, as a machine with GPUs may have fewer than eight devices."""
    return make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))


def state():
    """Parts on fsdp, on two axes, on none, on all; of several dtypes."""
    key = jax.random.key(1)

    def put(x, *spec):
        return jax.device_put(x, jax.NamedSharding(mesh(), jax.P(*spec)))

    return {
        "split": put(jax.random.normal(key, (8, 6)), "fsdp"),
        "twice": put(jax.random.normal(key, (4, 8), jnp.bfloat16), "fsdp", "tensor"),
        "whole": put(jnp.arange(5, dtype=jnp.int32)),
        "joint": put(jnp.arange(16, dtype=jnp.uint8), ("fsdp", "tensor")),
        "bool": put(jnp.ones(3, jnp.bool_)),
        "key": put(key),
        "alone": put(jnp.arange(8.0), ("data", "fsdp", "tensor")),
    }


@pytest.fixture(scope="module")
def check():
    return ReplicaCheck(state())


def test_what_has_no_copy_is_left_out_and_whole_states_pass(check):
    assert check.names == ["bool", "joint", "key", "split", "twice", "whole"]
    assert check.find(state()) == []


@pytest.mark.parametrize(("leaf", "bit"), [("split", 0), ("split", 191), ("twice", 31), ("whole", 5), ("joint", 9)])
@pytest.mark.parametrize("device", [0, 5])
def test_one_flipped_bit_is_named(check, leaf, bit, device):
    good = state()
    bad = {**good, leaf: flip_copy(good[leaf], device, bit)}
    (line,) = check.find(bad)
    assert line.startswith(f"{leaf} differs") and f"device {device} (process 0)" in line
    copies = {"split": 4, "twice": 2, "whole": 8, "joint": 2}[leaf]
    assert line.count("device") == (2 if copies == 2 else 1), "of two copies none is known to be the good one"


def test_a_swap_of_two_values_is_noticed(check):
    good = state()
    shards = [np.asarray(s.data).copy() for s in good["whole"].addressable_shards]
    shards[3][[1, 4]] = shards[3][[4, 1]]
    parts = [jax.device_put(x, s.device) for x, s in zip(shards, good["whole"].addressable_shards, strict=True)]
    swapped = jax.make_array_from_single_device_arrays((5,), good["whole"].sharding, parts)
    assert "device 3" in check.find({**good, "whole": swapped})[0]


class State(NamedTuple):
    params: Any


def test_the_guard_looks_when_it_is_time():
    guard = StateCheck(10)
    good = {"w": jax.device_put(jnp.ones(4), jax.NamedSharding(mesh(), jax.P()))}
    bad = {"w": flip_copy(good["w"], 6, 40)}

    guard.check(10, State(good), before_save=True)
    guard.check(11, State(bad), before_save=False)
    for step, saving in ((20, False), (21, True)):
        with pytest.raises(
            SilentCorruption, match=rf"after step {step} .*\n  params/w differs.*device 6 .*\n.*not saved"
        ):
            guard.check(step, State(bad), before_save=saving)
    StateCheck(None).check(20, State(bad), before_save=True)


@pytest.mark.parametrize("poison", [jnp.nan, -jnp.inf])
def test_parameters_that_are_not_finite_are_not_saved(poison):
    state = State({"a": jnp.ones(3), "n": jnp.arange(3), "b": {"w": jnp.ones(3).at[1].set(poison)}})
    StateCheck().check(3, state, before_save=False)
    with pytest.raises(JaxstackError, match="after step 3 parameters are not finite: b/w. This state is not saved"):
        StateCheck().check(3, state, before_save=True)
