"""Recurrences over sharded sequences: the same as over whole ones, for any number of devices, layout and documents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import gated_delta_rule, sequence_order, ssd
from pallas_kernels.delta_rule.sharded import gated_delta_rule_over_shards
from pallas_kernels.sequence_shards import SequenceShards, tokens_before
from pallas_kernels.ssd.sharded import ssd_over_shards
from tests.compilation import run_jitted

LENGTH = 80
# Documents that end within a part, at its end, and that are padding at the start, across an edge, and at the end.
LENGTHS = {"one document": None, "packed": ((7, 13, 30, 2, 28), (3, 17, 25, 5, 10, 20))}
PADDED = (-1, 0, 1, -1, 2, -1)


def make_ids(lengths):
    if lengths is None:
        return None
    rows = [np.repeat(np.arange(5), lengths[0]), np.repeat(PADDED, lengths[1])]
    return jnp.asarray(np.stack(rows), jnp.int32)


def delta_inputs(channels=()):
    keys = jax.random.split(jax.random.key(0), 5)
    q, k = (jax.random.normal(key, (2, LENGTH, 2, 6)) for key in keys[:2])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    v = jax.random.normal(keys[2], (2, LENGTH, 4, 8))
    log_decay = -0.2 * jax.nn.softplus(jax.random.normal(keys[3], (2, LENGTH, 4, *channels)))
    return q, k, v, log_decay, jax.nn.sigmoid(jax.random.normal(keys[4], (2, LENGTH, 4)))


def ssd_inputs():
    keys = jax.random.split(jax.random.key(1), 5)
    x = jax.random.normal(keys[0], (2, LENGTH, 4, 8))
    dt = jax.nn.softplus(jax.random.normal(keys[1], (2, LENGTH, 4)) - 2)
    b, c = (jax.random.normal(key, (2, LENGTH, 2, 6)) for key in keys[2:4])
    return x, dt, -jax.random.uniform(keys[4], (4,), minval=0.3, maxval=2), b, c


CASES = {
    "delta": (gated_delta_rule, gated_delta_rule_over_shards, delta_inputs),
    "decays of channels": (gated_delta_rule, gated_delta_rule_over_shards, functools.partial(delta_inputs, (6,))),
    "ssd": (ssd, ssd_over_shards, ssd_inputs),
}


def sharded(function, devices, layout, ids):
    """The function on sequences in natural order, each device with its parts."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("context",))
    order = sequence_order(LENGTH, devices, layout)
    back = np.argsort(order)
    placed = None if ids is None else ids[:, order]

    def run(*inputs):
        moved = [x if x.ndim == 1 else x[:, order] for x in inputs]
        specs = [PartitionSpec() if x.ndim == 1 else PartitionSpec(None, "context") for x in inputs]
        call = functools.partial(function, axis_name="context", layout=layout)
        local = jax.shard_map(
            lambda ids, *inputs: call(*inputs, segment_ids=ids), mesh=mesh,
            in_specs=(PartitionSpec(None, "context"), *specs), out_specs=PartitionSpec(None, "context"),
            check_vma=False,
        )  # fmt: skip
        return local(placed, *moved)[:, back]

    return run


@pytest.mark.parametrize(
    ("devices", "layout"),
    [
        (2, "zigzag"),
        pytest.param(4, "zigzag", marks=pytest.mark.longer),
        pytest.param(5, "contiguous", marks=pytest.mark.longer),
    ],
)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", CASES)
def test_a_sharded_recurrence_equals_the_whole_one(name, lengths, devices, layout):
    whole, over_shards, make = CASES[name]
    inputs = make()
    ids = make_ids(LENGTHS[lengths])
    there = np.ones((2, LENGTH), bool) if ids is None else np.asarray(ids) >= 0
    weight = jax.random.normal(jax.random.key(9), (2, LENGTH, 4, 8)) * there[..., None, None]

    def value(function):
        def loss(*inputs):
            out = function(*inputs) * weight
            return out.sum(), out

        gradients, out = jax.jit(jax.grad(loss, range(len(inputs)), has_aux=True))(*inputs)
        return out, gradients

    with jax.default_matmul_precision("highest"):
        wanted, wanted_gradients = value(lambda *x: whole(*x, segment_ids=ids)[0])
        found, gradients = value(sharded(over_shards, devices, layout, ids))
    assert np.abs(wanted).max() > 0.5
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    for ours, right in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(ours, right, atol=1e-4)


@pytest.mark.quick
@pytest.mark.parametrize("ids", [None, make_ids(LENGTHS["packed"])], ids=LENGTHS)
def test_the_tokens_before_each_part(ids):
    values = np.arange(1, 2 * LENGTH + 1, dtype=np.float32).reshape(2, LENGTH)
    padded = np.concatenate([np.zeros((2, 3)), values], axis=1)
    documents = np.zeros((2, LENGTH)) if ids is None else np.asarray(ids)

    def tails(x, *, axis_name, layout, segment_ids):
        shards = SequenceShards(axis_name, layout)
        found = tokens_before(shards, shards.split(x), 3, None if ids is None else shards.split(segment_ids))
        return shards.join(jnp.pad(found, ((0, 0), (0, x.shape[1] // shards.count - 3))))

    found = np.asarray(run_jitted(sharded(tails, 4, "zigzag", ids), values))
    for first in range(0, LENGTH, 10):
        for row in range(2):
            seen = [at >= 0 and documents[row, at] == documents[row, first] for at in range(first - 3, first)]
            wanted = np.where(seen, padded[row, first : first + 3], 0)
            np.testing.assert_array_equal(found[row, first : first + 3], wanted)
