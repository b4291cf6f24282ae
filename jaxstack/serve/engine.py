"""Data-parallel serving: one engine for each replica of the model, and distribution of requests over them."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from jaxstack.decoding.cache_room import choose_room
from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.decoding.engine import Engine, EngineBusy
from jaxstack.decoding.parted import PartPrograms
from jaxstack.decoding.pipeline import PipelineDecoder
from jaxstack.decoding.requests import Request
from jaxstack.decoding.runner import EngineState
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.warm_up import WarmUp
from jaxstack.errors import ConfigError
from jaxstack.models.adapter_stack import AdapterMatrices
from jaxstack.serve.config import EngineConfig


class EngineGroup:
    """Serves several replicas of a model, an engine for each; a request goes to the engine with the fewest requests.

    Args:
      engines: the engines, of equal configuration.
    """

    def __init__(self, engines: Sequence[Engine]):
        self.engines = list(engines)
        first = self.engines[0]
        self.context = first.context
        self.stop_tokens = first.stop_tokens
        self.most_requests = sum(engine.most_requests for engine in self.engines)

    def __enter__(self) -> "EngineGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling | None = None, **options: Any
    ) -> Request:
        """Submit a request to the engine with the fewest requests; arguments and result are as in `Engine.submit`."""
        return self._choose(lambda engine: engine.submit(prompt, max_tokens, sampling, **options))

    def embed(self, prompt: Sequence[int], **options: Any) -> Request:
        """Submit a prompt to the engine with the fewest requests, as `Engine.embed` does."""
        return self._choose(lambda engine: engine.embed(prompt, **options))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Submit the requests of this `with` block together, as `Engine.together` does."""
        with contextlib.ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.together())
            yield

    def load_adapter(self, name: str, matrices: AdapterMatrices) -> None:
        """Load an adapter into all engines, or into none, as `Engine.load_adapter` does."""
        for number, engine in enumerate(self.engines):
            try:
                engine.load_adapter(name, matrices)
            except ConfigError:
                for loaded in self.engines[:number]:
                    loaded.unload_adapter(name)
                raise

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter, as `Engine.unload_adapter` does."""
        for engine in self.engines:
            engine.unload_adapter(name)

    @property
    def adapter_names(self) -> Sequence[str]:
        """Names of the adapters that all engines have."""
        return self.engines[-1].adapter_names

    def _choose(self, submit: Callable[[Engine], Request]) -> Request:
        *others, last = sorted(self.engines, key=lambda engine: engine.running + engine.waiting)
        for engine in others:
            try:
                return submit(engine)
            except EngineBusy:
                continue
        return submit(last)

    @property
    def failure(self) -> str | None:
        """Error message of the first engine that has failed; None if all engines work."""
        return next((engine.failure for engine in self.engines if engine.failure is not None), None)

    @property
    def state(self) -> EngineState:
        """Numbers of requests, KV-cache pages and tokens, summed over all engines."""
        states = [engine.state for engine in self.engines]
        return sum(states[1:], states[0])

    def close(self) -> None:
        """Cancel all requests and close all engines."""
        for engine in self.engines:
            engine.close()


def open_engine(
    model: ModelOnMesh,
    config: EngineConfig | None = None,
    *,
    vocab_size: int | None = None,
    stop_tokens: Collection[int] = (),
    draft: ModelOnMesh | None = None,
    warm_up: WarmUp = "all",
) -> Engine | EngineGroup:
    """Start and return an `Engine` that serves a model, or an `EngineGroup` if it has data-parallel replicas or stages.

    Several engines compile all of their programs first: they would trace the others at the same time.

    Raises:
      ConfigError: as `Engine`, or a setting is one that a pipeline does not have.
    """
    check_settings(model, config or EngineConfig(), draft)
    of_several: WarmUp = "all" if warm_up else False
    if isinstance(model, PipelineDecoder):
        each = _for_each_group(model, config or EngineConfig())
        options = {"vocab_size": vocab_size, "stop_tokens": stop_tokens, "warm_up": of_several}
        return EngineGroup([Engine(model, each, make_programs=PartPrograms, **options) for _ in range(model.groups)])
    models = model.split_replicas()
    drafts = [None] * len(models) if draft is None else draft.split_replicas()
    engines = [
        Engine(
            m,
            config,
            vocab_size=vocab_size,
            stop_tokens=stop_tokens,
            draft=d,
            warm_up=warm_up if len(models) == 1 else of_several,
        )
        for m, d in zip(models, drafts, strict=True)
    ]
    return engines[0] if len(engines) == 1 else EngineGroup(engines)


def check_settings(model: ModelOnMesh, config: EngineConfig, draft: ModelOnMesh | None) -> None:
    """Check that a model is served with settings that its programs have.

    Raises:
      ConfigError: it has stages, and there are drafts, adapters or half-batches.
    """
    if not isinstance(model, PipelineDecoder):
        return
    wrong = {
        "a draft model (--draft)": draft is not None,
        "engine.draft_tokens": config.draft_tokens > 0,
        "engine.adapters": config.adapters > 0,
        "engine.half_batches_from": config.half_batches_from is not None,
    }
    if found := [name for name, given in wrong.items() if given]:
        raise ConfigError(f"a pipeline is served without {found[0]}; leave it out, or set parallel.pipeline=1.")


def _for_each_group(model: PipelineDecoder, config: EngineConfig) -> EngineConfig:
    """Return the settings of the engine of each group of requests of a pipeline, which share slots and caches."""
    room = choose_room([model], config)
    groups = model.groups
    sizes = {
        "slots": -(-room.slots // groups),
        "pages": max(1, room.pages // groups),
        "snapshots": -(-room.snapshots // groups),
        "decode_steps": 1,
    }
    return config.model_copy(update=sizes)
