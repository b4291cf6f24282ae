"""The gated delta rule in chunks equals the recurrence: outputs, states and gradients, with documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_delta_rule
from pallas_kernels.delta_rule import xla
from tests.shapes import unchecked

NAMES = ("q", "k", "v", "log_decay", "beta", "state")


def arrays(length: int, channels: bool = False) -> list[jax.Array]:
    """Two rows, two key heads of 8, four value heads of 6; keys of length 1, values of order 1.

    With `channels` each key channel has its own decay, of which one in 20 leaves nothing.
    """
    normal = np.random.default_rng(0).normal
    q, k = normal(size=(2, 2, length, 2, 8))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = normal(size=(2, length, 4, 6))
    drawn = normal(size=(2, length, 4, 8) if channels else (2, length, 4))
    log_decay = np.where(drawn > 1.65, -1e4, -np.exp(drawn - 2)) if channels else -np.exp(drawn - 2)
    beta = 1 / (1 + np.exp(-normal(size=(2, length, 4))))
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, beta, normal(size=(2, 4, 8, 6)))]


def outputs_and_gradients(x, ids, implementation):
    def loss(*x):
        *tokens, state = x
        out, last = gated_delta_rule(*tokens, state=state, segment_ids=ids, implementation=implementation)
        weight = jnp.sin(jnp.arange(out.size)).reshape(out.shape)
        return (out * weight).sum() + jnp.sin(last).sum(), (out, last)

    gradients, found = jax.jit(jax.grad(loss, argnums=range(6), has_aux=True))(*x)
    return (*found, *gradients)


@pytest.mark.longer
@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
def test_chunks_equal_the_recurrence(channels, monkeypatch):
    monkeypatch.setattr(xla, "_CHUNK", 16)
    length = 53
    x = arrays(length, channels)
    # Documents that begin within chunks, at a chunk's first token, and two in one chunk; the same number twice.
    starts = np.isin(np.arange(length), (5, 16, 33, 36))
    ids = jnp.asarray(np.stack([np.cumsum(starts) % 2, np.arange(length) > 47]))
    found = outputs_and_gradients(x, ids, None)
    wanted = outputs_and_gradients(x, ids, "recurrent")
    for name, a, b in zip(("out", "last", *NAMES), found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 if name in ("out", "last") else 1e-4, err_msg=name)


@pytest.mark.longer
@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
def test_a_sequence_in_parts_and_padding(channels):
    """The state carries a sequence from call to call; padding, or beta and log_decay of 0, leave it as it is."""
    *tokens, state = arrays(11, channels)

    @jax.jit
    def in_parts(tokens, state):
        outs = []
        for start, end in ((0, 6), (6, 7), (7, 11)):
            out, state = gated_delta_rule(*(x[:, start:end] for x in tokens), state=state)
            outs.append(out)
        quiet = [*(x[:, :3] for x in tokens[:3]), *(0 * x[:, :3] for x in tokens[3:])]
        hidden = jnp.full((2, 11), -1)
        quiet = gated_delta_rule(*quiet, state=state), gated_delta_rule(*tokens, segment_ids=hidden, state=state)
        return jnp.concatenate(outs, 1), state, *(last for _, last in quiet)

    out, last, *after_padding = in_parts(tokens, state)
    wanted, wanted_last = jax.jit(lambda x, state: gated_delta_rule(*x, state=state))(tokens, state)
    np.testing.assert_allclose(out, wanted, atol=1e-6)
    np.testing.assert_allclose(last, wanted_last, atol=1e-6)
    np.testing.assert_array_equal(after_padding[0], last)
    np.testing.assert_array_equal(after_padding[1], last)


def test_arguments_are_checked():
    *tokens, state = arrays(3)
    with pytest.raises(ValueError, match=r"value heads \(3\) must be a multiple of the number of key heads \(2\)"):
        gated_delta_rule(*tokens[:2], *(x[:, :, :3] for x in tokens[2:]))
    with unchecked(), pytest.raises(ValueError, match=r"log_decay must be \[2, 3, 4\], .* or \[2, 3, 4, 8\], one"):
        gated_delta_rule(*tokens[:3], tokens[3][..., None], tokens[4])
    with unchecked(), pytest.raises(ValueError, match=r"state must be \[2, 4, 8, 6\]"):
        gated_delta_rule(*tokens, state=state[..., :2])
