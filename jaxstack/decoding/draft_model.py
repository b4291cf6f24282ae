"""Speculative decoding with a draft model: a small model proposes tokens, which the served model verifies in one step.

Sampled tokens have the distribution of the model alone (Leviathan et al. 2022, arXiv:2211.17192), greedy ones are the
same tokens. The draft model keeps its keys and values in separate pages, under the page numbers of the model.

Drafts may be guessed by layers that run together (EasySpec, Wu et al. 2025, arXiv:2502.02493): a few attention
sublayers of the draft model read the same input. Their keys and values are approximations, so that the next step first
runs the tokens that were accepted through the draft model as it is.

Dims: R rows, D tokens per row (the newest and its drafts, at the row's end), Q chunks, C their width, V vocabulary.
"""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxstack.decoding.cache_room import copy_row, make_cache, row_axes
from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.decoding.draft_steps import DraftLoop, Drafts, NewestTokens, count_accepted
from jaxstack.decoding.logit_changes import LogitChanges, change_logits, count_tokens
from jaxstack.decoding.rows import (
    Column,
    Pages,
    RecentTokens,
    decode_rows,
    pack_rows,
    page_counts,
    rows_at_step,
    sampling_of,
)
from jaxstack.decoding.sampling import Mode, RowSampling, apply_bitmask, probabilities, sample_rows, uniform
from jaxstack.decoding.scores import pack_scores
from jaxstack.decoding.step import Programs, limit_vocabulary
from jaxstack.errors import ConfigError
from jaxstack.models.layer import CacheRoom
from jaxstack.parallel.sharding_context import logical_axis_rules

_GUESS = 1 << 29
_ACCEPT = 1 << 30
"""Added to a token's number, so that drafting and accepting it use different random numbers."""


Guesses = tuple[Int[Array, "R D"], Float[Array, "R D V"], Pages]
"""Newest token and drafts of each row, the draft model's logits after each, and its pages."""


class DraftPrograms:
    """KV cache of a draft model on the device, and the compiled programs that propose and verify tokens.

    Args:
      target: programs of the model whose tokens are guessed.
      model: the draft model, on the same mesh, with the same tokenizer.
      width: D.
      together: number of layers that run together while guessing; 1: the draft model is run exactly.
      most: largest number of steps of a program.

    Raises:
      ConfigError: layers that run together are stacked, or read more than the residual stream.
    """

    def __init__(self, target: Programs, model: ModelOnMesh, width: int, together: int = 1, most: int = 1):
        if together > 1 and model.config.scan_layers and model.config.num_layers > 1:
            raise ConfigError("engine.draft_layers_together needs a draft model with model.scan_layers=false.")
        if together > 1:
            model.config.check_independent_layers("engine.draft_layers_together", "leave it out")
        self.target = target
        self.model = model
        self.width = width
        self.together = together
        whole = model.rules.sharding(jax.P())
        options = model.compiler_options
        jit = target.compiler.jit
        make = partial(self._make_pages, room=target.room)
        with jax.set_mesh(model.rules.mesh):
            self._pages = jax.jit(make)(model.params, model.non_params)
        layout = jax.tree.map(lambda x: x.sharding, self._pages)

        def shapes(room: CacheRoom) -> Pages:
            return jax.eval_shape(partial(self._make_pages, room=room), model.params, model.non_params)

        self._axes = row_axes(shapes, target.room)
        self._copy = jit(partial(copy_row, self._axes), donate_argnames="pages", out_shardings=layout)
        self._guess = jit(
            self._propose, donate_argnames="pages", out_shardings=(whole, whole, layout), compiler_options=options
        )
        many = model.options(many=True)
        self._fill = jit(self._fill_step, donate_argnames="pages", out_shardings=layout, compiler_options=many)
        self._verify = jit(self._verify_step, donate_argnames="changes", out_shardings=(whole, whole))
        self._loop = DraftLoop(target, self, width=width, most=most, layout=layout)

    @contextlib.contextmanager
    def starting(self) -> Iterator[list[Future[jax.stages.Compiled]]]:
        """Compile in threads the programs that are called in this `with` block; see `Programs.starting`."""
        pages = self._pages
        try:
            with self.target.starting() as started:
                yield started
        finally:
            self._pages = pages

    def run(
        self,
        rows: Int[np.ndarray, "R columns"],
        newest: Int[np.ndarray, " R"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
        mode: Mode,
        mask: Int[np.ndarray, "all words"] | None = None,
        recent: RecentTokens | None = None,
        *,
        extended: bool = False,
    ) -> Int[Array, "found ..."]:
        """Dispatch one step of drafting, verifying and sampling asynchronously; return samples and accepted counts.

        Args:
          rows: from `RowTable.describe`, of decoded rows; COUNT is the number of drafts and 1.
          newest: newest token of each decoded row.
          chunks, tokens, mode, mask: as in `Programs.run`, with D samples for each decoded row.
          recent: tokens of each decoded row that one of the models runs again, the newest included.
          extended: as in `Programs.run`; accepted counts are in the first column. Rows with CHANGED set have no drafts.

        Returns:
          D samples of each decoded row, the sample of each chunk, and the number of accepted drafts of each row.
        """
        model = self.model
        number = np.int32(get_args(Mode).index(mode))
        again = recent if self.approximate else None
        with jax.set_mesh(model.rules.mesh):
            drafted, guessed, self._pages = self._guess(
                model.params, model.non_params, rows, newest, again, number, pages=self._pages
            )
            logits = self._forward(rows, chunks, tokens, drafted, recent if self.target.replays else None)
            settings = [None if part is None else part[:, : Column.PAGES] for part in (rows, chunks)]
            changes = self.target.take_changes() if extended else None
            found, changes = self._verify(logits, drafted, guessed, *settings, mask, number, changes=changes)
            self.target.changes = changes or self.target.changes
            return found

    def run_steps(
        self,
        rows: Int[np.ndarray, "R columns"],
        newest: Int[np.ndarray, " R"],
        recent: RecentTokens | None,
        steps: int,
        mode: Mode,
    ) -> Int[Array, "most R found"]:
        """Dispatch several steps as one program, see `DraftLoop.run`."""
        params = self.model.params, self.model.non_params
        found, self._pages = self._loop.run(rows, newest, recent, params, self._pages, steps=steps, mode=mode)
        return found

    def guess(self, params: PyTree, rows: NewestTokens, mode: Int[Array, ""], state: Pages) -> tuple[Drafts, Pages]:
        """Return the draft model's tokens after each newest one, and its pages; see `Drafter`."""
        weights, rest = params
        recent = rows.recent if self.approximate else None
        # Unrolled, as a loop within the loop of steps in a CUDA graph was not tried.
        tokens, logits, pages = self._propose(weights, rest, rows.rows, rows.newest, recent, mode, state, unroll=True)
        return Drafts(tokens, rows.rows[:, Column.COUNT], logits), pages

    def verify(
        self, logits: Float[Array, "R D V"], drafts: Drafts, sampling: RowSampling, mode: Mode
    ) -> tuple[Int[Array, "R D"], Int[Array, " R"]]:
        """Accept or reject drafts by the served model's logits; see `accept_drafts`."""
        assert drafts.logits is not None
        return accept_drafts(logits, drafts.logits, drafts.tokens, drafts.counts, sampling, mode)

    def extend(
        self,
        state: Pages,
        rows: Int[Array, "R columns"],
        hidden: Float[Array, "R D M"],
        tokens: Int[Array, "R D"],
        given: Int[Array, " R"],
    ) -> Pages:
        """Return the pages, which have the accepted drafts already; see `Drafter`."""
        return state

    def fill(
        self,
        rows: Int[np.ndarray, "R columns"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
    ) -> None:
        """Dispatch the computation of what the drafts' cache keeps of chunks of prompts.

        Args:
          rows, chunks, tokens: as in `run`, of the newest step of the served model.
        """
        model = self.model
        with jax.set_mesh(model.rules.mesh):
            self._pages = self._fill(model.params, model.non_params, chunks, tokens, pages=self._pages)

    def catch_up(self, chunks: Int[np.ndarray, "Q columns"], tokens: Int[np.ndarray, "Q C"]) -> None:
        """Dispatch the computation of what the drafts' cache lacks of chunks of tokens that the served model has run.

        Args:
          chunks, tokens: as in `run`.
        """
        self.fill(self.target.table.describe([], self.target.slots), chunks, tokens)

    @property
    def catches_up(self) -> bool:
        """True if `catch_up` can be called."""
        return True

    @property
    def fills_prompts(self) -> bool:
        """True if prompts are to be computed in their order with the served model's, though their step has no drafts.

        Otherwise `catch_up` does it before the first guess. Snapshots of states are of one place in both models.
        """
        return self._has_states

    @property
    def approximate(self) -> bool:
        """True if the cache holds approximations of accepted drafts, or none of them, which the next step computes."""
        return self.together > 1 or self._has_states

    @property
    def _has_states(self) -> bool:
        return any(axis >= 0 for axis in jax.tree.leaves(self._axes))

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Dispatch copies of rows of the caches of fixed size of both models, as `Programs.copy_states` does."""
        self.target.copy_states(copies)
        with jax.set_mesh(self.model.rules.mesh):
            for source, target in copies:
                self._pages = self._copy(np.int32(source), np.int32(target), pages=self._pages)

    def _make_pages(self, params: PyTree, non_params: PyTree, room: CacheRoom) -> Pages:
        """Return the empty cache of the draft model."""
        return make_cache(self.model, params, non_params, room)

    def _forward(
        self,
        rows: Int[np.ndarray, "R columns"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
        drafted: Int[Array, "R D"],
        recent: RecentTokens | None,
    ) -> Float[Array, "all V"]:
        """Dispatch the served model's forward pass, and that of the draft model on prompts; return the logits."""
        if chunks is not None and tokens is not None:
            self.fill(rows, chunks, tokens)
        return self.target.forward(rows, chunks, tokens, drafted, recent)

    def _decode(
        self,
        params: PyTree,
        non_params: PyTree,
        rows: Int[Array, "R columns"],
        tokens: Int[Array, "R C"],
        pages: Pages,
        *,
        exact: bool,
    ) -> tuple[Float[Array, "R V"], Pages]:
        """Run the draft model on tokens, exactly or on its own approximations; return its logits and pages."""
        model = self.model.module.merge(params, non_params)
        return decode_rows(model, rows, tokens, pages, together=1 if exact else self.together)

    def _propose(
        self,
        params: PyTree,
        non_params: PyTree,
        rows: Int[Array, "R columns"],
        newest: Int[Array, " R"],
        recent: RecentTokens | None,
        mode: Int[Array, ""],
        pages: Pages,
        *,
        unroll: bool = False,
    ) -> Guesses:
        """Propose draft tokens for each sequence; return them with the draft model's logits and KV-cache pages."""
        lines = jnp.arange(len(rows))
        first = self.width - rows[:, Column.COUNT]
        vocabulary = self.target.model.config.vocab_size or 0

        def sample(logits: jax.Array, now: jax.Array, mode: Mode) -> jax.Array:
            settings = sampling_of(now)
            return sample_rows(logits, settings._replace(number=settings.number + _GUESS), mode)

        def keep(step: jax.Array, logits: jax.Array, pages: Pages, drafted: jax.Array, guessed: jax.Array) -> Guesses:
            column = first + step
            logits = limit_vocabulary(_resize(logits, vocabulary), self.target.vocab_size)
            branches = [partial(sample, mode=name) for name in get_args(Mode)]
            tokens = jax.lax.switch(mode, branches, logits, rows_at_step(rows, step))
            guessed = guessed.at[lines, column].set(logits, mode="drop")
            return drafted.at[lines, column + 1].set(tokens, mode="drop"), guessed, pages

        def advance(step: jax.Array, carry: Guesses) -> Guesses:
            drafted, guessed, pages = carry
            column = jnp.minimum(first + step, self.width - 1)
            now = rows_at_step(rows, step), drafted[lines, column][:, None]
            logits, pages = self._decode(params, non_params, *now, pages, exact=False)
            return keep(step, logits, pages, drafted, guessed)

        drafted = jnp.zeros((len(rows), self.width), jnp.int32).at[lines, first].set(newest, mode="drop")
        guessed = jnp.zeros((*drafted.shape, vocabulary), jnp.float32)
        with logical_axis_rules(self.model.rules, self.model.layout):
            # The number of iterations is a constant, so that the host need not read a condition after each of them.
            if recent is None:  # the last draft is run too, for its keys and values
                return jax.lax.fori_loop(0, self.width, advance, (drafted, guessed, pages), unroll=unroll)
            logits, pages = self._decode(params, non_params, *recent.group(rows), pages, exact=True)
            made = keep(jnp.int32(0), logits, pages, drafted, guessed)
            drafted, guessed, after = jax.lax.fori_loop(1, self.width - 1, advance, made, unroll=unroll)
            # Drafts stay in pages, where others can replace them, but not in states.
            return drafted, guessed, jax.tree.map(lambda i, x, y: x if i >= 0 else y, self._axes, pages, after)

    def _fill_step(
        self,
        params: PyTree,
        non_params: PyTree,
        chunks: Int[Array, "Q columns"],
        tokens: Int[Array, "Q C"],
        pages: Pages,
    ) -> Pages:
        """Write keys and values of chunks of prompts into the draft model's KV-cache pages; return the pages."""
        ids, positions, slots = pack_rows([(chunks, tokens)], *page_counts(pages))
        with logical_axis_rules(self.model.rules, self.model.layout):
            model = self.model.module.merge(params, non_params)
            return model.decode_packed(ids, positions, slots, pages)[1]

    def _verify_step(
        self,
        logits: Float[Array, "all V"],
        drafted: Int[Array, "R D"],
        guessed: Float[Array, "R D V"],
        rows: Int[Array, "R columns"],
        chunks: Int[Array, "Q columns"] | None,
        mask: Int[Array, "all words"] | None,
        mode: Int[Array, ""],
        changes: LogitChanges | None,
    ) -> tuple[Int[Array, "found ..."], LogitChanges | None]:
        """Accept or reject draft tokens by the served model's logits.

        Returns:
          Sampled tokens and accepted counts, and the state of changes.
        """
        unlimited = logits = limit_vocabulary(logits, self.target.vocab_size)
        each = jnp.repeat(rows, self.width, axis=0)
        last = jnp.arange(len(each)) % self.width == self.width - 1
        each = each.at[:, Column.STORE].set(jnp.where(last, each[:, Column.STORE], self.target.slots))
        each = each if chunks is None else jnp.concatenate([each, chunks])
        if mask is not None:
            logits = apply_bitmask(logits, mask)
        if changes is not None:
            logits = change_logits(logits, each, changes)
        count = drafted.size

        def verify(logits: jax.Array, guessed: jax.Array, mode: Mode) -> jax.Array:
            samples, accepted = accept_drafts(
                logits[:count].reshape(guessed.shape), guessed, drafted, rows[:, Column.COUNT], sampling_of(rows), mode
            )
            ends = [] if chunks is None else [sample_rows(logits[count:], sampling_of(chunks), mode)]
            return jnp.concatenate([samples.ravel(), *ends, accepted])

        found = jax.lax.switch(mode, [partial(verify, mode=name) for name in get_args(Mode)], logits, guessed)
        tokens = found[: len(logits)]
        if changes is not None:
            changes = count_tokens(changes, each, tokens)
            scores = pack_scores(unlimited, tokens)
            found = jnp.pad(found[:, None], ((0, 0), (0, scores.shape[1] - 1))).at[: len(logits)].set(scores)
        return found, changes


def accept_drafts(
    logits: Float[Array, "R D V"],
    guessed: Float[Array, "R D V"],
    drafted: Int[Array, "R D"],
    counts: Int[Array, " R"],
    sampling: RowSampling,
    mode: Mode,
) -> tuple[Int[Array, "R D"], Int[Array, " R"]]:
    """Verify draft tokens by rejection sampling; return the token after each, and each row's number of accepted drafts.

    Outputs follow the served model's distribution p exactly. A draft x of the distribution q is accepted with
    probability min(1, p(x) / q(x)); after the first one that is not, the token is sampled from max(0, p - q),
    normalized.

    Args:
      logits: of the model, after each token.
      guessed: of the draft model, after each token.
      drafted: newest token and drafts, at the end of each row.
      counts: number of these tokens, 0 for a row of padding.
      sampling: settings of each row; `number` is that of the token after the newest one.
      mode: how tokens are sampled.

    Returns:
      The next token after each token, valid up to and including the first that is not an accepted draft; and the
      number of accepted drafts.
    """
    lines, width, vocabulary = logits.shape
    offset = jnp.arange(width) - (width - counts[:, None])
    draft = jnp.roll(drafted, -1, axis=1)
    is_draft = (offset >= 0) & (jnp.arange(width) < width - 1)
    if mode == "greedy":  # all probabilities are 0 or 1, so that no random number is needed
        likeliest = jnp.argmax(logits, -1).astype(jnp.int32)
        accepted = is_draft & (draft == likeliest)
        return likeliest, count_accepted(accepted, counts)
    each = RowSampling(*(jnp.repeat(x, width) for x in sampling))
    each = each._replace(number=each.number + jnp.maximum(offset, 0).ravel())
    p, q = (probabilities(x.reshape(-1, vocabulary), each, mode) for x in (logits, guessed))

    def take(x):
        return jnp.take_along_axis(x, draft.reshape(-1, 1), axis=1)[:, 0]

    chance = uniform(each._replace(number=each.number + _ACCEPT))
    accepted: Bool[Array, "R D"] = is_draft & (chance * take(q) < take(p)).reshape(lines, width)
    left = jnp.where(is_draft.reshape(-1, 1), jnp.maximum(p - q, 0), p)
    left = jnp.where(left.sum(-1, keepdims=True) > 0, left, p)  # p = q up to rounding
    likely = each._replace(temperature=jnp.ones_like(each.temperature))
    replacement = sample_rows(jnp.log(left), likely, "free").reshape(lines, width)
    return jnp.where(accepted, draft, replacement), count_accepted(accepted, counts)


def _resize(logits: Float[Array, "R W"], vocabulary: int) -> Float[Array, "R V"]:
    """Cut or pad the draft model's logits to the served model's vocabulary size, with -inf at ids that it lacks."""
    lacking = max(0, vocabulary - logits.shape[1])
    return jnp.pad(logits[:, :vocabulary], ((0, 0), (0, lacking)), constant_values=-jnp.inf)
