"""N-gram drafts between the steps of one program, where the device looks them up in the texts so far.

The rule is that of `NGramDrafter`.

Dims: R rows, D tokens per row (the newest and its drafts, at the row's end), V vocabulary, L tokens of a text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxstack.decoding.draft_steps import DraftLoop, Drafts, NewestTokens, count_accepted, move_to_end
from jaxstack.decoding.ngram_draft import LENGTHS, LONGEST_TEXT
from jaxstack.decoding.requests import Request
from jaxstack.decoding.rows import Column, RecentTokens, newest_tokens
from jaxstack.decoding.sampling import Mode, RowSampling, sample_rows
from jaxstack.decoding.schedule import Row
from jaxstack.decoding.step import Programs


class NGramText(NamedTuple):
    """Newest tokens of each row's text, in which its last n-gram is looked up."""

    tokens: Int[Array, "R L"]
    counts: Int[Array, " R"]
    """Number of tokens of the text; the others are room for tokens to come."""


class NGramSteps:
    """Steps with drafts that are looked up in the text so far, by programs of several steps.

    Args:
      target: programs of the model whose tokens are guessed.
      width: D.
      most: largest number of steps of a program.
    """

    def __init__(self, target: Programs, width: int, most: int):
        self._width = width
        self._most = most
        self._texts = np.zeros((target.slots, target.room.length), np.int32)
        self._owners = [0] * target.slots
        """Number of the request whose text is in each slot's row."""
        self._counts = [0] * target.slots
        self._whole = target.model.rules.sharding(jax.P())
        self._loop = DraftLoop(target, self, width=width, most=most, layout=self._whole)

    def run(
        self,
        rows: Sequence[Row],
        described: Int[np.ndarray, "R columns"],
        recent: RecentTokens | None,
        steps: int,
        mode: Mode,
    ) -> Int[Array, "most R found"]:
        """Dispatch a program of steps; return what they found, as `DraftLoop.run` does.

        Args:
          rows: the decoded rows.
          described: from `RowTable.describe`, of these and padding.
          recent, steps, mode: as in `DraftLoop.run`.
        """
        text = NGramText._make(self._text_of(rows, len(described)))
        newest = newest_tokens(rows, len(described))
        return self._loop.run(described, newest, recent, (), text, steps=steps, mode=mode)[0]

    def _text_of(self, rows: Sequence[Row], count: int) -> tuple[Int[np.ndarray, "R L"], Int[np.ndarray, " R"]]:
        """Return the newest tokens of each row, with room for those of a program, and their number."""
        longest = min(self._texts.shape[1], LONGEST_TEXT)
        tokens = np.zeros((count, longest + self._most * self._width), np.int32)
        counts = np.zeros(count, np.int32)
        for number, row in enumerate(rows):
            known = self._know(row.request)
            newest = known[-longest:]
            tokens[number, : len(newest)] = newest
            counts[number] = len(newest)
        return tokens, counts

    def _know(self, request: Request) -> Int[np.ndarray, " L"]:
        """Return the text of a request as an array, of which only new tokens are copied."""
        slot = request.slot
        assert slot is not None
        if self._owners[slot] != request.number:
            self._owners[slot] = request.number
            self._counts[slot] = 0
        before = self._counts[slot]
        self._counts[slot] = len(request.tokens)
        self._texts[slot, before : len(request.tokens)] = request.tokens[before:]
        return self._texts[slot, : len(request.tokens)]

    def guess(
        self, params: PyTree, rows: NewestTokens, mode: Int[Array, ""], state: NGramText
    ) -> tuple[Drafts, NGramText]:
        """Return tokens that followed each text's last n-gram earlier in it; see `Drafter`."""
        guessed, found = guess_by_ngram(state, self._width - 1)
        counts = jnp.minimum(rows.rows[:, Column.COUNT], 1 + found)
        line = jnp.concatenate([rows.newest[:, None], guessed], axis=1)
        return Drafts(move_to_end(line, counts), counts, None), state

    def verify(
        self, logits: Float[Array, "R D V"], drafts: Drafts, sampling: RowSampling, mode: Mode
    ) -> tuple[Int[Array, "R D"], Int[Array, " R"]]:
        """Sample after each token with the random numbers of that place; drafts that equal the samples are accepted."""
        offset = jnp.arange(self._width) - (self._width - drafts.counts[:, None])
        each = RowSampling(*(jnp.repeat(x, self._width) for x in sampling))
        each = each._replace(number=each.number + jnp.maximum(offset, 0).ravel())
        samples = sample_rows(logits.reshape(-1, logits.shape[-1]), each, mode).reshape(offset.shape)
        return samples, count_accepted(samples == jnp.roll(drafts.tokens, -1, axis=1), drafts.counts)

    def extend(
        self,
        state: NGramText,
        rows: Int[Array, "R columns"],
        hidden: Float[Array, "R D M"],
        tokens: Int[Array, "R D"],
        given: Int[Array, " R"],
    ) -> NGramText:
        """Append the first `given` of these tokens to each text; see `Drafter`."""
        number = jnp.arange(tokens.shape[1])
        places = jnp.where(number < given[:, None], state.counts[:, None] + number, state.tokens.shape[1])
        lines = jnp.arange(len(tokens))[:, None]
        return NGramText(state.tokens.at[lines, places].set(tokens, mode="drop"), state.counts + given)


def guess_by_ngram(text: NGramText, count: int) -> tuple[Int[Array, "R count"], Int[Array, " R"]]:
    """Guess up to `count` next tokens of each text as `NGramDrafter.guess` does. Traceable.

    Returns:
      Draft tokens of each text, and how many of them there are.
    """
    tokens, known = text
    size = tokens.shape[1]
    place = jnp.zeros_like(known)
    for length in sorted(LENGTHS):  # the longest n-gram that is found decides
        ends = jnp.arange(length, size)
        last = jnp.take_along_axis(tokens, jnp.maximum(known[:, None] + jnp.arange(-length, 0), 0), axis=1)
        found = ends < known[:, None]
        for number in range(length):
            found &= tokens[:, number : size - length + number] == last[:, number, None]
        newest = jnp.where(found, ends, 0).max(axis=1)
        place = jnp.where(newest > 0, newest, place)
    guessed = jnp.take_along_axis(tokens, jnp.minimum(place[:, None] + jnp.arange(count), size - 1), axis=1)
    return guessed, jnp.where(place > 0, jnp.minimum(count, known - place), 0)
