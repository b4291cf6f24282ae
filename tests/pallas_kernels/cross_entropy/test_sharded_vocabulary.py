"""The vocabulary along an axis of shard_map: values and gradients of eight devices are those of one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import NotSupported, linear_cross_entropy, linear_cross_entropy_sum
from pallas_kernels.cross_entropy import xla
from tests.compilation import run_jitted
from tests.pallas_kernels.cross_entropy.cases import OPTIONS, make_inputs

VOCABULARY = 64
BACKENDS = ("xla_dense", "xla")


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(xla, "CHUNK_BYTES", 4 * 16 * VOCABULARY // 4)


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("rows", "vocabulary"), axis_types=(AxisType.Auto,) * 2)


@functools.cache
def inputs():
    hidden, weight, labels, worth = make_inputs((4, 12), vocabulary=VOCABULARY)
    return jnp.asarray(hidden), jnp.asarray(weight), jnp.asarray(labels, jnp.int32), jnp.asarray(worth)


def sharded(function, check_vma, with_sum):
    """`function` of hidden, weight, labels, worth: batch along "rows", vocabulary along "vocabulary"."""

    def local(hidden, weight, labels, worth):
        result = function(hidden, weight, labels, worth, axis_name="vocabulary")
        return jax.lax.psum(result, "rows") if with_sum else result

    specs = P("rows"), P(None, "vocabulary"), P("rows"), P("rows")
    out = P() if with_sum else P("rows")
    return jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=out, check_vma=check_vma)


def per_token(hidden, weight, labels, worth, **options):
    return worth * linear_cross_entropy(hidden, weight, labels, **options)


def summed(hidden, weight, labels, worth, **options):
    return linear_cross_entropy_sum(hidden, weight, labels, token_weights=worth, **options)


def value_and_gradients(function, hidden, weight, labels, worth):
    def total(h, w, t):
        return 1.7 * function(h, w, labels, t).sum()

    return run_jitted(jax.value_and_grad(total, argnums=(0, 1, 2)), hidden, weight, worth)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("form", [per_token, summed], ids=["per_token", "sum"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check"])
def test_values_and_gradients_are_those_of_one_device(check_vma, backend, form, options):
    expected = value_and_gradients(functools.partial(form, implementation="reference", **options), *inputs())
    parts = sharded(functools.partial(form, implementation=backend, **options), check_vma, form is summed)
    actual = value_and_gradients(parts, *inputs())
    for ours, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_of_other_devices_and_of_none(backend):
    """Every label of the whole vocabulary is found on its device; the next one is nan, as is -1."""
    hidden, weight, *_ = inputs()
    labels = jnp.concatenate([jnp.arange(VOCABULARY), jnp.asarray([VOCABULARY, -1, -100, 0])]).reshape(4, 17)
    hidden = jnp.broadcast_to(hidden[0, 0], (4, 17, hidden.shape[-1]))
    parts = sharded(functools.partial(per_token, implementation=backend), True, False)
    losses = np.asarray(parts(hidden, weight, labels, jnp.ones((4, 17)))).ravel()
    logits = np.asarray(hidden[0, 0] @ weight)
    np.testing.assert_allclose(losses[:VOCABULARY], jax.nn.logsumexp(logits) - logits, rtol=2e-5, atol=2e-5)
    assert np.isnan(losses[VOCABULARY:]).tolist() == [True, True, False, False]
    assert losses[VOCABULARY + 2] == 0.0


def test_a_replicated_weight_beside_split_rows():
    """Without axis_name too, a shard_map over the batch alone gives whole gradients under check_vma."""
    hidden, weight, labels, worth = inputs()
    specs = P("rows"), P(), P("rows"), P("rows")

    def local(*arrays):
        return jax.lax.psum(summed(*arrays, implementation="xla"), "rows")

    parts = jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=P())
    expected = value_and_gradients(functools.partial(summed, implementation="reference"), hidden, weight, labels, worth)
    actual = value_and_gradients(parts, hidden, weight, labels, worth)
    for ours, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=2e-5)


def test_wrong_axes_are_named():
    hidden, weight, labels, worth = inputs()
    with pytest.raises(ValueError, match="'vocab'.*axes here: none.*leave axis_name out"):
        linear_cross_entropy(hidden, weight, labels, axis_name="vocab")

    def local(h, w, y, t):
        return per_token(h, w, y, t, axis_name="vocab")

    specs = P("rows"), P(None, "vocabulary"), P("rows"), P("rows")
    with pytest.raises(ValueError, match="'vocab'.*axes here: 'rows', 'vocabulary'"):
        jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=P("rows"))(hidden, weight, labels, worth)
    with pytest.raises(NotSupported, match="reads the whole vocabulary"):
        sharded(functools.partial(per_token, implementation="reference"), True, False)(hidden, weight, labels, worth)
