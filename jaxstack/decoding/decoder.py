"""Generation for a batch of prompts, which starts and steps the engine in the caller's thread."""

import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from jaxtyping import Int

from jaxstack.decoding.cache_room import cache_bytes, check_memory
from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decode import DECODING_LAYOUT, ModelOnMesh, Params
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.requests import Request
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.step import Programs
from jaxstack.decoding.step_shapes import ChunkShape, StepShapes
from jaxstack.errors import ConfigError
from jaxstack.models.layer import CacheRoom
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel.rules import AxisRules
from jaxstack.parallel.sharding_context import StepLayout
from pallas_kernels.target import current_target

_BLOCK = 64
"""The room for new tokens is a multiple of this many, so that few programs are compiled."""
_PAGE = 16
"""Tokens of a page of the cache."""
_STEPS = 8
"""Decoding steps of one program, so that the host's work for each step overlaps with the device's."""
_STEP_TOKENS = 32768
"""Most prompt tokens that a step computes, padding included; longer prompts are computed in several steps."""


class Decoder(ModelOnMesh):
    """A model that generates tokens for a batch of prompts. Unrolled layers (`scan_layers: false`) are fastest.

    On a mesh with `data` or `fsdp` each device computes a part of the tokens, and holds the cache of all rows. The
    cache stays in memory for the next batch until `unload`.

    Args:
      module, params, non_params, rules: as in `ModelOnMesh`.
      vocab_size: number of ids that may be generated, if the model has more rows than the tokenizer has ids.
      layout: as in `ModelOnMesh`.
      steps: number of steps of one program; None: 8, or 1 on a CPU, where a step takes so long that each token should
        appear at once.
    """

    make_programs: type[Programs] = Programs
    groups = 1
    """Number of groups of a batch's rows whose steps take turns, each with an engine and a cache of its own."""

    def __init__(
        self,
        module: ModuleArrays,
        params: Params,
        non_params: Params,
        rules: AxisRules,
        *,
        layout: StepLayout = DECODING_LAYOUT,
        vocab_size: int | None = None,
        steps: int | None = None,
    ):
        super().__init__(module, params, non_params, rules, layout)
        self._vocab_size = vocab_size
        self._steps = steps or (1 if current_target().platform == "cpu" else _STEPS)
        self._engines: list[Engine] = []

    def unload(self) -> None:
        """Free the memory of the parameters and of the cache until `load` is called again."""
        super().unload()
        self._free_cache()

    def join_projections(self) -> None:
        super().join_projections()
        self._free_cache()
        self._engines = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        *,
        seed: int | Sequence[int] = 0,
        stop_tokens: Collection[int] = (),
    ) -> Iterator[Int[np.ndarray, " B"]]:
        """Yield the next token of every prompt in the batch, int32 [B], at most `max_tokens` times.

        Args:
          prompts: token ids of each row; they may differ in length.
          max_tokens: number of new tokens.
          sampling: how tokens are sampled from the logits.
          seed: seed of each row; a number s means s, s + 1, ... The tokens of a row depend on its prompt and its seed
            alone (up to rounding: XLA may choose another matmul for another number of rows).
          stop_tokens: ids that end a row, which is -1 from then on. Generation ends when all rows have ended.

        Raises:
          ConfigError: a prompt is empty, has unknown ids, or is too long for the model with its new tokens.
        """
        self._check(prompts, max_tokens)
        seeds = _seed_rows(seed, len(prompts))
        engines = self._open_engines(len(prompts), max(map(len, prompts)), max_tokens)
        requests = [
            engine.submit(prompt, max_tokens, sampling, seed=row_seed, stop_tokens=stop_tokens)
            for engine, prompt, row_seed in zip(itertools.cycle(engines), prompts, seeds, strict=False)
        ]
        try:
            yield from _step_rows(engines, requests)
        finally:  # the caller may stop early; the next batch needs the slots
            for request in requests:
                request.cancel()
            while any([engine.step() for engine in engines]):
                pass

    def cache_bytes(self, lengths: Sequence[int], max_tokens: int) -> int:
        """Return the bytes of the cache that `generate` allocates for prompts of these lengths, on all devices."""
        count = min(self.groups, len(lengths))
        return count * cache_bytes(self, self._room(-(-len(lengths) // count), max(lengths), max_tokens))

    def _open_engines(self, prompts: int, longest: int, max_tokens: int) -> list[Engine]:
        """Return an engine for each group of rows, with steps of its shape; the last ones if they are large enough."""
        count = min(self.groups, prompts)
        size = -(-prompts // count)
        room = self._room(size, longest, max_tokens)
        rows = -(-size // self.batch_unit) * self.batch_unit
        width = self.padded_length(longest)
        while rows * width > _STEP_TOKENS and width > _BLOCK:
            width = -(-width // 2)
        shapes = StepShapes((room.slots,), (ChunkShape(rows, width),), constant_steps=True)
        last = self._engines
        if len(last) != count or last[0].slots != room.slots or last[0].context < room.length:
            self._free_cache()
            check_memory(self, room._replace(slots=count * room.slots, pages=count * room.pages))
            config = EngineConfig(
                slots=room.slots,
                context=room.length,
                page_size=room.page_size,
                pages=room.pages,
                prefix_cache=False,  # the parameters may be replaced
                decode_steps=self._steps,
                steps_ahead=1,
            )
            self._engines = [self._make_engine(config, shapes) for _ in range(count)]
        for engine in self._engines:
            engine.programs.allocate()
            engine.scheduler.shapes = shapes.chunks
        return self._engines

    def _make_engine(self, config: EngineConfig, shapes: StepShapes) -> Engine:
        return Engine(
            self,
            config,
            vocab_size=self._vocab_size,
            shapes=shapes,
            make_programs=self.make_programs,
            warm_up=False,
            start=False,
        )

    def _free_cache(self) -> None:
        """Free the engines' caches, unless the caller still reads an earlier batch; then the next batch has others."""
        if any(engine.running or engine.waiting for engine in self._engines):
            self._engines = []
        for engine in self._engines:
            engine.programs.free()

    def _room(self, prompts: int, longest: int, max_tokens: int) -> CacheRoom:
        """Return the sizes of the cache for a batch, whose number of rows is a multiple of `batch_unit`.

        On GPUs each device has two rows or more: XLA computes a matmul of one row as a product and a sum, and in
        bfloat16 writes the product to memory, which takes three times the bytes of the weights.
        """
        least = 2 if current_target().platform == "cuda" else 1
        rows = max(least, -(-prompts // self.batch_unit)) * self.batch_unit
        length = self.padded_length(longest) + -(-max_tokens // _BLOCK) * _BLOCK
        length = min(length, self.context_length or length)
        return CacheRoom(rows, length, rows * -(-length // _PAGE), _PAGE)

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        if not prompts or min(map(len, prompts)) == 0:
            raise ConfigError("a prompt must have at least one token.")
        self.check_ids(prompts)
        longest = max(map(len, prompts))
        limit = self.context_length
        if limit is not None and longest > limit - 1:
            raise ConfigError(
                f"a prompt of {longest} tokens leaves no room in the model's context of {limit} tokens "
                f"(max_position_embeddings); shorten it to at most {limit - 1}."
            )
        if limit is not None and longest + max_tokens > limit:
            raise ConfigError(
                f"the prompt ({longest} tokens) and {max_tokens} new tokens exceed the model's "
                f"max_position_embeddings ({limit}); at most {limit - longest} new tokens fit."
            )


def _step_rows(engines: Sequence[Engine], requests: Sequence[Request]) -> Iterator[Int[np.ndarray, " B"]]:
    """Run the engines in turns; yield the next token of each answer, int32 [B], once all have it or have ended."""
    answers: list[list[int]] = [[] for _ in requests]
    ended = [False] * len(requests)
    number = 0
    while True:
        while any(not end and len(answer) <= number for end, answer in zip(ended, answers, strict=True)):
            for engine in engines:
                engine.step()
            for row, request in enumerate(requests):
                tokens, reason = request.take()
                answers[row] += tokens
                if reason is not None and not ended[row]:
                    ended[row] = True
                    answers[row] += [] if request.stop_token is None else [request.stop_token]
        if all(len(answer) <= number for answer in answers):
            return
        yield np.array([answer[number] if number < len(answer) else -1 for answer in answers], np.int32)
        number += 1


def _seed_rows(seed: int | Sequence[int], rows: int) -> list[int]:
    """Return one seed per row: those of the sequence `seed`, or for a number `seed`, `seed` + 1, ..."""
    seeds = [seed + row for row in range(rows)] if isinstance(seed, int) else list(map(int, seed))
    if len(seeds) != rows:
        raise ValueError(f"seed must be one number, or one per prompt ({rows}); found {len(seeds)}.")
    return seeds
