"""The fused head and loss against the contract, its memory, and what it communicates when it is sharded."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import linear_cross_entropy, linear_cross_entropy_sum, record_choices
from pallas_kernels.cross_entropy import xla
from tests.compilation import fully_optimized, run_jitted
from tests.marks import longer
from tests.pallas_kernels.cross_entropy.cases import (
    OPTIONS,
    assert_error_at_most_twice,
    make_inputs,
    plain_losses,
    value_and_gradients,
)

BACKENDS = ("xla_dense", "xla")


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(xla, "CHUNK_BYTES", 700)


def weighted(implementation, **options):
    """total and values of the operation, for `value_and_gradients`."""

    def function(hidden, weight, labels, d_loss):
        if implementation == "plain":
            loss = plain_losses(hidden, weight, labels, **options)
        else:
            loss = linear_cross_entropy(hidden, weight, labels, implementation=implementation, **options)
        return (loss * d_loss).sum(), loss

    return function


def check(leading, dtype, implementation, **options):
    inputs = make_inputs(leading)
    with jax.enable_x64(True):
        truth = value_and_gradients(weighted("reference", **options), inputs, "float64")
    actual = value_and_gradients(weighted(implementation, **options), inputs, dtype)
    plain = value_and_gradients(weighted("plain", **options), inputs, dtype)
    assert_error_at_most_twice(actual, plain, truth, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", *longer("bfloat16")])
def test_error_at_most_twice_the_plain_version(options, dtype, backend):
    check((2, 10), dtype, backend, **options)


@pytest.mark.longer
@settings(max_examples=3, deadline=None)
@given(leading=st.lists(st.integers(1, 7), max_size=3).map(tuple), backend=st.sampled_from(BACKENDS))
def test_random_leading_dims(leading, backend):
    check(leading, "float32", backend)


@fully_optimized()
def test_chunks_do_not_hold_the_logits():
    hidden = jax.ShapeDtypeStruct((2, 4096, 16), jnp.float32)
    weight = jax.ShapeDtypeStruct((16, 1024), jnp.float32)
    labels = jax.ShapeDtypeStruct((2, 4096), jnp.int32)

    def temporary(backend):
        gradient = jax.grad(lambda h, w, y: linear_cross_entropy(h, w, y, implementation=backend).sum(), argnums=(0, 1))
        return jax.jit(gradient).lower(hidden, weight, labels).compile().memory_analysis().temp_size_in_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "CHUNK_BYTES", 2**20)
        assert temporary("xla") < 2**22
    assert temporary("xla_dense") > 2 * 4096 * 1024 * 4


def test_large_logits_take_the_chunked_backend():
    hidden = jax.ShapeDtypeStruct((8, 1024, 64), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    with record_choices() as choices:
        for vocabulary in (256, 50304):
            weight = jax.ShapeDtypeStruct((64, vocabulary), jnp.bfloat16)
            jax.eval_shape(linear_cross_entropy, hidden, weight, labels)
    assert [choice.backend for choice in choices] == ["xla_dense", "xla"]
    assert "1572 MiB" in dict(choices[1].refused)["xla_dense"]


def test_float32_weight_beside_bfloat16_hidden():
    """The weight's gradient keeps the weight's precision."""
    hidden, weight, labels, _ = make_inputs((2, 6))
    hidden = jnp.asarray(hidden, jnp.bfloat16)
    weight = jnp.asarray(weight, jnp.float32)
    for backend in BACKENDS:
        gradient = jax.grad(lambda w, b=backend: linear_cross_entropy(hidden, w, labels, implementation=b).sum())
        d_weight = run_jitted(gradient, weight)
        assert d_weight.dtype == jnp.float32
        assert (d_weight.astype(jnp.bfloat16).astype(jnp.float32) != d_weight).any()


@pytest.mark.parametrize("backend", ["xla", "xla_dense", "reference"])
def test_labels_out_of_range_are_not_silent(backend):
    function = functools.partial(linear_cross_entropy, implementation=backend)
    loss = run_jitted(function, np.ones((3, 4), np.float32), np.ones((4, 5), np.float32), np.array([4, 5, -1]))
    np.testing.assert_allclose(loss, [np.log(5), np.nan, np.nan], rtol=1e-6)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 8), (5, 8), (2,)), "same D.*transpose the weight"),
        (((2, 8), (8, 5), (3,)), "labels must have the shape of hidden"),
        (((2, 8), (8,), (2,)), r"weight \[D, V\]"),
    ],
)
def test_wrong_arguments_name_the_rule(shapes, message):
    hidden, weight, labels = shapes
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(jnp.zeros(hidden), jnp.zeros(weight), jnp.zeros(labels, jnp.int32))
    with pytest.raises(ValueError, match="labels must be integers"):
        linear_cross_entropy(jnp.zeros((2, 8)), jnp.zeros((8, 5)), jnp.zeros(2))


@pytest.mark.parametrize("form", [linear_cross_entropy, linear_cross_entropy_sum], ids=["per_token", "sum"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sequence_axis", [None, "context"])
def test_sharded_over_batch_and_vocabulary_moves_no_logits_and_no_batch(form, backend, sequence_axis, monkeypatch):
    """Batch over data, sequence over context, vocabulary over tensor: only numbers a token and gradients move."""
    batch = 8
    length = 64
    width = 32
    vocabulary = 1024
    monkeypatch.setattr(xla, "CHUNK_BYTES", 4 * batch * length * vocabulary // 4 // 8)
    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def place(spec, shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    hidden = place(P("data", sequence_axis), (batch, length, width))
    weight = place(P(None, "tensor"), (width, vocabulary))
    labels = place(P("data", sequence_axis), (batch, length), jnp.int32)
    gradient = jax.value_and_grad(lambda h, w, y: form(h, w, y, implementation=backend).sum(), argnums=(0, 1))
    with jax.set_mesh(mesh):
        text = jax.jit(gradient).lower(hidden, weight, labels).compile().as_text()
    assert backend == "xla_dense" or "while" in text
    # A device's own part of the hidden states' gradient is summed over the vocabulary's shards, and the weight's
    # gradient over the batch's; everything else is a number a token.
    per_device = batch // 2 * length // (2 if sequence_axis else 1) * width
    largest = max(per_device, width * vocabulary // 2)
    assert "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text
    reduced = re.findall(r"= \(?((?:f32|s32)\[[^)]*?) all-reduce", text)
    assert reduced
    for result in reduced:
        for dims in re.findall(r"\[([\d,]*)\]", result):
            assert np.prod([int(d) for d in dims.split(",") if d]) <= largest, result
