"""Runs the planned steps of an engine whose tokens a draft model guesses, or layers of the served model itself."""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.draft_model import DraftPrograms
from jaxstack.decoding.rows import newest_tokens, pad_chunks
from jaxstack.decoding.runner import EngineStats, RowTokensRead, Runner, StepArguments, is_extended
from jaxstack.decoding.sampling import Mode
from jaxstack.decoding.schedule import Row, StepPlan
from jaxstack.decoding.step import Programs


class DraftRunner(Runner):
    """Runs the scheduler's planned steps with speculative decoding, in which a draft model proposes tokens.

    Args:
      programs, config, stats, row_counts, kinds: as in `Runner`.
      draft: programs of the draft model.
    """

    def __init__(
        self,
        programs: Programs,
        config: EngineConfig,
        stats: EngineStats,
        row_counts: Sequence[int],
        kinds: Sequence[bool],
        draft: DraftPrograms,
    ):
        super().__init__(programs, config, stats, row_counts, kinds)
        self._draft = draft

    def starting(self) -> contextlib.AbstractContextManager[list[Future[jax.stages.Compiled]]]:
        return self._draft.starting()

    @property
    def _runs_again(self) -> bool:
        return self.programs.replays or self._draft.approximate

    def _sample_padding(self, total: int, *, drafts: bool, plain: bool) -> None:
        if not drafts:  # the draft model's programs sample themselves
            super()._sample_padding(total, drafts=drafts, plain=plain)

    def _run_empty(
        self,
        rows: Int[np.ndarray, "R columns"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
        *,
        drafts: bool,
    ) -> Int[Array, " found"]:
        if not drafts:
            sampled = super()._run_empty(rows, chunks, tokens, drafts=False)
            self._fill(len(rows), chunks, tokens)
            return sampled
        newest = np.zeros(len(rows), np.int32)
        return self._draft.run(rows, newest, chunks, tokens, "greedy", None, self._recent([], len(rows)))

    def _run_each(
        self,
        rows: Int[np.ndarray, "R columns"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
        *,
        drafts: bool,
        plain: bool,
    ) -> None:
        self._run_empty(rows, chunks, tokens, drafts=drafts)
        if plain or not drafts:
            return
        newest = np.zeros(len(rows), np.int32)
        samples = len(rows) * self._width + (0 if chunks is None else len(chunks))
        mask = np.full((samples, self.programs.words), -1, np.int32)
        recent = self._recent([], len(rows))
        self.programs.put_no_changes()
        for extended in (False, True):
            self._draft.run(rows, newest, chunks, tokens, "greedy", mask, recent, extended=extended)

    def _run(self, plan: StepPlan, arguments: StepArguments) -> Int[Array, " found"]:
        rows, chunks, tokens, mode, mask = arguments
        if not plan.drafts:
            sampled = super()._run(plan, arguments)
            self._fill(len(rows), chunks, tokens)
            return sampled
        newest = newest_tokens(plan.decoded, len(rows))
        recent = self._recent(plan.decoded, len(rows))
        return self._draft.run(rows, newest, chunks, tokens, mode, mask, recent, extended=is_extended(plan))

    def _fill(
        self, rows: int, chunks: Int[np.ndarray, "Q columns"] | None, tokens: Int[np.ndarray, "Q C"] | None
    ) -> None:
        """Run the draft model on the prompts of a step without drafts, if it is not to catch up with them later."""
        if chunks is not None and self._draft.fills_prompts:
            self._draft.fill(self.programs.table.describe([], rows), chunks, tokens)

    def _run_draft_steps(
        self, decoded: Sequence[Row], rows: Int[np.ndarray, "R columns"], steps: int, mode: Mode
    ) -> Int[Array, "steps R found"]:
        recent = self._recent(decoded, len(rows))
        return self._draft.run_steps(rows, newest_tokens(decoded, len(rows)), recent, steps, mode)

    def _catch_up(self, plan: StepPlan) -> None:
        for behind, shape in plan.behind:
            self._draft.catch_up(self.programs.table.describe(behind, shape.rows), pad_chunks(behind, shape))

    def _copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        self._draft.copy_states(copies)

    def _read_one(self, plan: StepPlan, sampled: Int[np.ndarray, " found"]) -> Iterator[RowTokensRead]:
        if not plan.drafts:
            yield from super()._read_one(plan, sampled)
            return
        count = self._row_count(plan)
        width = self._width
        tokens = sampled[:-count].tolist()
        accepted = sampled[-count:].tolist()
        for place, (row, kept) in enumerate(zip(plan.decoded, accepted, strict=False), 1):
            first = place * width - row.count
            self._count_drafts(row, len(row.drafts), kept)
            yield row, tokens[first : first + kept + 1], slice(first, first + kept + 1)
        for place, row in enumerate(plan.chunks, count * width):
            if row.index is not None:
                yield row, [tokens[place]], slice(place, place + 1)
