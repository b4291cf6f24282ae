"""Samples answers with the serving engine, in the trainer's process and with the trainer's weights."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxstack.decoding.cache_room import has_pages, shares_pages
from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decode import ModelOnMesh, cast_matrices, cast_shapes, on_replica
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.expert_programs import ExpertPrograms
from jaxstack.decoding.requests import Request
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.step import ScoredPrograms
from jaxstack.decoding.step_shapes import ChunkShape, StepShapes
from jaxstack.errors import ConfigError
from jaxstack.models import Transformer
from jaxstack.models.restack import join_projections, restack, same_stacking
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.parallel import AxisRules, ParallelConfig, StepLayout, make_mesh, make_rules
from jaxstack.reinforce.config import SamplerConfig
from jaxstack.reinforce.exact import exact_options
from jaxstack.state import TrainState
from jaxstack.stored.model import initial_variables
from jaxstack.trainer import Trainer
from pallas_kernels.batch_invariant.mode import batch_invariant

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
      versions: of each of these tokens, the number of train steps after which the model had the sampler's weights.
      ended: False if it may go on.
      experts: those that the tokens of prompt and answer but the last were sent to, [tokens, layers, k]; None: they are
        not recorded, or the answer has not ended.
    """

    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    text_tokens: int
    versions: tuple[int, ...] = ()
    ended: bool = True
    experts: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def truncated(self) -> bool:
        """True if the answer has no stop token: it reached the token limit, or has not ended."""
        return self.text_tokens == len(self.tokens)


NOT_BEGUN = Answer((), (), 0, (), ended=False)
"""An answer without any tokens so far."""


@dataclasses.dataclass(frozen=True)
class SamplerSize:
    """Largest numbers of what a sampler has to do, from which the shapes of its programs follow.

    Attributes:
      prompts: prompts of a rollout.
      answers: answers of a rollout.
      requests: answers that are asked for at a time, those of an evaluation included.
      longest: tokens of a prompt.
      context: tokens of a prompt with its answer.
    """

    prompts: int
    answers: int
    requests: int
    longest: int
    context: int


class Sampler:
    """Samples answers with the weights of a trainer. The shapes of its programs never change.

    Weights stay on the devices: they are copied, cast to the compute dtype and unrolled there, adapters are merged, and
    they are laid out as the engine needs them, whole on each device but for tensor parallelism; there, projections of
    the same input are one layer. Between rollouts they and the cache of keys and values are freed. Of several
    processes each has a sampler of its own, which uses the process's devices alone. Each device, or group of devices of
    tensor parallelism, has an engine with its share of the answers, so that devices exchange nothing while they sample.

    The tokens of a prompt are computed once, except for those after its last full page of the cache, however many
    answers it has.

    Args:
      trainer: trains the model.
      config: settings of the engine.
      size: the largest rollout and evaluation.
      vocab_size: number of ids that may be sampled.
      stop_tokens: ids that end an answer.
      records_experts: answers have `experts`.
      borrow: returns a context in which a thread other than the trainer's may use the devices; None: they are its own.

    Raises:
      ConfigError: a process has a part of the devices of tensor parallelism.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: SamplerConfig,
        size: SamplerSize,
        *,
        vocab_size: int,
        stop_tokens: frozenset[int],
        records_experts: bool = False,
        borrow: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ):
        self._borrow = borrow or contextlib.nullcontext
        self._version = 0
        self._trained = trainer.module
        model = self._trained.abstract_module
        self._source = model.config
        self._target = self._source.model_copy(update={"scan_layers": False})
        mesh = trainer.rules.mesh
        self._exact = config.exact
        self._joins = mesh.shape["tensor"] == 1 and not config.exact
        self._dtype = model.dtype
        self._unjoined = ModuleArrays(self._make_unjoined)
        self._module = ModuleArrays(self._make_joined) if self._joins else self._unjoined
        everywhere = _engine_rules(list(mesh.devices.flat), mesh.shape["tensor"])
        here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
        self._mesh = everywhere.mesh
        self._rules = _engine_rules(here, mesh.shape["tensor"])
        self._layout = StepLayout(peer_sums=trainer.steps.layout.overlap)
        self._non_params = initial_variables(self._module)
        self._handed_over = jax.jit(self._hand_over, out_shardings=_shardings(self._module, everywhere))
        self._shardings = _shardings(self._module, self._rules)
        self._config = config
        self._size = size
        replicas = self._rules.mesh.shape["data"]
        slots = -(-config.slots // replicas) if config.slots else min(-(-size.answers // replicas), _MOST_SLOTS)
        self._slots = slots
        self._engine_config = EngineConfig(
            slots=slots,
            context=size.context,
            page_size=config.page_size,
            pages=slots * -(-size.context // config.page_size),
            queue=size.requests,
            decode_steps=config.decode_steps,
            steps_ahead=1,
        )
        self._vocab_size = vocab_size
        self._stop_tokens = stop_tokens
        self._records_experts = records_experts
        self._engines: list[Engine] = []
        """An engine for each replica of the model on the process's devices; none before the first weights."""
        self._shares = False
        """True: answers share the pages of their prompt."""

    def _make_unjoined(self, rngs: nnx.Rngs) -> Transformer:
        return Transformer(self._target, rngs, dtype=self._dtype)

    def _make_joined(self, rngs: nnx.Rngs) -> Transformer:
        model = self._make_unjoined(rngs)
        join_projections(model)
        return model

    def _hand_over(self, params: Dict) -> Dict:
        """Return the parameters of the engine's model from those of the trained one. Traceable."""
        base = self._trained.fold(params)
        if not same_stacking(self._source, self._target):
            base = restack(base, self._source, self._target)
        cast = cast_matrices(self._unjoined, base, self._rules)
        if not self._joins:
            return cast
        joined = self._unjoined.merge(cast, self._non_params)
        join_projections(joined)
        return self._module.split(joined)[0]

    def weights(self, state: TrainState) -> Dict:
        """Return a copy of the weights of a train state for `load`. The state may be donated afterwards."""
        with jax.set_mesh(self._mesh):
            weights = self._handed_over(state.params)
        return jax.tree.map(_local_array, weights, self._shardings)

    def load(self, params: Dict, version: int = 0) -> None:
        """Use weights from `weights`, and make room for keys and values.

        Args:
          params: the weights.
          version: number of train steps after which the model had them.
        """
        self._version = version
        with self._borrow():
            self._load(params)

    def _load(self, params: Dict) -> None:
        if not self._engines:
            model = ModelOnMesh(self._module, params, self._non_params, self._rules, self._layout)
            self._engines = [self._open(replica) for replica in model.split_replicas()]
            return
        for engine in self._engines:
            mesh = engine.model.rules.mesh
            engine.model.load(on_replica(params, mesh), on_replica(self._non_params, mesh))
            engine.programs.allocate()

    def _open(self, model: ModelOnMesh) -> Engine:
        if self._records_experts and not has_pages(model):
            raise ConfigError(
                "policy.router_replay records experts beside keys and values, and the model has no layer with keys "
                "and values; set it to false."
            )
        if self._exact:
            model.compiler_options = {**(model.compiler_options or {}), **exact_options()}
        self._shares = shares_pages(model) and self._size.longest > self._config.page_size
        return Engine(
            model,
            self._engine_config,
            vocab_size=self._vocab_size,
            stop_tokens=self._stop_tokens,
            shapes=self._step_shapes(),
            make_programs=ExpertPrograms if self._records_experts else ScoredPrograms,
            warm_up=False,
            start=False,
        )

    def unload(self) -> None:
        """Free the weights and the cache until `load` is called again."""
        with self._borrow():
            for engine in self._engines:
                engine.pool.clear_cache()
                engine.programs.free()
                engine.model.unload()

    @property
    def experts_shape(self) -> tuple[int, int] | None:
        """Layers and experts per token of the answers' `experts`; None: they have none."""
        moe = self._source.moe
        return (self._source.num_layers, moe.num_experts_per_tok) if self._records_experts and moe else None

    @property
    def compiled(self) -> int:
        """Number of programs that were compiled so far."""
        return sum(engine.programs.compiled for engine in self._engines)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        begun: Sequence[Answer] | None = None,
        enough: Callable[[Sequence[bool]], bool] | None = None,
    ) -> list[Answer]:
        """Return an answer to each prompt; `load` was called before.

        Args:
          prompts: token ids.
          max_tokens: token limit of each answer, its stop token included.
          temperatures: divisor of the logits of each answer; 0 takes the likeliest tokens.
          seeds: an answer depends on its seed, its prompt and the weights alone (up to rounding).
          begun: the answers so far, which go on unless they have ended; None: there are none.
          enough: is told after each step of the engine which answers have ended. If it returns True, the others stay as
            they are. None: all of them end.
        """
        assert self._engines, "load weights first"
        asked = list(zip(prompts, max_tokens, temperatures, seeds, strict=True))
        known = begun or [NOT_BEGUN] * len(asked)
        left = [number for number, answer in enumerate(known) if not answer.ended]
        shares = list(zip(self._engines, _split_evenly(left, len(self._engines)), strict=True))
        requests: dict[int, Request] = {}

        def submit(engine: Engine, number: int) -> None:
            prompt, most, temperature, seed = asked[number]
            sampling = Sampling(max(temperature, _GREEDY))
            requests[number] = engine.submit(prompt, most, sampling, seed=seed, answer=known[number].tokens)

        def has_ended(number: int) -> bool:
            return number not in requests or requests[number].finish_reason is not None

        for engine, share in shares:
            for number in self._first_of_each(prompts, share):
                submit(engine, number)
        while any(request.filled < request.target for request in requests.values()):
            self._step()
        for engine, share in shares:
            for number in share:
                if number not in requests:
                    submit(engine, number)
        stopped = False
        while self._step():
            if enough is not None and not stopped and enough([*map(has_ended, range(len(known)))]):
                stopped = True
                for request in requests.values():
                    request.cancel()
        return [
            self._answer_of(requests[number], answer) if number in requests else answer
            for number, answer in enumerate(known)
        ]

    def _answer_of(self, request: Request, begun: Answer) -> Answer:
        """Return the answer of a request that goes on after `begun`."""
        text = request.result()
        tokens = (*text, *([] if request.stop_token is None else [request.stop_token]))
        ended = request.finish_reason != "cancelled"
        experts = None
        if ended and request.experts is not None:
            experts = np.asarray(request.experts)[: len(request.prompt) + len(tokens) - 1].astype(np.int16)
        return Answer(
            tokens,
            (*begun.log_probabilities, *request.log_probabilities),
            len(text),
            (*begun.versions, *[self._version] * len(request.log_probabilities)),
            ended,
            experts,
        )

    def _step(self) -> bool:
        """Run a step of each engine; each waits for the one before its newest, so that all devices work."""
        with self._borrow(), batch_invariant(self._exact):
            return any([engine.step() for engine in self._engines])

    def _step_shapes(self) -> StepShapes:
        """Return the shapes of an engine's steps: all answers or, at the end, a quarter; many prompts at a time."""
        slots = self._slots

        def rows_of(width: int) -> int:
            return min(slots, max(1, _STEP_TOKENS // width))

        width = min(self._size.longest, _STEP_TOKENS)
        rows = rows_of(width)
        chunks = set[ChunkShape]()
        if self._shares:
            rows = min(rows, -(-self._size.prompts // self._rules.mesh.shape["data"]))
            page = self._config.page_size
            chunks.add(ChunkShape(rows_of(page), page))  # ends of prompts, whose other tokens are in the cache
        chunks |= {ChunkShape(rows, width), ChunkShape(_part(rows, 8), width)}
        ordered = sorted(chunks, key=lambda shape: (shape.rows * shape.width, shape.width))
        return StepShapes(tuple(sorted({slots, _part(slots, 4)})), tuple(ordered), constant_steps=True)

    def _first_of_each(self, prompts: Sequence[Sequence[int]], left: Sequence[int]) -> list[int]:
        """Return the numbers of the answers in `left` that are the first to their prompts, of those that start at once.

        Other answers find the tokens of their prompts in the cache if they start later. Empty: none can.
        """
        if not self._shares:
            return []
        numbers: dict[tuple[int, ...], int] = {}
        for number in left[: self._slots]:
            numbers.setdefault(tuple(prompts[number]), number)
        return [*numbers.values()] if len(numbers) < len(left) else []


def _engine_rules(devices: Sequence[Any], tensor: int) -> AxisRules:
    """Return the rules of an engine on these devices: tensor parallelism, and all other devices on `data`."""
    parts = [{device.process_index for device in devices[at : at + tensor]} for at in range(0, len(devices), tensor)]
    if len(devices) % tensor or any(len(part) > 1 for part in parts):
        raise ConfigError(
            f"answers are sampled by each process with its own devices, so that parallel.tensor ({tensor}) must divide "
            f"the number of devices of a process; found {jax.local_device_count()}."
        )
    return make_rules(make_mesh(ParallelConfig(data=len(devices) // tensor, tensor=tensor), devices))


def _shardings(module: ModuleArrays, rules: AxisRules) -> Any:
    return jax.tree.map(lambda x: x.sharding, cast_shapes(module, rules))


def _local_array(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the shards of this process's devices as an array on these devices alone."""
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    return jax.make_array_from_single_device_arrays(
        x.shape, sharding, [shards[device] for device in sharding.addressable_devices]
    )


def _part(rows: int, parts: int) -> int:
    """Return a part of the rows, at least 2; all of them if they are few."""
    return rows if rows < 2 * parts else -(-rows // parts)


def _split_evenly(numbers: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Split numbers into parts of equal size, up to one: neighbours, such as answers to one prompt, stay together."""
    bounds = [part * len(numbers) // parts for part in range(parts + 1)]
    return [numbers[first:end] for first, end in itertools.pairwise(bounds)]
