"""Log-probabilities of tokens and of the likeliest tokens in their place, as int32 that is read with the tokens.

Dims: R rows, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

MOST_LIKELIEST = 20
"""Number of likeliest tokens that a step scores beside each token, the limit of OpenAI's API."""
_FIRST = 3
"""Column of the first of these: before it are the token, its log-probability and its rank."""


class TokenScore(NamedTuple):
    """Log-probability and rank of a token, and the likeliest tokens in its place."""

    log_probability: float
    """Natural logarithm of its probability under the model, at a temperature of 1 and without any limit or penalty."""
    rank: int
    """1: no other token was likelier."""
    likeliest: tuple[tuple[int, float], ...]
    """The likeliest tokens with their log-probabilities, the likeliest first."""


def pack_scores(logits: Float[Array, "R V"], tokens: Int[Array, " R"]) -> Int[Array, "R columns"]:
    """Return each row's token, its score and the likeliest tokens, floats as their bits; see `unpack_scores`."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    own = scores[jnp.arange(len(tokens)), tokens]
    rank = 1 + (scores > own[:, None]).sum(-1, dtype=jnp.int32)
    values, ids = jax.lax.top_k(scores, min(MOST_LIKELIEST, logits.shape[-1]))
    return jnp.concatenate([jnp.stack([tokens, _bits(own), rank], 1), ids, _bits(values)], 1)


def unpack_scores(packed: Int[np.ndarray, "R columns"], count: int) -> list[TokenScore]:
    """Return the scores of rows of `pack_scores`, with the `count` likeliest tokens of each."""
    floats = packed.view(np.float32)
    middle = (packed.shape[1] + _FIRST) // 2
    count = min(count, middle - _FIRST)
    ids = packed[:, _FIRST : _FIRST + count].tolist()
    values = floats[:, middle : middle + count].tolist()
    own = zip(floats[:, 1].tolist(), packed[:, 2].tolist(), ids, values, strict=True)
    return [TokenScore(score, rank, tuple(zip(*likeliest, strict=True))) for score, rank, *likeliest in own]


def _bits(x: Float[Array, "..."]) -> Int[Array, "..."]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
