"""The short convolution is causal, restarts at documents, and continues from its tail, whatever padding a row has."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxstack.models.attention.slot_cache import padding_last
from jaxstack.models.mixers.short_convolution import ShortConvolution, next_tail
from tests.compilation import run_jitted


def _definition(module: ShortConvolution, x: np.ndarray) -> np.ndarray:
    """silu(bias + sum_j taps[j] x[t - W + 1 + j]) of one document x [T, ...], token by token."""
    taps, bias = np.asarray(module.taps[...]), np.asarray(module.bias[...])
    padded = np.concatenate([np.zeros((len(taps) - 1, *x.shape[1:])), x])
    out = np.stack([bias + (padded[t : t + len(taps)] * taps).sum(0) for t in range(len(x))])
    return out / (1 + np.exp(-out))


def test_documents_tails_and_padding():
    module = ShortConvolution((2, 3), ("heads", "head_dim"), 4, rngs=nnx.Rngs(0), bias=True)
    module.bias = module.bias.replace(jnp.arange(6.0).reshape(2, 3))
    x = np.random.default_rng(1).normal(size=(2, 9, 2, 3)).astype(np.float32)
    # Two documents with the same number, with one of a single token between them.
    ids = jnp.array([[0, 0, 0, 0, 1, 0, 0, 2, 2], [3] * 9])
    # Row 0 goes on by 4 tokens behind one of padding, row 1 by 2 in front of three.
    queries = np.array([[-1, 5, 6, 7, 8], [5, 6, -1, -1, -1]], np.int32)

    def run(x):
        new = x[np.arange(2)[:, None], np.maximum(queries, 0)]
        tail = next_tail(x[:, :5], jnp.zeros((2, 3, 2, 3)))
        lengths, (first,), back = padding_last(jnp.asarray(queries), new)
        continued = back(module(first, tail=tail))
        return module(x, segment_ids=ids), module(x), continued, next_tail(first, tail, lengths)

    found, whole, continued, tail = run_jitted(run, x)
    for row, starts in ((0, (0, 4, 5, 7, 9)), (1, (0, 9))):
        alone = [_definition(module, x[row, a:b]) for a, b in zip(starts, starts[1:], strict=False)]
        np.testing.assert_allclose(found[row], np.concatenate(alone), atol=1e-6)
    np.testing.assert_allclose(continued[0, 1:], whole[0, 5:], atol=1e-6)
    np.testing.assert_allclose(continued[1, :2], whole[1, 5:7], atol=1e-6)
    np.testing.assert_array_equal(tail[0], x[0, 6:])
    np.testing.assert_array_equal(tail[1], x[1, 4:7])
