"""The activated matmul: XLA's form, the Hopper kernel interpreted with race detection, and compiled for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import activated_matmul, lowering_platform, record_choices
from pallas_kernels.fused_mlp import mosaic, mosaic_backward
from pallas_kernels.fused_mlp.activations import ACTIVATIONS
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
    call = lambda inputs, weight: activated_matmul(inputs, weight, name, implementation=implementation)  # noqa: E731
    out, pullback = jax.vjp(call, inputs, weight)
    return jax.tree.leaves((out, pullback(d_out)))


def largest(differences):
    return [float(jnp.abs(d).max()) for d in differences]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradient_is_that_of_the_forward(name):
    activation = ACTIVATIONS[name]
    inputs = tuple(jax.random.normal(jax.random.key(i), (64,)) * 3 for i in range(activation.inputs))
    d_hidden = jax.random.normal(jax.random.key(9), (64,))
    wanted = jax.vjp(activation.forward, *inputs)[1](d_hidden)
    for one, other in zip(activation.gradient(inputs, d_hidden), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@needs_mosaic
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_error_at_most_twice_the_plain_version_and_no_race(name, monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    arrays = operands(name)
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
    with lowering_platform("cuda"), record_choices() as choices:
        text = compile_for_hopper(lambda *arrays: results(name, *arrays, None), *shapes).as_text()
    assert [choice.backend for choice in choices] == ["mosaic"]
    report = "".join(capfd.readouterr())
    assert "0 bytes spill stores" in report and " bytes spill stores" not in report.replace("0 bytes spill stores", "")
    # The hidden values and their gradients: the forward's pass writes the first, the kernel the others.
    passes = [line for line in text.splitlines() if "ROOT" not in line and "= bf16[8192,1024]" in line]
    assert sum(" fusion(" in line for line in passes) <= 1


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
