"""Rows of the serving engine's batch as arrays, and the forward pass over their tokens with a paged KV cache.

A row is described by the host, in a `RowTable`, as one line of the int32 array that the programs get.

Dims: R rows, C their width in tokens, V vocabulary, D model.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxstack.decoding.requests import Request
from jaxstack.decoding.sampling import Mode, RowSampling
from jaxstack.decoding.schedule import Row
from jaxstack.decoding.step_shapes import ChunkShape
from jaxstack.models.adapter_stack import use_adapters
from jaxstack.models.attention.paged_cache import PagedKeys
from jaxstack.models.layer import PageGroup, PageSlots
from jaxstack.models.transformer import Transformer

Pages: TypeAlias = PyTree
"""Caches of all layers, from `Transformer.make_shared_cache`: pages, or one row for each slot."""
RowTokens: TypeAlias = tuple[Int[Array, "R columns"], Int[Array, "R C"]]
"""A group of rows of equal width C: row descriptions [R, columns] and token ids [R, C].

A row's COUNT tokens are right-aligned; what precedes them is padding."""


_NO_LIMIT = 2**31 - 1
"""Largest int32, which is no limit of the number of tokens to sample from."""


class RecentTokens(NamedTuple):
    """Newest tokens of each sequence, which are run again: what a cache has of them is approximate, or missing."""

    tokens: Int[np.ndarray, "R D"] | Int[Array, "R D"]
    """Token ids, aligned to the end of each row."""
    counts: Int[np.ndarray, " R"] | Int[Array, " R"]
    """Number of them per row, the newest included, 0 for a row of padding."""

    def group(self, rows: Int[Array, "R columns"]) -> RowTokens:
        """Return these tokens with the descriptions of their rows, given those of rows that start at the newest one."""
        again = rows.at[:, Column.START].add(1 - self.counts).at[:, Column.COUNT].set(self.counts)
        return again, jnp.asarray(self.tokens)


class Column(IntEnum):
    """Columns of the int32 array that describes each row of a step's batch; the row's page numbers follow them."""

    SLOT = 0
    """Slot of the sequence, from 0 to S - 1."""
    START = 1
    """Position of the row's first token in its sequence."""
    COUNT = 2
    """Number of tokens of the row; 0: an empty row."""
    STORE = 3
    """Slot that keeps the sampled token; S to keep it nowhere."""
    INDEX = 4
    """Number in the answer of the token that is sampled after the row."""
    SEED = 5
    TEMPERATURE = 6
    """Bits of a float32, as are those of TOP_P and MIN_P."""
    TOP_K = 7
    TOP_P = 8
    MIN_P = 9
    CHANGED = 10
    """1: the row's logits are changed by those of its slot, see `logit_changes`."""
    ADAPTER = 11
    """Number of the adapter that the row's tokens are computed with; 0: none."""
    PAGES = 12


class RowTable:
    """Descriptions of the requests in the slots, from which those of each step's rows are copied.

    Args:
      slots: number of slots.
      width: most pages of a request.
      page_size: tokens of a page.
      change: is called with a request whose logits are changed, when it is described first.
    """

    def __init__(self, slots: int, width: int, page_size: int, change: Callable[[Request], None]):
        self.slots = slots
        self.page_size = page_size
        self._described = np.zeros((slots, Column.PAGES + width), np.int32)
        self._change = change

    def describe(self, rows: Sequence[Row], count: int) -> Int[np.ndarray, "R columns"]:
        """Encode the rows of a step's batch as an int32 array for the programs, padded to `count` rows."""
        for row in rows:
            if row.request.described_pages != len(row.request.pages):
                self._write(row.request)
        plan = np.zeros((count, self._described.shape[1]), np.int32)
        plan[:, Column.STORE] = self.slots
        if rows:
            slots = np.array([row.request.slot for row in rows])
            own = plan[: len(rows)]
            own[:] = self._described[slots]
            own[:, Column.START] = [row.start for row in rows]
            own[:, Column.COUNT] = [row.count for row in rows]
            own[:, Column.STORE] = [self.slots if row.index is None else row.request.slot for row in rows]
            own[:, Column.INDEX] = [row.index or 0 for row in rows]
        return plan

    def describe_at(self, shape: ChunkShape, page: int, depth: float) -> Int[np.ndarray, "Q columns"]:
        """Encode full prompt chunks, to time them, that end at a share of the longest prompt.

        Args:
          shape: number of chunks, and of the tokens of each.
          page: number of the page that they read and write. Their states are those of the last slot.
          depth: the share.
        """
        chunks = self.describe([], shape.rows)
        longest = (self._described.shape[1] - Column.PAGES) * self.page_size
        count = min(shape.width, longest)
        chunks[:, Column.SLOT] = self.slots - 1
        chunks[:, Column.START] = max(0, int(depth * longest) - count)
        chunks[:, Column.COUNT] = count
        chunks[:, Column.PAGES :] = page
        return chunks

    def _write(self, request: Request) -> None:
        """Write a request's sampling settings and new page numbers into the table that `describe` copies from."""
        line = self._described[request.slot]
        known = request.described_pages
        if known < 0:
            known = 0
            sampling = request.sampling
            floats = line.view(np.float32)
            line[:] = 0
            line[Column.SLOT] = request.slot
            line[Column.SEED] = np.uint32(request.seed).view(np.int32)
            line[Column.TOP_K] = min(sampling.top_k or _NO_LIMIT, _NO_LIMIT)
            # Logits divided by a temperature outside of these bounds would overflow, or all be equal.
            temperature = min(max(sampling.temperature, 1e-6), 1e6) if sampling.temperature else 0.0
            floats[Column.TEMPERATURE] = temperature
            floats[Column.MIN_P] = sampling.min_p or 0
            floats[Column.TOP_P] = 1 if sampling.top_p is None else sampling.top_p
            line[Column.CHANGED] = sampling.changes_logits
            line[Column.ADAPTER] = 0 if request.adapter is None else request.adapter.number
            if sampling.changes_logits:
                self._change(request)
        line[Column.PAGES + known : Column.PAGES + len(request.pages)] = request.pages[known:]
        request.described_pages = len(request.pages)


def sampling_of(rows: Int[Array, "R columns"]) -> RowSampling:
    """Decode each row's sampling settings from the int32 array that describes the rows of a step."""
    floats = jax.lax.bitcast_convert_type(rows, jnp.float32)
    return RowSampling(
        jax.lax.bitcast_convert_type(rows[:, Column.SEED], jnp.uint32),
        rows[:, Column.INDEX],
        floats[:, Column.TEMPERATURE],
        rows[:, Column.TOP_K],
        floats[:, Column.TOP_P],
        floats[:, Column.MIN_P],
    )


def choose_mode(rows: Sequence[Row]) -> Mode:
    """Return the cheapest mode that samples all rows: greedy, free (temperature) or limited (top-k, top-p, min-p)."""
    settings = [row.request.sampling for row in rows]
    if all(s.temperature == 0 for s in settings):
        return "greedy"
    limited = any(s.top_k is not None or s.min_p or s.top_p is not None for s in settings)
    return "limited" if limited else "free"


def pad_chunks(rows: Sequence[Row], shape: ChunkShape, ahead: int = 0) -> Int[np.ndarray, "Q C"]:
    """Return the rows' prompt tokens, or those `ahead` places later, as an int32 array, left-padded to `shape`."""
    tokens = np.zeros(shape, np.int32)
    for line, row in zip(tokens, rows, strict=False):
        first = row.start + ahead
        found = row.request.tokens[first : first + row.count]
        line[shape.width - row.count :][: len(found)] = found
    return tokens


def newest_tokens(rows: Sequence[Row], count: int) -> Int[np.ndarray, " R"]:
    """Return the newest token of each row, padded to `count` rows."""
    tokens = np.zeros(count, np.int32)
    tokens[: len(rows)] = [row.request.tokens[-1] for row in rows]
    return tokens


def decode_rows(
    model: Transformer,
    rows: Int[Array, "R columns"],
    newest: Int[Array, "R C"],
    pages: Pages,
    *,
    together: int = 1,
    halves: bool = False,
) -> tuple[Float[Array, "R V"], Pages]:
    """Run the model on the rows' newest tokens; return the logits [R, V] after each row's last one, and the KV cache.

    Args:
      newest: the rows' COUNT tokens, at the end.
      together, halves: as in `run_rows`.
    """
    (hidden,), pages = run_rows(model, [(rows, newest)], pages, together=together, halves=halves)
    return model.logits(hidden[:, -1]), pages


def run_rows(
    model: Transformer,
    groups: Sequence[RowTokens],
    pages: Pages,
    *,
    together: int = 1,
    halves: bool = False,
    drafts: int | None = None,
) -> tuple[list[Float[Array, "R C D"]], Pages]:
    """Run the model on the tokens of groups of rows; return the hidden states of each group, and the KV cache.

    Args:
      together: `layers_together` of `Transformer.decode_packed`.
      halves: run the model on two halves of the tokens in turn (NanoFlow's nano-batches, Zhu et al. 2024,
        arXiv:2408.12757). Layer by layer the second half needs only the first half's keys and values, so that XLA can
        run matmuls of one half while devices sum the outputs of the other.
      drafts: index of the group whose tokens may be rejected, after the group of the tokens before them; None: none.
    """
    if not halves:
        return _run_packed(model, groups, pages, together, drafts)
    splits = [_split(*group) for group in groups]
    first, pages = _run_packed(model, [parts[0] for parts, _ in splits], pages, together, drafts)
    second, pages = _run_packed(model, [parts[1] for parts, _ in splits if len(parts) > 1], pages, together, drafts)
    rest = iter(second)
    hidden = list[jax.Array]()
    for found, (parts, axis) in zip(first, splits, strict=True):
        hidden.append(found if len(parts) == 1 else jnp.concatenate([found, next(rest)], axis))
    return hidden, pages


def run_drafted(
    model: Transformer,
    rows: Int[Array, "R columns"],
    tokens: Int[Array, "R D"],
    recent: RecentTokens | None,
    chunks: RowTokens | None,
    pages: Pages,
    *,
    halves: bool = False,
) -> tuple[list[Float[Array, "R C D"]], Pages]:
    """Run the model on rows of a newest token and drafts, and on chunks of prompts, as `run_rows` does.

    Args:
      tokens: COUNT tokens of each row, at its end.
      recent: tokens of each row that are not in the model's states, the newest included; None: they have all.
      halves: as in `run_rows`.
    """
    others = [] if chunks is None else [chunks]
    if recent is None:
        return run_rows(model, [(rows, tokens), *others], pages, halves=halves)
    count = rows[:, Column.COUNT]
    guessed = rows.at[:, Column.START].add(1).at[:, Column.COUNT].set(jnp.maximum(count - 1, 0))
    groups = [recent.group(rows), (guessed, tokens[:, 1:]), *others]
    (again, drafts, *rest), pages = run_rows(model, groups, pages, halves=halves, drafts=1)
    place = tokens.shape[1] - count[:, None, None]
    columns = jnp.arange(tokens.shape[1])[:, None]
    hidden = jnp.where(columns == place, again[:, -1:], jnp.pad(drafts, ((0, 0), (1, 0), (0, 0))))
    return [hidden, *rest], pages


def _run_packed(
    model: Transformer, groups: Sequence[RowTokens], pages: Pages, together: int, drafts: int | None
) -> tuple[list[Float[Array, "R C D"]], Pages]:
    """Run the model on all tokens packed in one row; return the hidden states of each group, and the KV cache."""
    if not groups:
        return [], pages
    ids, positions, slots = pack_rows(groups, *page_counts(pages), drafts=drafts)
    with use_adapters(adapter_numbers(groups)):
        hidden, pages = model.decode_packed(ids, positions, slots, pages, layers_together=together)
    return split_packed(hidden, groups), pages


def adapter_numbers(groups: Sequence[RowTokens]) -> Int[Array, " T"]:
    """Return the number of the adapter of each packed token."""
    return jnp.concatenate([jnp.repeat(rows[:, Column.ADAPTER], tokens.shape[1]) for rows, tokens in groups])


def split_packed(hidden: Float[Array, "T D"], groups: Sequence[RowTokens]) -> list[Float[Array, "R C D"]]:
    """Split the hidden states of packed tokens into those of each group of rows."""
    ends = np.cumsum([tokens.size for _, tokens in groups])
    parts = jnp.split(hidden, ends[:-1])
    return [part.reshape(*tokens.shape, hidden.shape[-1]) for part, (_, tokens) in zip(parts, groups, strict=True)]


def sampled_logits(model: Transformer, hidden: Sequence[Float[Array, "R C D"]]) -> Float[Array, "all V"]:
    """Return the logits to sample from: after all tokens of the decoded rows, and the last one of each prompt chunk.

    A single one is computed with that of the token before it: XLA computes a matmul of one row as a product and a sum,
    and in bfloat16 writes the product to memory, which takes three times the bytes of the weights.
    """
    decoded, *chunks = hidden
    states = jnp.concatenate([decoded.reshape(-1, decoded.shape[-1]), *(part[:, -1] for part in chunks)])
    if len(states) == 1 and chunks and chunks[0].shape[1] > 1:
        return model.logits(chunks[0][0, -2:])[1:]
    return model.logits(states)


def _split(rows: Int[Array, "R columns"], tokens: Int[Array, "R C"]) -> tuple[list[RowTokens], int]:
    """Split rows into two halves, or a single row between its tokens; return them and the dim along which they join.

    A single token stays whole.
    """
    count, width = tokens.shape
    if count > 1:
        half = -(-count // 2)
        return [(rows[:half], tokens[:half]), (rows[half:], tokens[half:])], 0
    if width == 1:
        return [(rows, tokens)], 0
    half = width // 2
    left = jnp.maximum(rows[:, Column.COUNT] - (width - half), 0)
    right = rows.at[:, Column.START].add(left).at[:, Column.COUNT].add(-left)
    return [(rows.at[:, Column.COUNT].set(left), tokens[:, :half]), (right, tokens[:, half:])], 1


def rows_at_step(rows: Int[Array, "R columns"], step: Int[Array, ""]) -> Int[Array, "R columns"]:
    """Return the row descriptions advanced to step `step` of a multi-step decode program; finished rows get COUNT 0."""
    now = rows.at[:, Column.START].add(step).at[:, Column.INDEX].add(step)
    return now.at[:, Column.COUNT].set((step < rows[:, Column.COUNT]).astype(jnp.int32))


def pack_rows(
    groups: Sequence[RowTokens], pages: int, page_size: int, *, drafts: int | None = None
) -> tuple[Int[Array, " T"], Int[Array, " T"], PageSlots]:
    """Flatten groups of rows of tokens; return ids, positions and cache places of all tokens, without empty groups.

    Args:
      pages, page_size: sizes of the cache, see `page_counts`.
      drafts: as in `run_rows`.
    """
    packed = [_pack(rows, tokens.shape[1], pages, page_size) for rows, tokens in groups]
    positions, write, places = zip(*packed, strict=True)
    places = tuple(group._replace(drafts=number == drafts) for number, group in enumerate(places) if len(group.table))
    ids = [jnp.asarray(tokens).ravel() for _, tokens in groups]
    return jnp.concatenate(ids), jnp.concatenate(positions), PageSlots(jnp.concatenate(write), places)


def _pack(
    rows: Int[Array, "R columns"], width: int, pages: int, page_size: int
) -> tuple[Int[Array, " all"], Int[Array, " all"], PageGroup]:
    """Return the positions of a group's tokens, their places in the pages, and the group."""
    start = rows[:, Column.START, None]
    count = rows[:, Column.COUNT, None]
    offset = jnp.arange(width, dtype=jnp.int32) - (width - count)
    positions = jnp.where(offset >= 0, start + offset, -1)
    table = rows[:, Column.PAGES :]
    page = jnp.take_along_axis(table, jnp.maximum(positions, 0) // page_size, axis=1)
    write = jnp.where(positions >= 0, page * page_size + positions % page_size, pages * page_size)
    lengths = jnp.where(count > 0, start + count, 0)[:, 0]
    return positions.ravel(), write.ravel(), PageGroup(table, lengths, width, rows[:, Column.SLOT])


def page_counts(pages: Pages) -> tuple[int, int]:
    """Return the number of pages and the tokens per page of a cache; (1, 1) if none of its layers has pages."""
    for layer in pages:
        if isinstance(layer, PagedKeys):
            *_, number, page_size, _, _ = jax.tree.leaves(layer)[0].shape
            return number, page_size
    return 1, 1
