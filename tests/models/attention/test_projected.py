"""Attention to the keys of a block and to the summaries of earlier blocks, against a softmax over all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.attention.projected import ProjectedAttention

BLOCK = 8
T = 37
N = 4
K = 2
H = 16
IDS = np.repeat([0, 1, 2], (21, 9, 7))[None]


def dense(q, k, v, weight, ids):
    """The same by one softmax over summaries and tokens."""
    blocks = -(-T // BLOCK)
    k, v = (jnp.repeat(jnp.pad(x, ((0, 0), (0, blocks * BLOCK - T), (0, 0), (0, 0))), N // K, axis=2) for x in (k, v))
    padded = np.pad(ids, ((0, 0), (0, blocks * BLOCK - T)), mode="edge").reshape(1, blocks, BLOCK)
    last = padded[..., -1]
    counts = (padded == last[..., None])[..., None, None]

    def summaries(x, weight):
        x = x.reshape(1, blocks, BLOCK, N, H) * counts
        return jnp.einsum("bmtnh,tr->bmrnh", x, weight).reshape(1, -1, N, H)

    keys = jnp.concatenate([summaries(k, weight[0]), k], axis=1)
    values = jnp.concatenate([summaries(v, weight[1]), v], axis=1)
    count = weight.shape[2]
    at = np.arange(T)
    block = np.repeat(np.arange(blocks), count)
    far = (block[None] < at[:, None] // BLOCK) & (np.repeat(last[0], count)[None] == ids[0][:, None])
    place = np.arange(blocks * BLOCK)
    near = (place[None] <= at[:, None]) & (place[None] // BLOCK == at[:, None] // BLOCK)
    near &= padded.reshape(-1)[None] == ids[0][:, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, keys) / H**0.5
    shares = jax.nn.softmax(jnp.where(np.concatenate([far, near], axis=1), scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", shares, values)


@pytest.mark.longer
@pytest.mark.parametrize(("summaries", "packed"), [(1, True), (3, False)], ids=["groups of 4", "groups of 1"])
def test_outputs_and_gradients_are_those_of_one_softmax(summaries, packed):
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (1, T, N, H))
    k, v = (jax.random.normal(key, (1, T, K, H)) for key in keys[1:3])
    weight = jax.random.normal(keys[3], (2, BLOCK, summaries)) / BLOCK**0.5
    wanted = jax.random.normal(keys[4], q.shape)
    ids = IDS if packed else np.zeros_like(IDS)
    heads = AttentionSpec(N, K, H, scale=H**-0.5)

    def ours(q, k, v, weight):
        kind = ProjectedAttention(block_size=BLOCK, summaries=summaries).with_weight(weight)
        return kind.attend(q, k, v, jnp.asarray(ids, jnp.int32), heads)

    def loss(function, *arrays):
        out = function(*arrays)
        return jnp.sum(out * wanted), out

    found, expected = (
        jax.jit(jax.value_and_grad(lambda *arrays, f=f: loss(f, *arrays), (0, 1, 2, 3), has_aux=True))(q, k, v, weight)
        for f in (ours, lambda *arrays: dense(*arrays, ids))
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
