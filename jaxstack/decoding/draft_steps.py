"""Several steps of speculative decoding as one program: guesses, verification and the next step stay on the device.

A step with drafts gives a row one to D tokens, and which ones the host would have to read before it could plan the next
step. Here the device goes on by itself: after each step the accepted tokens move a row's position, and the next guesses
follow them. The host reads what all steps of a program accepted.

Dims: R rows, D tokens per row (the newest and its drafts, at the row's end), V vocabulary.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxstack.decoding.rows import Column, Pages, RecentTokens, run_drafted, sampled_logits, sampling_of
from jaxstack.decoding.sampling import Mode, RowSampling
from jaxstack.decoding.step import Programs, StepVariant, limit_vocabulary
from jaxstack.parallel.sharding_context import logical_axis_rules


class Drafts(NamedTuple):
    """Guesses of the next tokens of each row of a step."""

    tokens: Int[Array, "R D"]
    """The newest token and its drafts, at the end of each row."""
    counts: Int[Array, " R"]
    """Number of these tokens; 0 for a row without a step."""
    logits: Float[Array, "R D V"] | None
    """Logits that each draft was sampled from, at the token before it; None: drafts are no samples."""


class NewestTokens(NamedTuple):
    """Rows of a step before their drafts are guessed."""

    rows: Int[Array, "R columns"]
    newest: Int[Array, " R"]
    recent: RecentTokens | None
    """Tokens that the last step gave each row, which a model runs again; None: no model does."""


class Drafter(Protocol):
    """Interface of a method that guesses next tokens, such as a draft model, for programs of several steps.

    All methods are traceable. The state that they pass on, such as a cache, is an argument and a result of the program.
    """

    def guess(self, params: PyTree, rows: NewestTokens, mode: Int[Array, ""], state: Any) -> tuple[Drafts, Any]:
        """Return drafts of each row, at most COUNT tokens with the newest one, and the state after guessing.

        Args:
          params: what it computes with, which no step changes.
          rows: the rows, which start at their newest token.
          mode: number of the way of sampling among `Mode`.
          state: from the step before.
        """
        ...

    def verify(
        self, logits: Float[Array, "R D V"], drafts: Drafts, sampling: RowSampling, mode: Mode
    ) -> tuple[Int[Array, "R D"], Int[Array, " R"]]:
        """Return the next token after each token, and each row's number of accepted drafts; see `accept_drafts`."""
        ...

    def extend(
        self,
        state: Any,
        rows: Int[Array, "R columns"],
        hidden: Float[Array, "R D M"],
        tokens: Int[Array, "R D"],
        given: Int[Array, " R"],
    ) -> Any:
        """Return the state after each row got the first `given` of these tokens.

        Args:
          state: after guessing.
          rows: descriptions of the rows; COUNT is that of the drafts and the token before them.
          hidden: final hidden states of the served model, of these COUNT tokens at each row's end.
          tokens, given: tokens of each row, and how many of them are its own.
        """
        ...


class DraftLoop:
    """The compiled programs of several steps with drafts.

    Args:
      target: programs of the model whose tokens are guessed.
      drafter: what guesses them.
      width: D.
      most: largest number of steps of a program.
      layout: shardings of the drafter's state.
    """

    def __init__(self, target: Programs, drafter: Drafter, *, width: int, most: int, layout: PyTree):
        self._target = target
        self._drafter = drafter
        self._width = width
        self._most = most
        whole = target.model.rules.sharding(jax.P())
        self._program = functools.cache(partial(self._make_program, (whole, layout, target.page_layout)))

    def _make_program(self, shardings: tuple[Any, ...], variant: StepVariant) -> Callable[..., Any]:
        return self._target.jit_loop(
            partial(self._steps, variant=variant),
            variant,
            donate_argnames=("pages", "state"),
            out_shardings=shardings,
        )

    def run(
        self,
        rows: Int[np.ndarray, "R columns"],
        newest: Int[np.ndarray, " R"],
        recent: RecentTokens | None,
        params: PyTree,
        state: PyTree,
        *,
        steps: int,
        mode: Mode,
    ) -> tuple[Int[Array, "most R found"], PyTree]:
        """Dispatch several steps as one program, asynchronously; return what they found and the drafter's new state.

        Args:
          rows: from `RowTable.describe`; COUNT is the largest number of tokens that all steps give a row.
          newest: newest token of each row.
          recent: tokens of each row that a model runs again, the newest included; None: no model does.
          params, state: of the drafter.
          steps: largest number of steps; none runs after the last row has its COUNT tokens.
          mode: how tokens are sampled.

        Returns:
          For each step and row: D tokens, how many of them are the row's, the first ones, and how many were guessed.
          Zeros of steps that did not run.
        """
        replayed = recent if self._target.replays else None
        variant = self._target.loop_variant(rows, len(rows) * self._width, replayed)
        return self._target.run_on_pages(
            self._program(variant),
            params,
            (rows, newest, recent),
            state=state,
            steps=np.int32(steps),
            mode=np.int32(get_args(Mode).index(mode)),
        )

    def _steps(
        self,
        target_params: PyTree,
        target_rest: PyTree,
        params: PyTree,
        first: tuple[Int[Array, "R columns"], Int[Array, " R"], RecentTokens | None],
        *,
        pages: Pages,
        state: PyTree,
        steps: Int[Array, ""],
        mode: Int[Array, ""],
        variant: StepVariant,
    ) -> tuple[Int[Array, "most R found"], PyTree, Pages]:
        """Run the steps; arguments as of `run`, results as of a program of `Programs.run_on_pages`."""
        target = self._target
        width = self._width
        rows, *before = first

        def goes_on(carry: tuple[Any, ...]) -> jax.Array:
            step, left, *_ = carry
            return (step < steps) & left

        def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            step, _, newest, recent, before, found, pages, state = carry
            now = rows.at[:, Column.START].add(before).at[:, Column.INDEX].add(before)
            now = now.at[:, Column.COUNT].set(jnp.minimum(rows[:, Column.COUNT] - before, width))
            runs = now[:, Column.COUNT] > 0
            recent = None if recent is None else recent._replace(counts=jnp.where(runs, recent.counts, 0))
            drafts, state = self._drafter.guess(params, NewestTokens(now, newest, recent), mode, state)
            now = now.at[:, Column.COUNT].set(drafts.counts)
            model = target.merge_for(target_params, target_rest, adapted=variant.adapted)
            again = recent if target.replays else None
            hidden, pages = run_drafted(model, now, drafts.tokens, again, None, pages, halves=variant.halves)
            logits = limit_vocabulary(sampled_logits(model, hidden), target.vocab_size)
            logits = logits.reshape(*drafts.tokens.shape, -1)
            ways = [partial(self._drafter.verify, mode=name) for name in get_args(Mode)]
            samples, accepted = jax.lax.switch(mode, ways, logits, drafts, sampling_of(now))
            given = jnp.where(runs, accepted + 1, 0)
            tokens = _move_to_start(samples, drafts.counts)
            newest = jnp.where(runs, jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0], newest)
            recent = None if recent is None else RecentTokens(move_to_end(tokens, given), given)
            guessed = jnp.maximum(drafts.counts - 1, 0)
            found = found.at[step].set(jnp.column_stack([tokens, given, guessed]))
            state = self._drafter.extend(state, now, hidden[0], tokens, given)
            after = before + given
            left = jnp.any(after < rows[:, Column.COUNT])
            return step + 1, left, newest, recent, after, found, pages, state

        with logical_axis_rules(target.model.rules, target.model.layout):
            found = jnp.zeros((self._most, len(rows), width + 2), jnp.int32)
            left = jnp.any(rows[:, Column.COUNT] > 0)
            carry = jnp.int32(0), left, *before, jnp.zeros(len(rows), jnp.int32), found, pages, state
            *_, found, pages, state = jax.lax.while_loop(goes_on, advance, carry)
        return found, state, pages


def count_accepted(accepted: Bool[Array, "R D"], counts: Int[Array, " R"]) -> Int[Array, " R"]:
    """Return the number of accepted drafts of each row before its first rejected one.

    Args:
      accepted: whether the token after each token is a draft that is accepted.
      counts: number of tokens of each row, at its end; 0 for a row of padding.
    """
    width = accepted.shape[1]
    offset = jnp.arange(width) - (width - counts[:, None])
    is_draft = (offset >= 0) & (jnp.arange(width) < width - 1)
    before = jnp.cumprod(jnp.where(offset >= 0, accepted, True), axis=1)
    return (before * is_draft).sum(1)


def _move_to_start(tokens: Int[Array, "R D"], counts: Int[Array, " R"]) -> Int[Array, "R D"]:
    """Move the last `counts` tokens of each row to its start."""
    places = jnp.arange(tokens.shape[1]) + (tokens.shape[1] - counts[:, None])
    return jnp.take_along_axis(tokens, jnp.minimum(places, tokens.shape[1] - 1), axis=1)


def move_to_end(tokens: Int[Array, "R D"], counts: Int[Array, " R"]) -> Int[Array, "R D"]:
    """Move the first `counts` tokens of each row to its end."""
    places = jnp.arange(tokens.shape[1]) - (tokens.shape[1] - counts[:, None])
    return jnp.take_along_axis(tokens, jnp.maximum(places, 0), axis=1)
