"""Speculative decoding in which the served model drafts: its first layer for multi-token prediction proposes tokens.

The layer reads the model's hidden state of a token and the embedding of the token after it, and guesses the one after
that (DeepSeek-V3, arXiv:2412.19437, section 2.2). Further tokens are guessed by the same layer from its own output and
its last guess; the keys and values of these are approximations, which the next step replaces. Verification is that of a
draft model, so that the text has the distribution of the model alone.

Dims: S slots, R rows, D tokens per row (the newest and its drafts), Q chunks, C their width, M model, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxstack.decoding.cache_room import cache_bytes
from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.decoding.draft_model import DraftPrograms
from jaxstack.decoding.rows import Column, Pages, RecentTokens, pack_rows, page_counts
from jaxstack.decoding.step import Programs
from jaxstack.models.layer import CacheRoom, LayerCache
from jaxstack.models.transformer import Transformer
from jaxstack.parallel.sharding_context import logical_axis_rules


class DraftState(NamedTuple):
    """Cache of the prediction layer, and the hidden states of each slot from which it goes on.

    The layer's keys and values for a hidden state and the token after it have the place of the hidden state.
    """

    cache: LayerCache
    states: Float[Array, "S D M"]
    """The model's hidden states of the last tokens that it has run."""
    starts: Int[Array, " S"]
    """Position of the first of these tokens."""
    guessed: Float[Array, "S M"]
    """The layer's output after its last guess."""


class PredictionPrograms(DraftPrograms):
    """The compiled programs that propose tokens by the model's prediction layer, and verify them.

    Args:
      target: programs of the model, which has layers for multi-token prediction.
      width: D.
      most: largest number of steps of a program.
    """

    def __init__(self, target: Programs, width: int, most: int):
        target.keeps_states = True
        super().__init__(target, target.model, width, most=most)

    @property
    def approximate(self) -> bool:
        return True

    @property
    def catches_up(self) -> bool:
        return not self.target.replays

    @property
    def fills_prompts(self) -> bool:
        """True: the hidden states that the layer reads are there only once; to catch up, the model runs again."""
        return True

    def fill(
        self,
        rows: Int[np.ndarray, "R columns"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
    ) -> None:
        model = self.model
        states = self.target.states
        with jax.set_mesh(model.rules.mesh):
            self._pages = self._fill(model.params, model.non_params, states, rows, chunks, tokens, pages=self._pages)

    def catch_up(self, chunks: Int[np.ndarray, "Q columns"], tokens: Int[np.ndarray, "Q C"]) -> None:
        """Run the model on the tokens again, for its hidden states, and then the prediction layer.

        Keeping the hidden states of steps without drafts, or running the layer in them, would slow down all of these.
        The model's keys and values are replaced by equal ones; states, which only move forward, cannot be.
        """
        rows = self.target.table.describe([], self.target.slots)
        with jax.set_mesh(self.model.rules.mesh):
            self.target.forward(rows, chunks, tokens, None)
        self.fill(rows, chunks, tokens)

    def extend(
        self,
        state: DraftState,
        rows: Int[Array, "R columns"],
        hidden: Float[Array, "R D M"],
        tokens: Int[Array, "R D"],
        given: Int[Array, " R"],
    ) -> DraftState:
        """Keep the hidden states of the newest token and its drafts; see `Drafter`."""
        return _keep(state, rows, hidden, rows[:, Column.COUNT])

    def _make_pages(self, params: PyTree, non_params: PyTree, room: CacheRoom) -> Pages:
        slots = room.slots
        size = self.model.config.hidden_size
        dtype = self.model.module.dtype
        return DraftState(
            _make_cache(self.model, params, non_params, room),
            jnp.zeros((slots, self.width, size), dtype),
            jnp.full(slots, -1, jnp.int32),
            jnp.zeros((slots, size), dtype),
        )

    def _forward(
        self,
        rows: Int[np.ndarray, "R columns"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
        drafted: Int[Array, "R D"],
        recent: RecentTokens | None,
    ) -> Float[Array, "all V"]:
        logits = self.target.forward(rows, chunks, tokens, drafted, recent)
        self.fill(rows, chunks, tokens)
        return logits

    def _decode(
        self,
        params: PyTree,
        non_params: PyTree,
        rows: Int[Array, "R columns"],
        tokens: Int[Array, "R C"],
        pages: DraftState,
        *,
        exact: bool,
    ) -> tuple[Float[Array, "R V"], Pages]:
        slots = rows[:, Column.SLOT]
        if exact:
            width = tokens.shape[1]
            places = jnp.arange(width) - (width - rows[:, Column.COUNT, None])
            hidden = jnp.take_along_axis(pages.states[slots], jnp.maximum(places, 0)[..., None], axis=1)
            # A prompt whose end was found in the prefix cache has no hidden state.
            hidden = jnp.where((pages.starts[slots] == rows[:, Column.START] - 1)[:, None, None], hidden, 0)
        else:
            hidden = pages.guessed[slots][:, None]
        model = self.model.module.merge(params, non_params)
        hidden, cache = _run(model, rows.at[:, Column.START].add(-1), tokens, hidden, pages.cache)
        last = hidden[:, -1]
        stored = jnp.where(rows[:, Column.COUNT] > 0, slots, len(pages.starts))
        guessed = pages.guessed.at[stored].set(last, mode="drop")
        return model.logits(last), pages._replace(cache=cache, guessed=guessed)

    def _fill_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        params: PyTree,
        non_params: PyTree,
        hidden: list[Float[Array, "R C M"]],
        rows: Int[Array, "R columns"],
        chunks: Int[Array, "Q columns"] | None,
        tokens: Int[Array, "Q C"] | None,
        pages: DraftState,
    ) -> Pages:
        """Keep the hidden states of decoded rows; run the prediction layer on prompts, and keep their last states."""
        pages = _keep(pages, rows, hidden[0], rows[:, Column.COUNT])
        if chunks is None or tokens is None:
            return pages
        slots = chunks[:, Column.SLOT]
        width = tokens.shape[1]
        known: Bool[Array, " Q"] = pages.starts[slots] == chunks[:, Column.START] - 1
        known &= chunks[:, Column.START] > 0
        first = width - chunks[:, Column.COUNT]
        before = jnp.roll(hidden[1], 1, axis=1)
        before = before.at[jnp.arange(len(chunks)), first].set(pages.states[slots, 0], mode="drop")
        # Without the state before its first token, a chunk begins with its second one.
        left_out = (~known).astype(jnp.int32)
        shifted = chunks.at[:, Column.START].add(left_out - 1)
        shifted = shifted.at[:, Column.COUNT].set(jnp.maximum(chunks[:, Column.COUNT] - left_out, 0))
        with logical_axis_rules(self.model.rules, self.model.layout):
            model = self.model.module.merge(params, non_params)
            _, cache = _run(model, shifted, tokens, before, pages.cache)
        ends = chunks.at[:, Column.START].add(chunks[:, Column.COUNT] - 1)
        return _keep(pages._replace(cache=cache), ends, hidden[1][:, -1:], jnp.minimum(chunks[:, Column.COUNT], 1))


def predicts_tokens(model: ModelOnMesh, config: EngineConfig) -> bool:
    """Return True if a model guesses its next tokens itself, by layers for multi-token prediction."""
    return model.config.num_nextn_predict_layers > 0 and config.draft_tokens > 0


def draft_cache_bytes(model: ModelOnMesh, room: CacheRoom) -> int:
    """Return the size in bytes of the prediction layer's cache, summed over all devices."""
    return cache_bytes(model, room, _make_cache)


def _make_cache(model: ModelOnMesh, params: PyTree, non_params: PyTree, room: CacheRoom) -> LayerCache:
    with logical_axis_rules(model.rules, model.layout):
        merged: Any = model.module.merge(params, non_params)
        return merged.mtp.make_shared_cache(room, merged.dtype)


def _run(
    model: Transformer,
    rows: Int[Array, "R columns"],
    tokens: Int[Array, "R C"],
    hidden: Float[Array, "R C M"],
    cache: LayerCache,
) -> tuple[Float[Array, "R C M"], LayerCache]:
    """Run the prediction layer on the rows' tokens and the hidden states before them; return its output and cache."""
    assert model.mtp is not None
    ids, positions, slots = pack_rows([(rows, tokens)], *page_counts([cache]))
    context = model.packed_context(positions, slots)
    embedded = model.enter(model.embedding(ids.reshape(context.positions.shape), model.dtype), context)
    found, cache = model.mtp.decode(hidden.reshape(embedded.shape), embedded, context, cache)
    return found.reshape(hidden.shape), cache


def _keep(
    pages: DraftState, rows: Int[Array, "R columns"], hidden: Float[Array, "R C M"], counts: Int[Array, " R"]
) -> DraftState:
    """Store the hidden states of the rows' last `counts` tokens, which begin at the rows' positions."""
    stored = jnp.where(counts > 0, rows[:, Column.SLOT], len(pages.starts))  # nowhere for a row of padding
    width = hidden.shape[1]
    places = jnp.minimum(jnp.arange(width) + width - counts[:, None], width - 1)
    aligned = jnp.take_along_axis(hidden, places[..., None], axis=1)
    return pages._replace(
        states=pages.states.at[stored, :width].set(aligned.astype(pages.states.dtype), mode="drop"),
        starts=pages.starts.at[stored].set(rows[:, Column.START], mode="drop"),
    )
