"""The activated matmul: XLA's form, the Hopper kernel interpreted with race detection, and compiled for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BiasedProduct, activated_matmul, lowering_platform, record_choices
from pallas_kernels.fused_mlp import mosaic, mosaic_backward
from pallas_kernels.fused_mlp.activations import ACTIVATIONS
from tests.compilation import run_jitted
from tests.hopper import compile_for_hopper

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")


def operands(name, rows=256, width=512, depth=128, dtype=jnp.bfloat16):
    """Inputs, weight, and the gradient of the result."""
    keys = jax.random.split(jax.random.key(0), 4)
    inputs = tuple(2 * jax.random.normal(key, (2, rows // 2, width), dtype) for key in keys[: ACTIVATIONS[name].inputs])
    weight = jax.random.normal(keys[2], (width, depth), dtype) / 16
    return inputs, weight, jax.random.normal(keys[3], (2, rows // 2, depth), dtype)


def results(name, inputs, weight, d_out, implementation):
    """The result, and the gradients of inputs and weight."""

    def call(inputs, weight):
        return activated_matmul(inputs, weight, name, implementation=implementation)

    out, pullback = jax.vjp(call, inputs, weight)
    return jax.tree.leaves((out, pullback(d_out)))


def largest(differences):
    return [float(jnp.abs(d).max()) for d in differences]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradient_is_that_of_the_forward(name):
    activation = ACTIVATIONS[name]
    *inputs, d_hidden = 3 * np.random.default_rng(0).normal(size=(activation.inputs + 1, 64)).astype(np.float32)

    def gradients(inputs, d_hidden):
        return activation.gradient(inputs, d_hidden), jax.vjp(activation.forward, *inputs)[1](d_hidden)

    for one, other in zip(*run_jitted(gradients, tuple(inputs), d_hidden), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def with_product(arrays, depth=192):
    """Arguments as those of `results`, with the input computed from [..., depth] with a bias."""
    (like,), weight, d_out = arrays
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (*like.shape[:-1], depth), like.dtype)
    first = jax.random.normal(keys[1], (depth, like.shape[-1]), like.dtype) / 8
    return BiasedProduct(x, first, jax.random.normal(keys[2], like.shape[-1:])), weight, d_out


def test_kernel_form_is_the_activation():
    x = jnp.linspace(-8, 8, 1001)
    for activation in ACTIVATIONS.values():
        if activation.in_kernel is not None:
            np.testing.assert_allclose(activation.in_kernel(x), activation.forward(x), rtol=1e-5, atol=1e-6)


@needs_mosaic
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_error_at_most_twice_the_plain_version_and_no_race(name, monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    check_errors(name, operands(name), capfd)


@needs_mosaic
@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [192, 256])
def test_error_of_the_product_with_bias_and_no_race(width, monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    check_errors("gelu_tanh", with_product(operands("gelu_tanh", width=width)), capfd)


def check_errors(name, arrays, capfd):
    """Error at most twice the plain version's, of the result and of all gradients, and no race reported."""
    wide = results(name, *jax.tree.map(lambda x: x.astype(jnp.float32), arrays), "xla")
    plain, ours = (results(name, *arrays, implementation) for implementation in ("xla", "mosaic"))
    errors, allowed = (largest(x - y for x, y in zip(found, wide, strict=True)) for found in (ours, plain))
    assert all(error <= 2 * most for error, most in zip(errors, allowed, strict=True)), (errors, allowed)
    assert all(size > 0.1 for size in largest(wide))
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@needs_mosaic
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_compiled_for_hopper_without_spills_and_without_the_gradient_of_hidden(name, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    shapes = jax.eval_shape(lambda: operands(name, rows=8192, width=1024))
    check_compiled(name, shapes, capfd, most_passes=1)


@needs_mosaic
def test_product_with_bias_compiled_for_hopper_without_passes_over_hidden(monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    shapes = jax.eval_shape(lambda: with_product(operands("gelu_tanh", rows=8192, width=1536)))
    text = check_compiled("gelu_tanh", shapes, capfd, most_passes=0, width=1536)
    assert "kInput" in text  # The sums of the partial sums for the bias.
    assert not any("bf16[8192,1536]" in line for line in text.splitlines() if "reduce(" in line)


def check_compiled(name, shapes, capfd, most_passes, width=1024):
    """No spills, and at most this many elementwise passes that write the hidden values; return the program's text."""
    with lowering_platform("cuda"), record_choices() as choices:
        text = compile_for_hopper(lambda *arrays: results(name, *arrays, None), *shapes).as_text()
    assert [choice.backend for choice in choices] == ["mosaic"]
    report = "".join(capfd.readouterr())
    assert "0 bytes spill stores" in report and " bytes spill stores" not in report.replace("0 bytes spill stores", "")
    # The hidden values and their gradients: the forward's pass writes the first, the kernel the others.
    passes = [line for line in text.splitlines() if "ROOT" not in line and f"= bf16[8192,{width}]" in line]
    assert sum(" fusion(" in line for line in passes) <= most_passes
    return text


@needs_mosaic
@pytest.mark.parametrize(
    ("change", "reason"),
    [({"rows": 320}, "multiples of 128"), ({"width": 320}, "multiples of 128"), ({"dtype": jnp.float32}, "bfloat16")],
)
def test_what_the_kernel_refuses(change, reason):
    shapes = jax.eval_shape(lambda: operands("gelu_tanh", **{"rows": 8192, "width": 1024, **change}))
    with lowering_platform("cuda"), record_choices() as choices:
        jax.eval_shape(lambda inputs, weight, _: activated_matmul(inputs, weight, "gelu_tanh"), *shapes)
    assert choices[0].backend == "xla" and reason in str(choices[0])


def test_few_pieces_are_in_shared_memory_of_many_inputs():
    products = (mosaic.make_product(count, 256, 768, 128) for count in (1, 2))
    assert [mosaic_backward._slots(product, 1 + index) for index, product in enumerate(products)] == [4, 2]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("name", "count", "width", "message"),
    [("swish", 1, 8, "must be one of"), ("swiglu", 1, 8, "takes 2 inputs"), ("gelu_tanh", 1, 16, "as many rows")],
)
def test_broken_rules(name, count, width, message):
    with pytest.raises(ValueError, match=message):
        activated_matmul([jnp.ones((4, width))] * count, jnp.ones((8, 4)), name)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("swiglu", {}, "with one input"),
        ("gelu_tanh", {"x": jnp.ones((4, 3))}, "as many rows"),
        ("gelu_tanh", {"bias": jnp.ones(7)}, "must fit"),
        ("gelu_tanh", {"weight": jnp.ones((2, 8), jnp.bfloat16)}, "one dtype"),
    ],
)
def test_broken_rules_of_a_product(name, change, message):
    product = BiasedProduct(jnp.ones((4, 2)), jnp.ones((2, 8)), jnp.ones(8))
    with pytest.raises(ValueError, match=message):
        activated_matmul(product._replace(**change), jnp.ones((8, 4)), name)
