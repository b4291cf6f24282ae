"""Changes of logits that depend on the text so far: penalties of repeated tokens, biases, and no end before a length.

Their state has a row for each slot of the engine, so that no step waits for the host. Definitions and order are vLLM's.

Dims: S slots, R rows, V vocabulary.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxstack.decoding.rows import Column
from jaxstack.decoding.sampling import Sampling

_IN_PROMPT = 1 << 29
_ENDS = 1 << 30
"""Added to the counts of tokens that are in the prompt, and of those that end the answer."""


class LogitChanges(NamedTuple):
    """Penalties, biases and minimum lengths of the requests in the slots; rows of other slots have no meaning."""

    counts: Int[Array, "S V"]
    """Count of each token in the answer, plus `_IN_PROMPT` and `_ENDS`."""
    bias: Float[Array, "S V"]
    settings: Float[Array, "S 4"]
    """Presence, frequency and repetition penalty, and the number of tokens before which the answer may not end."""


def no_changes(slots: int, vocabulary: int) -> LogitChanges:
    """Return the state without any request. Traceable."""
    shape = (slots, vocabulary)
    return LogitChanges(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros((slots, 4), jnp.float32))


def changes_of(
    sampling: Sampling, prompt: Sequence[int], answer: Sequence[int], ends: Collection[int], vocabulary: int
) -> LogitChanges:
    """Return a request's row of the state, without its first dim: NumPy arrays.

    Args:
      sampling: its settings.
      prompt: its prompt.
      answer: what it has generated before this step.
      ends: ids that end the answer.
      vocabulary: V.
    """
    counts = np.bincount(np.array(answer, np.int64), minlength=vocabulary).astype(np.int32)
    counts[np.unique(np.array(prompt, np.int64))] += _IN_PROMPT
    counts[[token for token in ends if token < vocabulary]] += _ENDS
    bias = np.zeros(vocabulary, np.float32)
    for token, value in (sampling.logit_bias or {}).items():
        bias[token] = value
    # So that products with finite logits are finite.
    repetition = min(max(sampling.repetition_penalty, 1e-6), 1e6)
    settings = (sampling.presence_penalty, sampling.frequency_penalty, repetition, sampling.min_tokens)
    return LogitChanges(counts, bias, np.array(settings, np.float32))  # pyright: ignore[reportArgumentType]


def put_changes(state: LogitChanges, slot: Int[Array, ""], row: LogitChanges) -> LogitChanges:
    """Return the state with a request's row, from `changes_of`, in a slot."""
    return jax.tree.map(lambda x, y: x.at[slot].set(y), state, row)


def change_logits(
    logits: Float[Array, "R V"], rows: Int[Array, "R columns"], state: LogitChanges
) -> Float[Array, "R V"]:
    """Return the logits of a step as its requests change them; those of other requests stay as they are.

    A token that ends an answer before its minimum length is forbidden, unless all others are: those with a logit of
    -inf, such as tokens that a constraint does not allow.
    """
    slots = rows[:, Column.SLOT]
    counts = state.counts[slots]
    presence, frequency, repetition, least = (x[:, None] for x in state.settings[slots].T)
    often = counts & (_IN_PROMPT - 1)
    seen = (counts & (_ENDS - 1)) > 0
    x = logits + state.bias[slots]
    early = (counts >= _ENDS) & (rows[:, Column.INDEX, None] < least)
    goes_on = jnp.any(~early & (x > -jnp.inf), -1, keepdims=True)
    x = jnp.where(early & goes_on, -jnp.inf, x)
    x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * often - presence * (often > 0)
    return jnp.where(rows[:, Column.CHANGED, None] > 0, x, logits)


def count_tokens(state: LogitChanges, rows: Int[Array, "R columns"], tokens: Int[Array, " R"]) -> LogitChanges:
    """Return the state after a step whose rows got these tokens; rows that store none are left out."""
    return state._replace(counts=state.counts.at[rows[:, Column.STORE], tokens].add(1, mode="drop"))
