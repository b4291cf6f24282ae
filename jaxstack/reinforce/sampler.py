"""Samples answers with the serving engine, in the trainer's process and with the trainer's weights."""

import dataclasses
from collections.abc import Sequence

import jax
from flax import nnx

from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decode import ModelOnMesh, cast_matrices, cast_shapes
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.requests import Request
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.step import ScoredPrograms, shares_pages
from jaxstack.decoding.step_shapes import ChunkShape, StepShapes
from jaxstack.models import Transformer
from jaxstack.models.restack import join_projections, restack, same_stacking
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
from jaxstack.reinforce.config import SamplerConfig
from jaxstack.state import TrainState
from jaxstack.stored.model import initial_variables
from jaxstack.trainer import Trainer

_MOST_SLOTS = 256
"""Answers that are sampled at a time, unless the configuration says otherwise."""
_STEP_TOKENS = 32768
"""Most prompt tokens that a step computes, padding included."""
_GREEDY = 1e-6
"""Temperature of greedy answers: as a number above 0 it needs no other program than the sampled ones."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A sampled answer.

    Attributes:
      tokens: its token ids, the stop token included if there is one.
      log_probabilities: of each of these tokens, with which it was sampled.
      text_tokens: number of tokens without the stop token.
    """

    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    text_tokens: int

    @property
    def truncated(self) -> bool:
        """True if the answer reached the token limit, and so has no stop token."""
        return self.text_tokens == len(self.tokens)


class Sampler:
    """Samples answers with the current weights of a trainer. The shapes of its programs never change.

    Weights stay on the devices: they are cast to the compute dtype and unrolled there, adapters are merged, and they
    are laid out as the engine needs them, whole on each device but for tensor parallelism; there, projections of the
    same input are one layer. Between rollouts they and the cache of keys and values are freed.

    The tokens of a prompt are computed once, except for those after its last full page of the cache, however many
    answers it has.

    Args:
      trainer: trains the model.
      config: sizes.
      prompts: number of prompts of a rollout.
      answers: number of answers of a rollout.
      requests: largest number of answers that are asked for at a time, those of an evaluation included.
      longest: number of tokens of the longest prompt.
      context: largest number of tokens of a prompt with its answer.
      vocab_size: number of ids that may be sampled.
      stop_tokens: ids that end an answer.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: SamplerConfig,
        *,
        prompts: int,
        answers: int,
        requests: int,
        longest: int,
        context: int,
        vocab_size: int,
        stop_tokens: frozenset[int],
    ):
        self._trained = trainer.module
        model = self._trained.merge(self._trained.abstract_params, self._trained.abstract_non_params)
        self._source = model.config
        self._target = self._source.model_copy(update={"scan_layers": False})
        mesh = trainer.rules.mesh
        self._joins = mesh.shape["tensor"] == 1
        self._dtype = model.dtype
        self._unjoined = ModuleArrays(self._make_unjoined)
        self._module = ModuleArrays(self._make_joined) if self._joins else self._unjoined
        parallel = ParallelConfig(data=mesh.size // mesh.shape["tensor"], tensor=mesh.shape["tensor"])
        self._rules = make_rules(make_mesh(parallel, list(mesh.devices.flat)))
        self._non_params = initial_variables(self._module)
        placed = jax.tree.map(lambda x: x.sharding, cast_shapes(self._module, self._rules))
        self._handed_over = jax.jit(self._hand_over, out_shardings=placed)
        self._config = config
        self._context = context
        unit = self._rules.degree(self._rules.table["batch"])
        slots = -(-(config.slots or min(answers, _MOST_SLOTS)) // unit) * unit
        self._engine_config = EngineConfig(
            slots=slots,
            context=context,
            page_size=config.page_size,
            pages=slots * -(-context // config.page_size),
            queue=requests,
            decode_steps=config.decode_steps,
            steps_ahead=1,
        )
        self._longest = longest
        self._prompts = prompts
        self._vocab_size = vocab_size
        self._stop_tokens = stop_tokens
        self._engine: Engine | None = None
        self._shares = False
        """True: answers share the pages of their prompt."""

    def _make_unjoined(self, rngs: nnx.Rngs) -> Transformer:
        return Transformer(self._target, rngs, dtype=self._dtype)

    def _make_joined(self, rngs: nnx.Rngs) -> Transformer:
        model = self._make_unjoined(rngs)
        join_projections(model)
        return model

    def _hand_over(self, params: Dict, non_params: Dict) -> Dict:
        """Return the parameters of the engine's model from those of the trained one. Traceable."""
        base, adapters = self._trained.split_adapters(params)
        if adapters:
            base = self._trained.merge_adapters(base, adapters, non_params)
        base, _ = self._trained.split_companions(base)
        if not same_stacking(self._source, self._target):
            base = restack(base, self._source, self._target)
        cast = cast_matrices(self._unjoined, base, self._rules)
        if not self._joins:
            return cast
        joined = self._unjoined.merge(cast, self._non_params)
        join_projections(joined)
        return self._module.split(joined)[0]

    def load(self, state: TrainState) -> None:
        """Take the weights of a train state, and make room for keys and values. The state may be donated afterwards."""
        with jax.set_mesh(self._rules.mesh):
            params = self._handed_over(state.params, state.non_params)
        if self._engine is None:
            model = ModelOnMesh(self._module, params, self._non_params, self._rules)
            self._shares = shares_pages(model) and self._longest > self._config.page_size
            self._engine = Engine(
                model,
                self._engine_config,
                vocab_size=self._vocab_size,
                stop_tokens=self._stop_tokens,
                shapes=self._step_shapes(model.batch_unit),
                make_programs=ScoredPrograms,
                warm_up=False,
                start=False,
            )
            return
        self._engine.model.load(params, self._non_params)
        self._engine.programs.allocate()

    def unload(self) -> None:
        """Free the weights and the cache until `load` is called again."""
        if self._engine is not None:
            self._engine.pool.clear_cache()
            self._engine.programs.free()
            self._engine.model.unload()

    @property
    def compiled(self) -> int:
        """Number of programs that were compiled so far."""
        return 0 if self._engine is None else self._engine.programs.compiled

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        temperatures: Sequence[float],
        seeds: Sequence[int],
    ) -> list[Answer]:
        """Return an answer to each prompt; `load` was called before.

        Args:
          prompts: token ids.
          max_tokens: token limit of each answer, its stop token included.
          temperatures: divisor of the logits of each answer; 0 takes the likeliest tokens.
          seeds: an answer depends on its seed, its prompt and the weights alone (up to rounding).
        """
        assert self._engine is not None, "load weights first"
        engine = self._engine
        asked = list(zip(prompts, max_tokens, temperatures, seeds, strict=True))
        first = self._first_of_each(prompts)
        requests: dict[int, Request] = {}

        def submit(number: int) -> None:
            prompt, most, temperature, seed = asked[number]
            sampling = Sampling(max(temperature, _GREEDY))
            requests[number] = engine.submit(prompt, most, sampling, seed=seed)

        for number in first:
            submit(number)
        while any(request.filled < request.target for request in requests.values()):
            engine.step()
        for number in range(len(asked)):
            if number not in requests:
                submit(number)
        while engine.step():
            pass
        answers = []
        for _, request in sorted(requests.items()):
            tokens = request.result()
            ended = [] if request.stop_token is None else [request.stop_token]
            answers.append(Answer((*tokens, *ended), tuple(request.log_probabilities), len(tokens)))
        return answers

    def _step_shapes(self, unit: int) -> StepShapes:
        """Return the shapes of the engine's steps: all answers or, towards the end, a quarter; many prompts at a time.

        Args:
          unit: number of devices that the rows are split over.
        """
        slots = self._engine_config.slots

        def rows_of(width: int) -> int:
            return min(slots, max(1, _STEP_TOKENS // (width * unit)) * unit)

        width = min(self._longest, _STEP_TOKENS)
        rows = rows_of(width)
        chunks = set[ChunkShape]()
        if self._shares:
            rows = min(rows, -(-self._prompts // unit) * unit)
            page = self._config.page_size
            chunks.add(ChunkShape(rows_of(page), page))  # ends of prompts, whose other tokens are in the cache
        chunks |= {ChunkShape(rows, width), ChunkShape(_split(rows, 8, unit), width)}
        ordered = sorted(chunks, key=lambda shape: (shape.rows * shape.width, shape.width))
        return StepShapes(tuple(sorted({slots, _split(slots, 4, unit)})), tuple(ordered), constant_steps=True)

    def _first_of_each(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Return the numbers of the answers that are the first to their prompts, among those that start at once.

        Other answers find the tokens of their prompts in the cache if they start later. Empty: none can.
        """
        if not self._shares:
            return []
        numbers: dict[tuple[int, ...], int] = {}
        for number, prompt in enumerate(prompts[: self._engine_config.slots]):
            numbers.setdefault(tuple(prompt), number)
        return [*numbers.values()] if len(numbers) < len(prompts) else []


def _split(rows: int, parts: int, unit: int) -> int:
    """Return a part of the rows that the devices divide, at least 2; all of them if they are few."""
    return rows if rows < 2 * parts else max(2, -(-rows // parts // unit) * unit)
