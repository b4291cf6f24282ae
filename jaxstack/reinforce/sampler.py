"""Samples answers with the serving engine, in the trainer's process and with the trainer's weights."""

import dataclasses
from collections.abc import Sequence

import jax

from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decode import ModelOnMesh, cast_matrices, cast_shapes
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.step import ScoredPrograms
from jaxstack.decoding.step_shapes import ChunkShape, StepShapes
from jaxstack.models import Transformer
from jaxstack.models.restack import restack, same_stacking
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
    are laid out as the engine needs them, whole on each device but for tensor parallelism. Between rollouts they and
    the cache of keys and values are freed.

    Args:
      trainer: trains the model.
      config: sizes.
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
        dtype = model.dtype
        self._module = ModuleArrays(lambda rngs: Transformer(self._target, rngs, dtype=dtype))
        mesh = trainer.rules.mesh
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
        self._shapes = _step_shapes(slots, unit, longest)
        self._vocab_size = vocab_size
        self._stop_tokens = stop_tokens
        self._engine: Engine | None = None

    def _hand_over(self, params: Dict, non_params: Dict) -> Dict:
        """Return the parameters of the engine's model from those of the trained one. Traceable."""
        base, adapters = self._trained.split_adapters(params)
        if adapters:
            base = self._trained.merge_adapters(base, adapters, non_params)
        base, _ = self._trained.split_companions(base)
        if not same_stacking(self._source, self._target):
            base = restack(base, self._source, self._target)
        return cast_matrices(self._module, base, self._rules)

    def load(self, state: TrainState) -> None:
        """Take the weights of a train state, and make room for keys and values. The state may be donated afterwards."""
        with jax.set_mesh(self._rules.mesh):
            params = self._handed_over(state.params, state.non_params)
        if self._engine is None:
            self._engine = Engine(
                ModelOnMesh(self._module, params, self._non_params, self._rules),
                self._engine_config,
                vocab_size=self._vocab_size,
                stop_tokens=self._stop_tokens,
                shapes=self._shapes,
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
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperatures: Sequence[float], seeds: Sequence[int]
    ) -> list[Answer]:
        """Return an answer to each prompt; `load` was called before.

        Args:
          prompts: token ids.
          max_tokens: token limit of an answer, its stop token included.
          temperatures: divisor of the logits of each answer; 0 takes the likeliest tokens.
          seeds: an answer depends on its seed, its prompt and the weights alone (up to rounding).
        """
        assert self._engine is not None, "load weights first"
        engine = self._engine
        requests = [
            engine.submit(prompt, max_tokens, Sampling(max(temperature, _GREEDY)), seed=seed)
            for prompt, temperature, seed in zip(prompts, temperatures, seeds, strict=True)
        ]
        while engine.step():
            pass
        answers = []
        for request in requests:
            tokens = request.result()
            ended = [] if request.stop_token is None else [request.stop_token]
            answers.append(Answer((*tokens, *ended), tuple(request.log_probabilities), len(tokens)))
        return answers


def _step_shapes(slots: int, unit: int, longest: int) -> StepShapes:
    """Return the shapes of the engine's steps: all answers or, towards the end, a quarter; many prompts at a time.

    Args:
      slots: number of answers that are sampled at a time.
      unit: number of devices that the rows are split over.
      longest: number of tokens of the longest prompt.
    """
    width = min(longest, _STEP_TOKENS)
    rows = min(slots, max(1, _STEP_TOKENS // (width * unit)) * unit)
    counts = {rows, _split(rows, 8, unit)}
    decode = {slots, _split(slots, 4, unit)}
    return StepShapes(
        tuple(sorted(decode)), tuple(ChunkShape(count, width) for count in sorted(counts)), constant_steps=True
    )


def _split(rows: int, parts: int, unit: int) -> int:
    """Return a part of the rows that the devices divide, at least 2; all of them if they are few."""
    return rows if rows < 2 * parts else max(2, -(-rows // parts // unit) * unit)
