"""The engine's compiled programs: the forward pass over packed tokens with a paged KV cache, sampling, their memory.

Dims: S slots, R rows, C width of a chunk, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxstack.decoding.cache_room import copy_row, make_cache, row_axes
from jaxstack.decoding.compilation import ThreadedCompiler
from jaxstack.decoding.decode import ModelOnMesh, Params, has_many
from jaxstack.decoding.logit_changes import (
    LogitChanges,
    change_logits,
    changes_of,
    count_tokens,
    no_changes,
    put_changes,
)
from jaxstack.decoding.requests import Request
from jaxstack.decoding.rows import (
    Column,
    Pages,
    RecentTokens,
    RowTable,
    RowTokens,
    decode_rows,
    rows_at_step,
    run_drafted,
    sampled_logits,
    sampling_of,
)
from jaxstack.decoding.sampling import Mode, Sampling, apply_bitmask, log_probabilities, sample_rows
from jaxstack.decoding.scores import pack_scores
from jaxstack.distributed.xla_options import (
    OptionValue,
    half_batch_options,
    loop_in_graph_options,
    without_graph_options,
)
from jaxstack.models.adapters import without_adapters
from jaxstack.models.layer import CacheRoom
from jaxstack.parallel.sharding_context import logical_axis_rules
from pallas_kernels.target import current_target

_LONG_STEP = 256
"""Tokens from which a step's kernels take longer than their launch."""
_SCORE_BLOCK = 64
"""Tokens of prompts that are scored at a time."""


class StepVariant(NamedTuple):
    """Options in which the programs of a step of the same shapes differ."""

    halves: bool = False
    """Run the model on two halves of the tokens in turn."""
    adapted: bool = False
    """Compute with the places for adapters."""
    size: Literal["few", "many", "long"] = "few"
    """many: products have so many rows that FP8 rounds their inputs, see `ModelOnMesh.options`; long: besides, kernels
    take longer than their launch, and are launched one by one instead of as a CUDA graph that is recorded first."""


class Programs:
    """Device state of the engine (cache, newest tokens) and the compiled programs that update it.

    Args:
      model: the model on its mesh.
      room: S slots and the other sizes of the cache.
      vocab_size: number of ids that may be sampled; None: all.
      halves_from: number of tokens from which a step runs on two halves of them, see `run_rows`; None: never.
      constant_steps: the programs of several steps always run their largest number of steps, in one way of sampling.
        More programs are compiled, but the host need not read conditions from the device in each step, even where
        these cannot be part of a CUDA graph.
    """

    scores = False
    """True: a sample is a pair of a token and the bits of its log-probability, see `ScoredPrograms`."""
    adapts = False
    """True: the model has places for adapters, which steps leave out whose rows use none. To be set before the first
    step."""

    def __init__(
        self,
        model: ModelOnMesh,
        room: CacheRoom,
        *,
        vocab_size: int | None,
        halves_from: int | None = None,
        constant_steps: bool = False,
    ):
        self.model = model
        self.room = room
        self.slots = room.slots
        self.page_size = room.page_size
        self.halves_from = halves_from
        self.constant_steps = constant_steps
        self.table_width = -(-room.length // room.page_size)
        self.table = RowTable(room.slots, self.table_width, self.page_size, self._change)
        self.vocab_size = vocab_size
        self.words = -(-(vocab_size or model.config.vocab_size or 0) // 32)
        """int32 words of a row's mask of allowed tokens."""
        self.replays = False
        """True: the model has states, which tokens that were guessed enter only when they are accepted: the next step
        runs them again. To be set before the first step."""
        self.keeps_states = False
        """True: `forward` sets `states`, which `score_prompts` reads. To be set before the first step."""
        self.states: list[Float[Array, "R C D"]] = []
        """Final hidden states of the newest step's decoded rows and prompt chunks."""
        self.compiler = ThreadedCompiler()
        whole = model.rules.sharding(jax.P())
        self._pages: Pages = None
        self.allocate()
        with jax.set_mesh(model.rules.mesh):
            self._last = jax.device_put(jnp.zeros(room.slots, jnp.int32), whole)
        layout = self.page_layout = jax.tree.map(lambda x: x.sharding, self._pages)
        """Shardings of the cache."""
        self._copy = self.compiler.jit(
            partial(copy_row, row_axes(self._cache_shapes, room)),
            donate_argnames="pages",
            out_shardings=layout,
        )
        self.changes: LogitChanges | None = None
        """Penalties and biases of each slot's logits; None while no request in the batch has any."""
        self._no_changes = self.compiler.jit(self._empty_changes, out_shardings=whole)
        self._put_changes = self.compiler.jit(self._changes_with, donate_argnums=0, out_shardings=whole)
        self._sample = self.compiler.jit(
            self._sample_step,
            static_argnames="mode",
            donate_argnames="changes",
            out_shardings=(whole, whole, whole),
        )
        self._score = self.compiler.jit(self._score_step, out_shardings=whole)
        self._pool = self.compiler.jit(self._pool_step, out_shardings=whole)
        self._forward = functools.cache(partial(self._make_forward, (whole, layout, whole)))
        self._advance = functools.cache(partial(self._make_advance, (whole, whole, layout)))

    def _make_forward(self, shardings: tuple[Any, ...], variant: StepVariant) -> Callable[..., Any]:
        return self.compiler.jit(
            partial(self._forward_step, variant=variant),
            donate_argnames="pages",
            out_shardings=shardings,
            compiler_options=_compiler_options(self.model, variant),
        )

    def _make_advance(self, shardings: tuple[Any, ...], variant: StepVariant) -> Callable[..., Any]:
        return self.jit_loop(
            partial(self._decode_steps, variant=variant),
            variant,
            static_argnames=("most", "steps", "mode") if self.constant_steps else "most",
            donate_argnames="pages",
            out_shardings=shardings,
        )

    def jit_loop(self, function: Callable[..., Any], variant: StepVariant, **options: Any) -> Callable[..., Any]:
        """Return the compiled form of a function of several steps.

        Args:
          function: runs a number of steps that is one of its arguments, unless `constant_steps` is set.
          variant: of its steps.
          options: of `jax.jit`.
        """
        xla_options = _compiler_options(self.model, variant, loops=not self.constant_steps)
        return self.compiler.jit(function, compiler_options=xla_options, **options)

    def run_on_pages(self, program: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Dispatch a compiled program that updates the cache; return its other results.

        Args:
          program: takes `params` and `non_params` of the model, `args`, `named` and `pages`, the cache, which is
            donated; returns two results and the new cache.
        """
        model = self.model
        with jax.set_mesh(model.rules.mesh):
            first, second, self._pages = program(model.params, model.non_params, *args, pages=self._pages, **named)
        return first, second

    @property
    def compiled(self) -> int:
        """Number of programs compiled so far."""
        return self.compiler.traced

    @functools.cached_property
    def _make_cache(self) -> Callable[[Params, Params], Pages]:
        return jax.jit(partial(self.make_cache, self.room))

    def _cache_shapes(self, room: CacheRoom) -> Pages:
        return jax.eval_shape(partial(self.make_cache, room), self.model.params, self.model.non_params)

    def make_cache(self, room: CacheRoom, params: Params, non_params: Params) -> Pages:
        """Return an empty cache. Traceable."""
        return make_cache(self.model, params, non_params, room)

    def merge(self, params: Params, non_params: Params) -> Any:
        """Return the model with its parameters, for `run_rows`. Traceable."""
        return self.model.module.merge(params, non_params)

    def finish(self, request: Request) -> None:
        """Keep what the device knows of a request that ends, whose pages are released next: here nothing."""

    def allocate(self) -> None:
        """Make an empty cache on the device, if there is none since the last call of `free`."""
        if self._pages is None:
            with jax.set_mesh(self.model.rules.mesh):
                self._pages = self._make_cache(self.model.params, self.model.non_params)

    def free(self) -> None:
        """Free the cache's memory on the device until `allocate` is called; no request may be running.

        Dropping the last reference to this object does not free it: compiled methods refer to their object.
        """
        for x in jax.tree.leaves(self._pages):
            x.delete()
        self._pages = None

    def copy_states(self, copies: Iterable[tuple[int, int]]) -> None:
        """Dispatch copies of rows of the caches of fixed size, such as states, each (from, to)."""
        with jax.set_mesh(self.model.rules.mesh):
            for source, target in copies:
                self._pages = self._copy(np.int32(source), np.int32(target), pages=self._pages)

    def _change(self, request: Request) -> None:
        """Put what changes a request's logits into the row of its slot."""
        answer = request.tokens[len(request.prompt) :]
        ends = request.stop_tokens
        row = changes_of(request.sampling, request.prompt, answer, ends, self.model.config.vocab_size or 0)
        self.put_changes(request.slot or 0, row)

    def put_changes(self, slot: int, row: LogitChanges) -> None:
        """Put a row of `changes_of` into the state, which is allocated if there is none."""
        with jax.set_mesh(self.model.rules.mesh):
            self.changes = self._put_changes(self.take_changes(), np.int32(slot), row)

    def take_changes(self) -> LogitChanges:
        """Return the state of changes for a step to donate; it is allocated if there is none."""
        with jax.set_mesh(self.model.rules.mesh):
            return self.changes or self._no_changes()

    def put_no_changes(self) -> None:
        """Put a row that changes nothing into the state of slot 0, to compile the program that does so."""
        self.put_changes(0, changes_of(Sampling(), (), (), (), self.model.config.vocab_size or 0))

    def put_newest(self, tokens: Int[np.ndarray, " S"]) -> None:
        """Set the newest token of each slot, from which `run` and `run_steps` go on after steps with drafts."""
        self._last = jax.device_put(tokens, self._last.sharding)

    def run(
        self,
        rows: Int[np.ndarray, "R columns"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
        mode: Mode,
        mask: Int[np.ndarray, "all words"] | None = None,
        drafted: Int[np.ndarray, "R D"] | None = None,
        recent: RecentTokens | None = None,
        *,
        extended: bool = False,
    ) -> Int[Array, "all ..."]:
        """Dispatch one step asynchronously; return a sample for each decoded row, then for each prompt chunk.

        Args:
          rows: from `RowTable.describe`, of decoded rows.
          chunks: from `RowTable.describe`, of rows of prompt tokens.
          tokens: ids of the chunks, each at the end of its row.
          mode: how tokens are sampled.
          mask: allowed tokens of all samples, see `Constraint.fill_mask`; None: all tokens are.
          drafted: newest token and drafts of each decoded row, at its end; a token is sampled after each of them. None:
            a row has the newest token of its slot, and one sample.
          recent: tokens of each decoded row that are not in its states, if the programs replay drafts.
          extended: a request is `Sampling.extended`; a sample is a row of `pack_scores`.
        """
        with jax.set_mesh(self.model.rules.mesh):
            logits = self.forward(rows, chunks, tokens, drafted, recent)
            first = rows if drafted is None else self._repeat(rows, drafted.shape[1])
            settings = np.concatenate([part[:, : Column.PAGES] for part in (first, chunks) if part is not None])
            changes = self.take_changes() if extended else None
            sampled, self._last, changes = self._sample(logits, self._last, settings, mask, changes=changes, mode=mode)
            self.changes = changes or self.changes
        return sampled

    def score_prompts(self, following: Int[np.ndarray, "Q C"]) -> Int[Array, "Q C columns"]:
        """Score the token after each one of the newest step's prompt chunks; return rows of `pack_scores`."""
        model = self.model
        with jax.set_mesh(model.rules.mesh):
            return self._score(model.params, model.non_params, self.states[1], following)

    def pool_prompts(self, chunks: Int[np.ndarray, "Q columns"]) -> Float[Array, "Q 2 D"]:
        """Return the sum of the final hidden states of each prompt chunk of the newest step, and the last of them."""
        with jax.set_mesh(self.model.rules.mesh):
            return self._pool(self.states[1], chunks[:, Column.COUNT])

    def forward(
        self,
        rows: Int[np.ndarray, "R columns"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
        drafted: Int[np.ndarray, "R D"] | Int[Array, "R D"] | None,
        recent: RecentTokens | None = None,
    ) -> Float[Array, "all V"]:
        """Dispatch the forward pass of a step; return the logits to sample from. Arguments as in `run`."""
        model = self.model
        count = (len(rows) if drafted is None else drafted.size) + (0 if tokens is None else tokens.size)
        halves = self._halves(count, rows, recent)
        adapted = self._is_adapted(rows) or (chunks is not None and self._is_adapted(chunks))
        prompts = None if chunks is None or tokens is None else (chunks, tokens)
        size = "long" if count >= _LONG_STEP else _size(count)
        logits, self._pages, self.states = self._forward(StepVariant(halves, adapted, size))(
            model.params, model.non_params, self._last, rows, drafted, recent, prompts, pages=self._pages
        )
        return logits

    def run_steps(
        self, rows: Int[np.ndarray, "R columns"], steps: int, most: int, mode: Mode
    ) -> Int[Array, "most R ..."]:
        """Dispatch several decode steps as one program, asynchronously; return the samples of each step.

        Args:
          rows: from `RowTable.describe`; COUNT is the number of steps of each row, from the first on.
          steps: number of steps.
          most: upper limit of `steps`, for which the program is compiled.
          mode: how tokens are sampled.
        """
        options: dict[str, Any] = {"steps": np.int32(steps), "mode": np.int32(get_args(Mode).index(mode))}
        if self.constant_steps:
            options = {"steps": most, "mode": mode}
        program = self._advance(self.loop_variant(rows, len(rows)))
        tokens, self._last = self.run_on_pages(program, self._last, rows, most=most, **options)
        return tokens

    def loop_variant(
        self, rows: Int[np.ndarray, "R columns"], tokens: int, recent: RecentTokens | None = None
    ) -> StepVariant:
        """Return the variant of a program of several steps, each of which computes so many tokens of these rows."""
        return StepVariant(self._halves(tokens, rows, recent), self._is_adapted(rows), _size(tokens))

    def _halves(self, tokens: int, rows: Int[np.ndarray, "R columns"], recent: RecentTokens | None) -> bool:
        """Return True if a step of so many tokens runs on two halves of them.

        A single row would be split between its tokens, and drafts run before the tokens that they follow.
        """
        return self.halves_from is not None and tokens >= self.halves_from and (recent is None or len(rows) > 1)

    def _is_adapted(self, rows: Int[np.ndarray, "R columns"]) -> bool:
        """Return True if one of the rows is computed with an adapter."""
        return self.adapts and bool(rows[:, Column.ADAPTER].any())

    def merge_for(self, params: Params, non_params: Params, *, adapted: bool) -> Any:
        """Return the model with its parameters, but without places for adapters unless `adapted`. Traceable."""
        model = self.merge(params, non_params)
        return model if adapted or not self.adapts else without_adapters(model)

    def _repeat(self, rows: Int[np.ndarray, "R columns"], width: int) -> Int[np.ndarray, "all columns"]:
        """Repeat the description of each row, so that a token can be sampled after each of its `width` tokens."""
        index = rows[:, Column.INDEX, None] + np.arange(width) - width + rows[:, Column.COUNT, None]
        repeated = np.repeat(rows, width, axis=0)
        repeated[:, Column.INDEX] = np.maximum(index, 0).ravel()
        last = np.arange(len(repeated)) % width == width - 1
        repeated[:, Column.STORE] = np.where(last, repeated[:, Column.STORE], self.slots)
        return repeated

    @contextlib.contextmanager
    def starting(self) -> Iterator[list[Future[jax.stages.Compiled]]]:
        """Compile in threads the programs that are called in this `with` block, as `ThreadedCompiler.starting` does.

        Their calls run nothing and return shapes. The device state stays as it is.
        """
        last = self._last
        pages = self._pages
        changes = self.changes
        states = self.states
        try:
            with self.compiler.starting() as started:
                yield started
        finally:
            self._last = last
            self._pages = pages
            self.changes = changes
            self.states = states

    def sample_padding(self, total: int, *, plain: bool) -> None:
        """Sample for a batch of so many rows of padding, in each way that a step may need, to compile it.

        Modes: greedy, with a temperature only, with top-k, top-p or min-p. Only the last of them is called with a mask
        and, in engines whose programs do not score all tokens, as `Sampling.extended` requests need it.

        Args:
          total: number of rows.
          plain: leave out masks and changes.
        """
        with jax.set_mesh(self.model.rules.mesh):
            rows = self.table.describe([], total)[:, : Column.PAGES]
            logits = np.zeros((total, self.model.config.vocab_size or 0), np.float32)
            logits = jax.device_put(logits, self.model.rules.sharding(jax.P()))
            for mode in get_args(Mode):
                self._sample(logits, self._last, rows, None, changes=None, mode=mode)
            if plain:
                return
            self.put_no_changes()
            mask = np.full((total, self.words), -1, np.int32)
            for changes in (None,) if self.scores else (None, self.changes):
                *_, left = self._sample(logits, self._last, rows, mask, changes=changes, mode="limited")
                self.changes = left or self.changes

    def _forward_step(
        self,
        params: PyTree,
        non_params: PyTree,
        last: Int[Array, " S"],
        rows: Int[Array, "R columns"],
        drafted: Int[Array, "R D"] | None,
        recent: RecentTokens | None,
        chunks: RowTokens | None,
        pages: Pages,
        *,
        variant: StepVariant,
    ) -> tuple[Float[Array, "all V"], Pages, list[Float[Array, "R C D"]]]:
        """Return the logits of each decoded token and each prompt chunk's last token, the KV cache, and `states`."""
        newest = last[rows[:, Column.SLOT], None] if drafted is None else drafted
        with logical_axis_rules(self.model.rules, self.model.layout):
            model = self.merge_for(params, non_params, adapted=variant.adapted)
            hidden, pages = run_drafted(model, rows, newest, recent, chunks, pages, halves=variant.halves)
            return sampled_logits(model, hidden), pages, hidden if self.keeps_states else []

    def _sample_step(
        self,
        logits: Float[Array, "all V"],
        last: Int[Array, " S"],
        rows: Int[Array, "all columns"],
        mask: Int[Array, "all words"] | None,
        changes: LogitChanges | None,
        *,
        mode: Mode,
    ) -> tuple[Int[Array, "all ..."], Int[Array, " S"], LogitChanges | None]:
        """Sample a token for each row; return the samples, the newest token of each slot, and the state of changes.

        With `changes` samples are rows of `pack_scores`, of the logits before they are changed.
        """
        changed = logits if changes is None else change_logits(self._limit(logits, mask), rows, changes)
        samples = self._sample_tokens(changed, rows, mask, mode)
        if changes is not None:
            changes = count_tokens(changes, rows, self._tokens(samples))
            samples = pack_scores(limit_vocabulary(logits, self.vocab_size), samples)
        return samples, last.at[rows[:, Column.STORE]].set(self._tokens(samples), mode="drop"), changes

    def _empty_changes(self) -> LogitChanges:
        return no_changes(self.slots, self.model.config.vocab_size or 0)

    def _changes_with(self, state: LogitChanges, slot: Int[Array, ""], row: LogitChanges) -> LogitChanges:
        return put_changes(state, slot, row)

    def _sample_tokens(
        self, logits: Float[Array, "R V"], rows: Int[Array, "R columns"], mask: Int[Array, "R words"] | None, mode: Mode
    ) -> Int[Array, "R ..."]:
        """Sample a token for each row, with the sampling settings in the row's description."""
        settings = sampling_of(rows)
        tokens = sample_rows(self._limit(logits, mask), settings, mode)
        if not self.scores:
            return tokens
        scores = log_probabilities(logits, tokens, settings)
        return jnp.stack([tokens, jax.lax.bitcast_convert_type(scores, jnp.int32)], axis=-1)

    def _limit(self, logits: Float[Array, "R V"], mask: Int[Array, "R words"] | None) -> Float[Array, "R V"]:
        """Set the logits of ids that must not be sampled to -inf."""
        limited = limit_vocabulary(logits, self.vocab_size)
        return limited if mask is None else apply_bitmask(limited, mask)

    def _tokens(self, samples: Int[Array, "R ..."]) -> Int[Array, " R"]:
        """Return the tokens of samples."""
        return samples if samples.ndim == 1 else samples[:, 0]

    def _pool_step(self, hidden: Float[Array, "Q C D"], counts: Int[Array, " Q"]) -> Float[Array, "Q 2 D"]:
        hidden = hidden.astype(jnp.float32)
        own = jnp.arange(hidden.shape[1]) >= hidden.shape[1] - counts[:, None]
        return jnp.stack([jnp.where(own[..., None], hidden, 0).sum(1), hidden[:, -1]], 1)

    def _score_step(
        self, params: PyTree, non_params: PyTree, hidden: Float[Array, "Q C D"], following: Int[Array, "Q C"]
    ) -> Int[Array, "Q C columns"]:
        """Score the token after each hidden state, a block of them at a time, which limits the memory of the logits."""
        count = -(-following.size // _SCORE_BLOCK)
        lacking = count * _SCORE_BLOCK - following.size
        states = jnp.pad(hidden.reshape(following.size, -1), ((0, lacking), (0, 0)))
        tokens = jnp.pad(following.ravel(), (0, lacking))

        def score(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            logits = self.merge(params, non_params).logits(block[0])
            return pack_scores(limit_vocabulary(logits, self.vocab_size), block[1])

        with logical_axis_rules(self.model.rules, self.model.layout):
            scores = jax.lax.map(score, (states.reshape(count, _SCORE_BLOCK, -1), tokens.reshape(count, _SCORE_BLOCK)))
        return scores.reshape(count * _SCORE_BLOCK, -1)[: following.size].reshape(*following.shape, -1)

    def _decode_steps(
        self,
        params: PyTree,
        non_params: PyTree,
        last: Int[Array, " S"],
        rows: Int[Array, "R columns"],
        pages: Pages,
        *,
        steps: int | Int[Array, ""],
        mode: Mode | Int[Array, ""],
        most: int,
        variant: StepVariant,
    ) -> tuple[Int[Array, "most R ..."], Int[Array, " S"], Pages]:
        """Run several decode steps; return each step's samples, each slot's newest token, and the updated KV cache.

        The number of steps and the sampling mode are arguments of the program, so that one is compiled per row count,
        or its constants.
        """

        def advance(step: jax.Array, carry: tuple[jax.Array, jax.Array, Pages]) -> tuple[jax.Array, jax.Array, Pages]:
            newest, sampled, pages = carry
            model = self.merge_for(params, non_params, adapted=variant.adapted)
            now = rows_at_step(rows, step)
            logits, pages = decode_rows(model, now, newest[:, None], pages, halves=variant.halves)
            settings = now[:, : Column.PAGES]
            if isinstance(mode, str):
                samples = self._sample_tokens(logits, settings, None, mode)
            else:
                branches = [partial(self._sample_tokens, mask=None, mode=name) for name in get_args(Mode)]
                samples = jax.lax.switch(mode, branches, logits, settings)
            newest = jnp.where(now[:, Column.COUNT] > 0, self._tokens(samples), newest)
            return newest, sampled.at[step].set(samples if self.scores else newest), pages

        with logical_axis_rules(self.model.rules, self.model.layout):
            newest = last[rows[:, Column.SLOT]]
            sampled = jnp.zeros((most, len(rows), 2) if self.scores else (most, len(rows)), jnp.int32)
            newest, sampled, pages = jax.lax.fori_loop(0, steps, advance, (newest, sampled, pages))
        return sampled, last.at[rows[:, Column.STORE]].set(newest, mode="drop"), pages


class ScoredPrograms(Programs):
    """Programs that return with each sampled token its log-probability under the model at the request's temperature.

    It is that among all ids of the model: limits such as top-p and `vocab_size` do not raise it.
    """

    scores = True


def _compiler_options(
    model: ModelOnMesh, variant: StepVariant, *, loops: bool = False
) -> dict[str, OptionValue] | None:
    """Return XLA's options for the programs of a variant of steps; None: the defaults.

    Args:
      loops: a program runs a number of steps that is one of its arguments.
    """
    options = model.options(many=variant.size != "few")
    if current_target().platform != "cuda":
        return options
    more = half_batch_options() if variant.halves else {}
    if loops and model.rules.mesh.size == 1:  # a loop whose kernels wait for other devices was not tried in a graph
        more |= loop_in_graph_options()
    if variant.size == "long":
        more |= without_graph_options()
    return {**(options or {}), **more} or None


def _size(rows: int) -> Literal["few", "many"]:
    """Return the size of a step of so many rows whose kernels are recorded in a CUDA graph."""
    return "many" if has_many(rows) else "few"


def limit_vocabulary(logits: Float[Array, "*R V"], size: int | None) -> Float[Array, "*R V"]:
    """Set the logits of ids >= `size`, which the tokenizer does not use, to -inf; a `size` of None changes nothing."""
    return logits if size is None else jnp.where(jnp.arange(logits.shape[-1]) < size, logits, -jnp.inf)
