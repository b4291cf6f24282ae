"""The state space layer: chunks against the recurrence, packed documents against each alone, and cut in two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NotSupported, record_choices, ssd

B, T, N, P, G, S = 2, 37, 4, 3, 2, 5
LENGTHS = (5, 16, 9, 7)
"""Documents of a row: they end within chunks of 8 tokens, and one of them spans three."""


def arrays() -> list[jax.Array]:
    """x, dt, a, b, c and a state of order one."""
    normal = np.random.default_rng(0).normal
    x, b, c = (normal(size=(B, T, *s)) for s in ((N, P), (G, S), (G, S)))
    dt = np.log1p(np.exp(normal(size=(B, T, N)) - 1))
    arrays = (x, dt, -np.arange(1, N + 1) / 2, b, c, normal(size=(B, N, P, S)))
    return [jnp.asarray(z, jnp.float32) for z in arrays]


def documents() -> jax.Array:
    """Ids of two rows, of which the second is one document; the third document has the id of the first."""
    ids = np.repeat([0, 1, 0, 2], LENGTHS)
    return jnp.asarray(np.stack([ids, np.zeros(T, int)]))


def run(x, dt, a, b, c, state, **options):
    return ssd(x, dt, a, b, c, state=state, **options)


@pytest.mark.longer
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_equal_the_recurrence(packed):
    inputs = arrays()
    options = {"segment_ids": documents()} if packed else {}
    weights = [jax.random.normal(jax.random.key(9), z.shape) for z in (inputs[0], inputs[5])]

    @jax.jit(static_argnames="implementation")
    def value_and_gradients(*inputs, implementation):
        def loss(*inputs):
            found = run(*inputs, chunk=8, implementation=implementation, **options)
            return sum((z * w).sum() for z, w in zip(found, weights, strict=True)), found

        return jax.grad(loss, argnums=tuple(range(6)), has_aux=True)(*inputs)

    gradients, found = value_and_gradients(*inputs, implementation="xla")
    wanted_gradients, wanted = value_and_gradients(*inputs, implementation="recurrent")
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(gradients, wanted_gradients, strict=True):
        assert np.abs(theirs).max() > 0.5
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)


def test_packed_documents_are_as_if_alone():
    """Each document of the first row alone: the tokens of the others have dt = 0, which leaves the state as it is."""
    x, dt, a, b, c, state = (np.asarray(z if z.ndim == 1 else z[:1]) for z in arrays())
    call = jax.jit(lambda dt, state, ids: run(x, dt, a, b, c, state, chunk=8, segment_ids=ids))
    together, last = call(dt, state, np.asarray(documents()[:1]))
    start = 0
    for length in LENGTHS:
        own = slice(start, start + length)
        alone_dt = np.zeros_like(dt)
        alone_dt[:, own] = dt[:, own]
        alone, end = call(alone_dt, state, np.zeros((1, T), np.int32))
        np.testing.assert_allclose(together[:, own], alone[:, own], atol=1e-5)
        state = np.zeros_like(state)  # the one before the row is of its first document
        start += length
    np.testing.assert_allclose(last, end, atol=1e-5)


@pytest.mark.longer
def test_a_state_continues_and_padding_leaves_it():
    """A row in three calls, each with tokens of dt = 0 after its own, and its last token alone."""
    *arguments, state = arrays()
    call = jax.jit(lambda *inputs: run(*inputs, chunk=8))
    y, last = call(*arguments, state)
    parts = []
    for start, end in ((0, 11), (11, 20), (20, 36)):
        x, dt, a, b, c = (z if z.ndim == 1 else jnp.roll(z, -start, axis=1) for z in arguments)
        part, state = call(x, dt.at[:, end - start :].set(0.0), a, b, c, state)
        parts.append(part[:, : end - start])
    part, state = run(*(z if z.ndim == 1 else z[:, -1:] for z in arguments), state)
    np.testing.assert_allclose(jnp.concatenate([*parts, part], axis=1), y, atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


@pytest.mark.longer
def test_bfloat16_is_close_and_its_state_float32():
    x, dt, a, b, c, state = arrays()
    low = [z.astype(jnp.bfloat16) for z in (x, b, c)]
    y, last = run(low[0], dt, a, low[1], low[2], state)
    wanted, wanted_last = run(low[0].astype(jnp.float32), dt, a, *(z.astype(jnp.float32) for z in low[1:]), state)
    assert y.dtype == jnp.bfloat16 and last.dtype == jnp.float32
    np.testing.assert_allclose(y.astype(jnp.float32), wanted, atol=2e-2, rtol=1e-2)
    np.testing.assert_allclose(last, wanted_last, atol=1e-5, rtol=1e-5)


def test_one_token_takes_the_recurrence_and_more_take_chunks():
    x, dt, a, b, c, _ = arrays()
    with record_choices() as choices:
        jax.eval_shape(ssd, x[:, :1], dt[:, :1], a, b[:, :1], c[:, :1])
        jax.eval_shape(ssd, x, dt, a, b, c)
    assert [(choice.backend, choice.fallback) for choice in choices] == [("recurrent", False), ("xla", True)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": jnp.zeros((B, T, 3, S)), "c": jnp.zeros((B, T, 3, S))}, r"heads \(4\) must be a multiple of the groups"),
        ({"b": jnp.zeros((B, T, G, S), jnp.bfloat16)}, "must have one dtype"),
        ({"chunk": 0}, "chunk must be a Python integer of at least 1"),
        ({"implementation": "triton"}, "ssd has no implementation 'triton'"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    given = dict(zip(("x", "dt", "a", "b", "c", "state"), arrays(), strict=True)) | changes
    with pytest.raises((ValueError, NotSupported), match=message):
        ssd(**given)
