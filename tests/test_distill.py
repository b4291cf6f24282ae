"""The divergence from a teacher in chunks of the vocabulary equals that of whole logits, with its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.distill import DivergenceOptions, divergence_sum
from tests.compilation import run_jitted

SHAPES = ((7, 6), (6, 29), (7, 5), (5, 29))
HIDDEN, WEIGHT, TEACHER, TEACHER_WEIGHT = (
    np.random.default_rng(n).normal(size=shape).astype(np.float32) for n, shape in enumerate(SHAPES)
)
COUNTS = np.array([1, 0, 1, 1, 1, 0, 1], np.float32)


def whole(hidden: jax.Array, weight: jax.Array, options: DivergenceOptions) -> jax.Array:
    def cap(logits, most):
        return logits if most is None else jnp.tanh(logits / most) * most

    student = jax.nn.log_softmax(cap(hidden @ weight, options.student_cap) / options.temperature)
    teacher = jax.nn.log_softmax(cap(TEACHER @ TEACHER_WEIGHT, options.teacher_cap) / options.temperature)
    return jnp.sum(COUNTS * jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1))


@pytest.mark.parametrize(
    ("chunk", "caps"),
    [
        (10, (3.0, 2.0)),
        pytest.param(None, (None, None), marks=pytest.mark.longer),
        pytest.param(4, (None, None), marks=pytest.mark.longer),
    ],
)
def test_chunks_equal_the_whole(chunk: int | None, caps: tuple[float | None, float | None]):
    options = DivergenceOptions(2.0, *caps, chunk)

    def in_chunks(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        return divergence_sum(hidden, weight, TEACHER, TEACHER_WEIGHT, COUNTS, options)

    found = run_jitted(jax.value_and_grad(in_chunks, (0, 1)), HIDDEN, WEIGHT)
    expected = run_jitted(jax.value_and_grad(lambda h, w: whole(h, w, options), (0, 1)), HIDDEN, WEIGHT)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected)


def test_equal_predictions_have_no_divergence():
    options = DivergenceOptions(1.5, chunk=8)
    same = divergence_sum(TEACHER, TEACHER_WEIGHT, TEACHER, TEACHER_WEIGHT, COUNTS, options)
    assert abs(float(same)) < 1e-5


def test_only_one_chunk_of_logits_exists():
    """Of 4,096 tokens and 32,000 ids, whole float32 logits would take 524 MB for each model."""
    shapes = [(4096, 64), (64, 32000), (4096, 32), (32, 32000), (4096,)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    options = DivergenceOptions(chunk=1000)
    text = str(jax.make_jaxpr(jax.grad(lambda *x: divergence_sum(*x, options), (0, 1)))(*arguments))
    assert "f32[4096,1000]" in text
    assert "f32[4096,32000]" not in text
