"""FP8 products of each recipe: numbers and gradients against float32, scales, states, refusals, Flax layers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from pallas_kernels import (
    NotSupported,
    QuantizedWeight,
    empty_fp8_state,
    fp8_dot_general,
    fp8_multiply,
    fp8_swiglu_mlp,
    lowering_platform,
    record_choices,
    swiglu,
    updated_fp8_state,
)
from pallas_kernels.fp8.formats import E4M3, E5M2, power_of_two_scale, quantize
from tests.compilation import run_jitted
from tests.marks import longer

RECIPES = ("current", "delayed", "blockwise")
STEPS = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
"""Half the spacing of neighbours, relative to the smaller: the largest rounding error of a value."""


def operands(rows=(4, 40), inner=(144,), outputs=((3, 16), (32,)), dtype=jnp.float32):
    random = np.random.default_rng(0)

    def normal(scale, *shape):
        return jnp.asarray(scale * random.normal(size=shape), dtype)

    weights = tuple(normal(0.02, *inner, *out) for out in outputs)
    return normal(1, *rows, *inner), weights, tuple(normal(1e-3, *rows, *out) for out in outputs)


def states(recipe, count):
    return tuple(empty_fp8_state(4) if recipe == "delayed" else None for _ in range(count))


def error(found, wanted):
    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def multiply(recipe, gradients, x, weights, contracted=1):
    given = states(recipe, len(weights))
    return fp8_multiply(x, weights, contracted=contracted, recipe=recipe, gradients=gradients, states=given)


def with_gradients(function, x, weights, incoming):
    """The results of function(x, weights), and their gradients."""

    def run(x, weights, incoming):
        outs, pull = jax.vjp(function, x, weights)
        return outs, pull(incoming)

    return run_jitted(run, x, weights, incoming)


@pytest.mark.parametrize("gradients", ["e5m2", *longer("e4m3")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_results_and_gradients_are_those_of_float32_within_fp8(recipe, gradients):
    x, weights, incoming = operands()
    outs, pulled = with_gradients(functools.partial(multiply, recipe, gradients), x, weights, incoming)

    def plain(x, weights):
        return tuple(jnp.tensordot(x, w, 1) for w in weights)

    exact, exact_pulled = with_gradients(plain, x, weights, incoming)
    of_gradient = STEPS["e4m3" if recipe == "blockwise" else gradients]
    for found, wanted in zip(outs, exact, strict=True):
        assert found.shape == wanted.shape and 0.01 < error(found, wanted) < STEPS["e4m3"]
    for found, wanted in zip(jax.tree.leaves(pulled), jax.tree.leaves(exact_pulled), strict=True):
        assert found.shape == wanted.shape and 0.01 < error(found, wanted) < of_gradient


@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_that_fp8_holds_are_multiplied_exactly(recipe):
    random = np.random.default_rng(0)
    x, w, gradient = (
        jnp.asarray(random.choice([-1.0, -0.25, 0.0, 0.5, 0.875], shape), jnp.float32)
        for shape in ((16, 256), (256, 128), (16, 128))
    )
    out, pulled = with_gradients(lambda x, w: multiply(recipe, "e5m2", x, (w,))[0], x, w, gradient)
    np.testing.assert_array_equal(out, x @ w)
    rounded = gradient if recipe == "blockwise" else gradient.astype(E5M2).astype(jnp.float32)
    for found, wanted in zip(pulled, (rounded @ w.T, x.T @ rounded), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.longer
@pytest.mark.parametrize("recipe", ["delayed", *longer("current", "blockwise")])
def test_several_weights_together_as_one_by_one(recipe):
    x, weights, incoming = operands()
    outs, pull = jax.vjp(functools.partial(multiply, recipe, "e5m2"), x, weights)
    d_x, d_weights = pull(incoming)
    summed = jnp.zeros_like(x)
    for index, weight in enumerate(weights):
        (alone,), pull = jax.vjp(functools.partial(multiply, recipe, "e5m2"), x, (weight,))
        d_alone, (d_weight,) = pull((incoming[index],))
        np.testing.assert_array_equal(alone, outs[index])
        np.testing.assert_array_equal(d_weight, d_weights[index])
        summed += d_alone
    np.testing.assert_allclose(d_x, summed, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dims", [((2,), (0,)), ((2, 0), (0, 1)), *longer(((-1,), (1,)), ((0, 2), (1, 0)))], ids=str)
def test_dims_are_those_of_dot_general(dims):
    x = jax.random.normal(jax.random.key(0), (16, 24, 32))
    shape = {1: (32, 48), 2: (32, 16)}[len(dims[0])]
    w = jax.random.normal(jax.random.key(1), shape)
    w = w.T if dims[1] == (1,) else w
    numbers = (dims, ((), ()))
    exact = jax.lax.dot_general(x, w, ((tuple(d % 3 for d in dims[0]), dims[1]), ((), ())))
    for recipe in ("current", "blockwise"):
        found = run_jitted(lambda x, w, recipe=recipe: fp8_dot_general(x, w, numbers, recipe=recipe), x, w)
        assert found.shape == exact.shape and error(found, exact) < STEPS["e4m3"]


@pytest.mark.parametrize("recipe", ["delayed", *longer("current", "blockwise")])
@pytest.mark.longer
def test_what_is_asked_for_is_the_dtype(recipe):
    x, weights, _ = operands(dtype=jnp.bfloat16)
    given = states(recipe, 1)[0]
    numbers = (((2,), (0,)), ((), ()))
    out = fp8_dot_general(x, weights[1], numbers, None, jnp.float32, recipe=recipe, state=given)
    assert out.dtype == jnp.float32
    assert fp8_dot_general(x, weights[1], numbers, recipe=recipe, state=given).dtype == jnp.bfloat16


@pytest.mark.longer
def test_a_quantized_weight_is_used_and_its_carrier_gets_the_gradient():
    x, (_, w), (_, incoming) = operands()
    out, pull = jax.vjp(lambda w: multiply("current", "e5m2", x, (w,))[0], w)
    given = quantize(w, E4M3)
    carried, carried_pull = jax.vjp(
        lambda c: multiply("current", "e5m2", x, (QuantizedWeight(c, given),))[0], jnp.full_like(w, jnp.nan)
    )
    np.testing.assert_array_equal(carried, out)
    np.testing.assert_array_equal(carried_pull(incoming)[0], pull(incoming)[0])


@pytest.mark.parametrize("recipe", ["delayed", *longer("current", "blockwise")])
@pytest.mark.longer
def test_a_float32_weight_is_rounded_once_and_gets_a_float32_gradient(recipe):
    x, (_, w), (_, incoming) = operands(dtype=jnp.float32)
    low = x.astype(jnp.bfloat16)
    # Between two neighbours of E4M3, nearer to the upper one; in bfloat16 it is the middle, which goes down to even.
    w = w.at[:].set(1.0625 + 2.0**-12).at[0, 0].set(1.75)
    out, pull = jax.vjp(lambda w: multiply(recipe, "e5m2", low, (w,))[0], w)
    wanted = jnp.full_like(w, 1.125).at[0, 0].set(1.75)
    np.testing.assert_array_equal(out, multiply(recipe, "e5m2", low, (wanted,))[0])
    (gradient,) = pull(incoming.astype(jnp.bfloat16))
    assert gradient.dtype == jnp.float32
    exact = jnp.einsum("abi,abo->io", x, incoming)
    assert error(gradient, exact) < STEPS["e5m2"]


@pytest.mark.longer
@pytest.mark.parametrize("recipe", ["delayed", *longer("current", "blockwise")])
def test_an_mlp_of_one_piece_is_its_three_products(recipe):
    x, (gate, up), _ = operands(rows=(4, 32), inner=(64,), outputs=((128,), (128,)))
    (down,), incoming = (
        operands(inner=(128,), outputs=((48,),))[1],
        jnp.cos(jnp.arange(4 * 32 * 48.0)).reshape(4, 32, 48),
    )
    given = states(recipe, 3)

    def apart(x, gate, up, down, given):
        wide = fp8_multiply(x, (gate, up), recipe=recipe, states=given[:2])
        return fp8_multiply(swiglu(*wide), (down,), recipe=recipe, states=given[2:])[0]

    def whole(x, gate, up, down, given):
        return fp8_swiglu_mlp(x, gate, up, down, recipe=recipe, states=given)

    found, wanted = (
        run_jitted(lambda *a, f=f: (lambda out, pull: (out, pull(incoming)))(*jax.vjp(f, *a)), x, gate, up, down, given)
        for f in (whole, apart)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
    wide = jax.nn.silu(x @ gate) * (x @ up)
    assert 0.01 < error(found[0], wide @ down) < 2 * STEPS["e4m3"]


@pytest.mark.parametrize("recipe", ["delayed", *longer("current", "blockwise")])
def test_what_the_backward_pass_keeps_is_not_rounded_again(recipe):
    """`jax.checkpoint` rounds kept floats to their format, for which XLA's CPU backend takes E4M3 to end at 240."""
    x, (gate, up), _ = operands(rows=(8,), inner=(32,), outputs=((48,), (48,)))

    def loss(x, weights):
        return fp8_swiglu_mlp(x, *weights, recipe=recipe, states=states(recipe, 3)).sum()

    kept = jax.checkpoint(loss, policy=jax.checkpoint_policies.everything_saveable)
    program = str(jax.make_jaxpr(jax.grad(kept, (0, 1)))(x, (gate, up, up.T)))
    assert "reduce_precision" in program
    assert not re.search(r"f8_e4m3\w*\[[\d,]*\] = reduce_precision", program)


@pytest.mark.usefixtures("unchecked_shapes")
def test_the_weights_of_an_mlp_have_to_fit():
    x = jnp.ones((16, 32))
    w = jnp.ones((32, 64))
    with pytest.raises(ValueError, match=r"down \[F, outputs\] belong together; got .*\(32, 64\), \(32, 64\)"):
        fp8_swiglu_mlp(x, w, w, w)


# --- scales -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_scales_are_the_largest_power_of_two_that_fits(dtype):
    amax = jnp.asarray([1e-30, 1e-6, 0.37, 1.0, 1.0001, 448.0, 57344.0, 1e20], jnp.float32)
    scale = np.asarray(power_of_two_scale(amax, dtype), np.float64)
    limit = float(jnp.finfo(dtype).max)
    assert np.all(np.exp2(np.round(np.log2(scale))) == scale)
    assert np.all(scale * amax <= limit) and np.all((2 * scale * amax > limit) | (scale == 2.0**100))
    assert power_of_two_scale(jnp.zeros(()), dtype) == 1


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_not_hidden(recipe, value):
    x = np.ones((4, 32), np.float32)
    x[1, 3] = value
    out = run_jitted(lambda x, w: multiply(recipe, "e5m2", x, (w,))[0], x, np.ones((32, 16), np.float32))
    clipped = recipe == "delayed" and value == np.inf  # its scale is that of other steps
    assert clipped or not np.isfinite(out[1]).any()


@pytest.mark.longer
def test_an_outlier_spoils_its_own_block_only():
    x, (_, w), _ = operands(rows=(256,), inner=(256,))
    exact = x.at[0, 0].set(1e6) @ w
    errors = {}
    for recipe in ("current", "blockwise"):
        out = multiply(recipe, "e5m2", x.at[0, 0].set(1e6), (w,))[0]
        errors[recipe] = error(out[1:], exact[1:])
    assert errors["blockwise"] < STEPS["e4m3"] and errors["current"] > 0.5


# --- delayed scaling ----------------------------------------------------------------------------------------------


@pytest.mark.longer
def test_the_gradient_of_a_state_is_the_maxima_of_the_call():
    x, (_, w), (_, incoming) = operands()
    state = empty_fp8_state(3)  # with room for all of these values
    _, pull = jax.vjp(lambda s: fp8_multiply(x, (w,), recipe="delayed", states=(s,))[0], state)
    (gradient,) = pull(incoming)
    maxima = [float(jnp.abs(a).max()) for a in (x, w, incoming)]
    np.testing.assert_allclose(gradient, [[m, 0, 0] for m in maxima], rtol=STEPS["e5m2"])
    second = updated_fp8_state(updated_fp8_state(state, gradient), 2 * gradient)
    np.testing.assert_allclose(second, [[2 * m, m, 0] for m in maxima], rtol=STEPS["e5m2"])


@pytest.mark.longer
def test_a_tensor_that_was_clipped_asks_for_a_larger_scale_until_it_fits():
    x, (_, w), _ = operands()
    state = empty_fp8_state(1)

    def loss(state):
        return fp8_multiply(1e3 * x, (w,), recipe="delayed", states=(state,))[0].sum()

    for _ in range(12):
        state = updated_fp8_state(state, jax.grad(loss)(state))
    np.testing.assert_allclose(state[0, 0], 1e3 * jnp.abs(x).max(), rtol=STEPS["e4m3"])


def test_delayed_scales_come_from_the_history():
    x, (_, w), _ = operands()
    known = jnp.zeros((3, 4)).at[0, 2].set(jnp.abs(x).max()).at[1, 0].set(jnp.abs(w).max())
    same = multiply("current", "e5m2", x, (w,))[0]
    np.testing.assert_array_equal(fp8_multiply(x, (w,), recipe="delayed", states=(known,))[0], same)
    too_small = known.at[0, 2].set(1e-3)
    assert error(fp8_multiply(x, (w,), recipe="delayed", states=(too_small,))[0], same) > 0.1, "x is clipped"


def test_maxima_that_are_not_finite_do_not_enter_the_history():
    gradient = jnp.zeros((3, 2)).at[:, 0].set(jnp.asarray([1.0, jnp.inf, jnp.nan]))
    np.testing.assert_array_equal(updated_fp8_state(jnp.ones((3, 2)), gradient), [[1, 1], [0, 1], [0, 1]])


# --- refusals -----------------------------------------------------------------------------------------------------

PLAIN = (((1,), (0,)), ((), ()))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("options", "dtype", "said"),
    [
        ({"recipe": "curent"}, jnp.float32, "'current', 'delayed', 'blockwise'"),
        ({"gradients": "e3m4"}, jnp.float32, "'e5m2', 'e4m3'"),
        ({"recipe": "delayed"}, jnp.float32, "empty_fp8_state"),
        ({"state": jnp.zeros((3, 4))}, jnp.float32, "recipe 'current' with 1 states"),
        ({}, jnp.float16, "float16"),
        ({"out_sharding": jax.P("data")}, jnp.float32, "out_sharding"),
    ],
    ids=str,
)
def test_a_broken_rule_is_named(options, dtype, said):
    with pytest.raises(ValueError, match="fp8|recipe|gradients|state|FP8") as refused:
        fp8_dot_general(jnp.ones((16, 16), dtype), jnp.ones((16, 16), dtype), PLAIN, **options)
    assert said in str(refused.value)


@pytest.mark.usefixtures("unchecked_shapes")
def test_batch_dims_are_refused():
    x = jnp.ones((2, 16, 16))
    with pytest.raises(ValueError, match="no batch dims"):
        fp8_dot_general(x, x, (((2,), (1,)), ((0,), (0,))))


@pytest.mark.parametrize(
    ("shape", "recipe", "backend", "reason"),
    [
        ((64, 256, 128), "current", "cublas", None),
        ((64, 250, 128), "current", "xla", "multiples of 16"),
        ((128, 256, 128), "blockwise", "mosaic", None),
        ((64, 256, 128), "blockwise", "xla", "multiples of 128"),
    ],
)
def test_the_choice_on_hopper_and_why_not(shape, recipe, backend, reason):
    rows, inner, outputs = shape
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, inner), (inner, outputs)))
    with lowering_platform("cuda"), record_choices() as choices:
        jax.eval_shape(lambda x, w: fp8_multiply(x, (w,), recipe=recipe), x, w)
    if jax.__version_info__ < (0, 11) and recipe == "blockwise":
        backend = "xla"
        reason = "jax 0.11"
    assert choices[0].backend == backend
    assert reason is None or reason in choices[0].refused[0][1]


def test_a_named_backend_that_cannot_is_refused():
    with pytest.raises(NotSupported, match=r"compute capability 8\.9"):
        fp8_multiply(jnp.ones((16, 16)), (jnp.ones((16, 16)),), implementation="cublas")


# --- Flax ---------------------------------------------------------------------------------------------------------


def trained(loss, params, steps=30):
    step = jax.jit(lambda p: jax.tree.map(lambda a, g: a - 0.2 * g, p, jax.grad(loss)(p)))
    for _ in range(steps):
        params = step(params)
    return float(loss(params))


X = np.random.default_rng(3).normal(size=(64, 32)).astype(np.float32)
Y = np.sin(X @ np.random.default_rng(4).normal(size=(32, 16)).astype(np.float32) / 4)


def test_flax_layers_multiply_with_it():
    linear = nnx.Linear(32, 16, rngs=nnx.Rngs(0), dot_general=fp8_dot_general)
    weight = linear.kernel[...]

    def products(x, weight):
        dense = linen.Dense(16, use_bias=False, dot_general=fp8_dot_general).apply({"params": {"kernel": weight}}, x)
        return fp8_dot_general(x, weight, PLAIN), linear(x), dense

    wanted, *found = run_jitted(products, X, weight)
    assert 0.01 < error(wanted, X @ weight) < STEPS["e4m3"]
    for product in found:
        np.testing.assert_array_equal(product, wanted)


@pytest.mark.longer
def test_nnx_linear_learns_with_it():
    def loss_of(**options):
        graphdef, params = nnx.split(nnx.Linear(32, 16, rngs=nnx.Rngs(0), **options))
        return trained(lambda p: jnp.mean((nnx.merge(graphdef, p)(X) - Y) ** 2), params)

    plain = loss_of()
    fp8 = loss_of(dot_general=fp8_dot_general)
    assert fp8 != plain and abs(fp8 / plain - 1) < 0.05


@pytest.mark.longer
def test_linen_dense_learns_with_it():
    def loss_of(**options):
        layer = linen.Dense(16, **options)
        return trained(lambda p: jnp.mean((layer.apply(p, X) - Y) ** 2), layer.init(jax.random.key(0), X))

    plain = loss_of()
    fp8 = loss_of(dot_general=fp8_dot_general)
    assert fp8 != plain and abs(fp8 / plain - 1) < 0.05


@pytest.mark.longer
def test_under_vmap_scan_and_checkpoint():
    x = jax.random.normal(jax.random.key(0), (3, 16, 32))
    w = 0.1 * jax.random.normal(jax.random.key(1), (3, 32, 32))

    def layer(x, w):
        return x + fp8_dot_general(x, w, PLAIN), None

    def loss(function):
        return lambda x, w: (jax.lax.scan(function, x[0], w)[0] ** 2).sum()

    plain, again = (jax.jit(jax.grad(loss(f), argnums=1)) for f in (layer, jax.checkpoint(layer)))
    np.testing.assert_allclose(plain(x, w), again(x, w), rtol=1e-5, atol=1e-6)
    batched = jax.vmap(lambda x, w: fp8_dot_general(x, w, PLAIN))(x, w)
    for index in range(3):
        np.testing.assert_allclose(batched[index], fp8_dot_general(x[index], w[index], PLAIN), rtol=1e-6, atol=1e-6)
