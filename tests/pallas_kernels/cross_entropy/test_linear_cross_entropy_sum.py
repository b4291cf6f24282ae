"""The sum form: loss and gradients against the contract, its transformations, its work and its rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels import linear_cross_entropy, linear_cross_entropy_sum, lowering_platform, record_choices
from pallas_kernels.cross_entropy import xla
from pallas_kernels.cross_entropy.request import Options, make_request
from tests.compilation import run_jitted
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


def weighted_sum(implementation, **options):
    """total and values of the operation, for `value_and_gradients`."""

    def function(hidden, weight, labels, token_weights):
        if implementation == "plain":
            total = (plain_losses(hidden, weight, labels, **options) * token_weights).sum()
        else:
            total = linear_cross_entropy_sum(
                hidden, weight, labels, token_weights=token_weights, implementation=implementation, **options
            )
        return total, total

    return function


def plan_of(inputs, dtype):
    """(chunks, group, dtype in which the weight's gradient is summed up) of the chunked backend."""
    hidden, weight = (jnp.asarray(x, dtype) for x in inputs[:2])
    plan, _, labels, _ = xla._cut(make_request(hidden, weight, inputs[2], None, Options()))
    return sum(count for count, _ in plan.sizes), plan.group, jnp.dtype(plan.accumulator)


def check(inputs, dtype, implementation, **options):
    results = []
    with jax.enable_x64(True):
        truth = value_and_gradients(weighted_sum("reference", **options), inputs, "float64", factor=1.7)
    for name in (implementation, "plain"):
        results.append(value_and_gradients(weighted_sum(name, **options), inputs, dtype, factor=1.7))
    assert_error_at_most_twice(*results, truth, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", *longer("bfloat16")])
def test_error_at_most_twice_the_plain_version(options, dtype, backend):
    check(make_inputs((2, 10)), dtype, backend, **options)


@pytest.mark.exhaustive
@settings(max_examples=4, deadline=None)
@given(leading=st.lists(st.integers(1, 12), max_size=3).map(tuple), tokens=st.integers(1, 20))
@example(leading=(2, 40), tokens=34)
@example(leading=(3, 5, 5), tokens=1)
def test_random_leading_dims_and_chunks(leading, tokens):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "CHUNK_BYTES", 4 * 33 * tokens)
        *inputs, weights = make_inputs(leading)
        # Of one sign: what is left where terms cancel has a bound, and a test, of its own below.
        check((*inputs, abs(weights)), "float32", "xla")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.longer
def test_terms_that_cancel_leave_roundings_of_the_terms(backend):
    """Relative to the sum itself even exactly summed terms, each rounded to float32, would err more."""
    compute = jax.jit(weighted_sum(backend))
    for seed in range(10):
        inputs = make_inputs((2, 10), seed=seed)
        terms = np.asarray(plain_losses(*inputs[:3])) * inputs[3]
        weights = np.float32(inputs[3] * np.where(terms > 0, -terms[terms < 0].sum() / terms[terms > 0].sum(), 1.0))
        with jax.enable_x64(True):
            losses = np.asarray(linear_cross_entropy(*map(jnp.asarray, inputs[:3]), implementation="reference"))
        terms = losses * np.float64(weights)
        assert abs(terms.sum()) < 1e-5 * np.abs(terms).sum(), "they cancel"
        total = float(compute(*(jnp.asarray(x, jnp.float32) for x in inputs[:2]), inputs[2], jnp.asarray(weights))[0])
        assert abs(total - terms.sum()) < 2 * np.finfo(np.float32).eps * np.abs(terms).sum()


def test_a_chunk_takes_positions_of_every_sequence(monkeypatch):
    """34 tokens at most: up to 17 positions of two sequences of 40, and none in a loop of one chunk."""
    monkeypatch.setattr(xla, "CHUNK_BYTES", 4 * 33 * 34)
    assert plan_of(make_inputs((2, 40)), "float32")[0] == 4


@pytest.mark.parametrize(
    ("most", "pieces", "length", "sizes"),
    [
        (100, 4, 90, ((1, 90),)),
        (128, 64, 1024, ((8, 128),)),
        (805, 4, 8192, ((7, 768), (4, 704))),
        (17, 2, 40, ((4, 10),)),
        (16, 2, 33, ((2, 16), (1, 1))),
        (1, 7, 5, ((5, 1),)),
    ],
)
def test_chunks_are_alike_and_seldom_alone(most, pieces, length, sizes):
    found = xla._chunk_sizes(most, pieces, length)
    assert sum(count * size for count, size in found) == length
    assert all(size <= most for _, size in found)
    assert found == sizes


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_pass_over_the_logits_gives_the_same(options, monkeypatch):
    """The reduction of GPUs, here run on the CPU: labels at every place of a group, logits up to a hundred."""
    hidden, weight, labels, worth = make_inputs((4, 16), vocabulary=64)
    labels = np.arange(64).reshape(4, 16)
    inputs = 10 * hidden, weight, labels, worth
    expected = value_and_gradients(weighted_sum("reference", **options), inputs, "float32")
    with lowering_platform("cuda"):
        assert plan_of(inputs, "float32") == (32, 8, jnp.float32)
        actual = value_and_gradients(weighted_sum("xla", **options), inputs, "float32")
    for ours, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-4, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.longer
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_the_sum_of_the_losses_per_token(backend):
    hidden, weight, labels, _ = (jnp.asarray(x) for x in make_inputs((3, 9)))
    call = functools.partial(linear_cross_entropy_sum, hidden, weight, implementation=backend, z_loss=0.01)
    losses = linear_cross_entropy(hidden, weight, labels, implementation=backend, z_loss=0.01)
    np.testing.assert_allclose(call(labels), losses.sum(), rtol=1e-6)
    assert np.isnan(call(labels.at[1, 2].set(33)))
    assert call(jnp.full_like(labels, -100)) == 0.0


def gradients(function, *arrays):
    return run_jitted(jax.grad(function, argnums=(0, 1)), *arrays)


def assert_close(actual, expected):
    for ours, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.longer
def test_gradients_through_checkpoint_scan_and_vmap():
    hidden, weight, labels, _ = (jnp.asarray(x) for x in make_inputs((4, 3, 20)))
    labels = labels.astype(jnp.int32)

    def total(hidden, weight, labels=labels, implementation="xla"):
        return linear_cross_entropy_sum(hidden, weight, labels, implementation=implementation)

    expected = gradients(functools.partial(total, implementation="reference"), hidden, weight)
    assert_close(gradients(jax.checkpoint(total), hidden, weight), expected)

    def mapped(h, w):
        return jax.vmap(total, (0, None, 0))(h, w, labels).sum()

    assert_close(gradients(mapped, hidden, weight), expected)

    def accumulated(hidden, weight):
        def add(carry, piece):
            d_hidden, d_weight = jax.grad(total, argnums=(0, 1))(piece[0], weight, piece[1])
            return carry + d_weight, d_hidden

        d_weight, d_hidden = jax.lax.scan(add, jnp.zeros_like(weight), (hidden, labels))
        return d_hidden, d_weight

    assert_close(run_jitted(accumulated, hidden, weight), expected)


def test_three_matmuls_with_gradients_and_one_without():
    hidden, weight, labels, _ = (jnp.asarray(x) for x in make_inputs((2, 40)))

    def matmuls(function):
        return str(jax.make_jaxpr(function)(hidden, weight)).count("dot_general[")

    call = functools.partial(linear_cross_entropy_sum, labels=labels, implementation="xla")
    losses = functools.partial(linear_cross_entropy, labels=labels, implementation="xla")
    assert matmuls(call) == 1
    assert matmuls(jax.grad(call, argnums=(0, 1))) == 3
    assert matmuls(jax.grad(lambda h, w: losses(h, w).sum(), argnums=(0, 1))) == 4


def test_a_large_16_bit_weight_gathers_its_gradient_in_its_own_dtype(monkeypatch):
    monkeypatch.setattr(xla, "CHUNK_BYTES", 2 * 64 * 16)
    most = xla.MOST_ROUNDINGS
    inputs = make_inputs((1, 16 * most), vocabulary=64)
    longer = make_inputs((1, 16 * most + 1), vocabulary=64)
    assert plan_of(inputs, "bfloat16") == (most, 1, jnp.float32)
    monkeypatch.setattr(xla, "ACCUMULATOR_BYTES", 0)
    assert plan_of(inputs, "bfloat16") == (most, 1, jnp.bfloat16)
    assert plan_of(inputs, "float32") == (2 * most, 1, jnp.float32)
    assert plan_of(longer, "bfloat16") == (most + 1, 1, jnp.float32)


@pytest.mark.longer
def test_as_many_roundings_as_are_allowed_err_by_at_most_twice_the_plain_version(monkeypatch):
    monkeypatch.setattr(xla, "CHUNK_BYTES", 2 * 64 * 16)
    monkeypatch.setattr(xla, "ACCUMULATOR_BYTES", 0)
    check(make_inputs((1, 16 * xla.MOST_ROUNDINGS), vocabulary=64), "bfloat16", "xla")


def test_float32_weight_beside_bfloat16_hidden():
    """The weight's gradient keeps the weight's precision, however large it is."""
    hidden, weight, labels, _ = make_inputs((2, 20))
    hidden = jnp.asarray(hidden, jnp.bfloat16)
    weight = jnp.asarray(weight, jnp.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "ACCUMULATOR_BYTES", 0)
        d_hidden, d_weight = gradients(
            lambda h, w: linear_cross_entropy_sum(h, w, labels, implementation="xla"), hidden, weight
        )
    assert (d_hidden.dtype, d_weight.dtype) == (jnp.bfloat16, jnp.float32)
    assert (d_weight.astype(jnp.bfloat16).astype(jnp.float32) != d_weight).any()


def test_large_logits_take_the_chunked_backend():
    hidden = jax.ShapeDtypeStruct((8, 1024, 64), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    with record_choices() as choices:
        for vocabulary in (256, 50304):
            weight = jax.ShapeDtypeStruct((64, vocabulary), jnp.bfloat16)
            jax.eval_shape(linear_cross_entropy_sum, hidden, weight, labels)
    assert [(choice.operation, choice.backend) for choice in choices] == [
        ("linear_cross_entropy_sum", "xla_dense"),
        ("linear_cross_entropy_sum", "xla"),
    ]


@pytest.mark.usefixtures("unchecked_shapes")
def test_token_weights_of_another_shape_are_refused():
    arguments = jnp.zeros((2, 8)), jnp.zeros((8, 5)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"token_weights must be floats of the shape of labels \[2\]; got .* \[3\]"):
        linear_cross_entropy_sum(*arguments, token_weights=jnp.ones(3))
