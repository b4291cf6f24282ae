"""The engine's programs are compiled in threads at its start, each once, and no request compiles anything."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxstack.decoding import compilation, runner
from jaxstack.decoding.compilation import ThreadedCompiler
from jaxstack.decoding.engine import Engine, EngineClosed
from jaxstack.decoding.rows import Column
from jaxstack.decoding.runner import Runner
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.step_shapes import ChunkShape
from jaxstack.serve.config import EngineConfig
from tests.decoding.test_decode import open_decoder
from tests.marks import longer
from tests.serve.test_engine import SAMPLINGS, EvenOnly, prompts
from tests.serve.test_states import open_model
from tests.serve.tiny import CONFIG, open_tiny

EVENTS = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")
SIZES = {"slots": 4, "page_size": 4, "chunk": 16}


@pytest.fixture
def compiled() -> Iterator[list[tuple[str, str]]]:
    """(event, name of its thread) of each program that jax lowers, and of each that XLA compiles."""
    found = list[tuple[str, str]]()

    def listen(event: str, seconds: float, **_: object) -> None:
        if event in EVENTS:
            found.append((event.split("/")[-1].split("_")[0], threading.current_thread().name.rstrip("_0123456789")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def persistent_cache(tmp_path: Path) -> Iterator[None]:
    """JAX's compilation cache in an empty directory, which keeps all programs."""
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: jax.config.values[name] for name in settings}
    for values in (settings, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is settings:
            yield


def open_halves() -> Engine:
    """Two devices, of which a step of 8 tokens or more runs on two halves."""
    model = open_decoder(CONFIG.model_copy(update={"num_layers": 2}), tensor=2)
    return Engine(model, EngineConfig(**SIZES, half_batches_from=8), warm_up=False)


def open_draft(together: int = 1) -> Engine:
    draft = open_tiny(seed=1, config=CONFIG.model_copy(update={"num_layers": 2}))
    config = EngineConfig(**SIZES, draft_tokens=2, draft_layers_together=together)
    return Engine(open_tiny(), config, draft=draft, warm_up=False)


ENGINES: dict[str, Callable[[], Engine]] = {
    "alone": lambda: Engine(open_tiny(), EngineConfig(**SIZES), warm_up=False),
    "ngram": lambda: Engine(open_tiny(), EngineConfig(**SIZES, draft_tokens=2), warm_up=False),
    "draft": open_draft,
    "together": lambda: open_draft(together=2),
    "halves": open_halves,
    "one step": lambda: Engine(open_tiny(), EngineConfig(**SIZES, decode_steps=1), warm_up=False),
}


@pytest.mark.longer
@pytest.mark.parametrize("name", ["alone", *longer("ngram", "draft", "together", "halves", "one step")])
def test_each_program_is_compiled_once_in_a_thread_and_none_afterwards(name, compiled):
    """Its first call for the timing, and requests of all kinds, find the compiled program in jit's cache."""
    with ENGINES[name]() as engine:
        compiled.clear()
        engine.warm_up()
        count = engine.programs.compiled
        assert count > 10 and sorted(set(compiled)) == [("backend", "jaxstack compiler"), ("jaxpr", "MainThread")]
        assert [event for event, _ in compiled].count("backend") == len(compiled) - count == count
        compiled.clear()
        for turn in range(2):
            handles = [
                engine.submit(prompt, 12, SAMPLINGS[i % 5], seed=i, constraint=EvenOnly(9) if turn and i % 2 else None)
                for i, prompt in enumerate(prompts([3, 30, 16, 50, 1, 7]))
            ]
            assert all(handle.result() for handle in handles)
        assert engine.submit([1, 2], 9, Sampling(temperature=0)).result()
        assert not compiled and engine.programs.compiled == count


GRADUAL = {
    "alone": {},
    "ngram": {"draft_tokens": 2},
    "ngram always": {"draft_tokens": 2, "drafts": "always"},
    "draft": {"draft_tokens": 2},
    "adapters": {"adapters": 1},
}


@pytest.mark.longer
@pytest.mark.parametrize("name", ["alone", *longer("ngram", "ngram always", "draft", "adapters")])
def test_a_gradual_warm_up_begins_with_few_programs_and_ends_with_all(name, compiled):
    """Requests meanwhile get their answers, also those that need a program which is not compiled yet."""
    config = EngineConfig(**SIZES, **GRADUAL[name])
    draft = open_tiny(seed=1) if name == "draft" else None
    with Engine(open_tiny(), config, draft=draft, warm_up=False) as whole:
        handles = [whole.submit(prompt, 12, Sampling(temperature=0)) for prompt in prompts([3, 30, 16])]
        texts = [handle.result() for handle in handles]
        whole.warm_up()
        count = whole.programs.compiled
    with Engine(open_tiny(), config, draft=draft, warm_up="first") as engine:
        first = engine.programs.compiled
        even = engine.submit([1, 2, 3], 9, constraint=EvenOnly(9))
        handles = [engine.submit(prompt, 12, Sampling(temperature=0)) for prompt in prompts([3, 30, 16])]
        assert [handle.result() for handle in handles] == texts
        assert len(even.result()) == 9 and not any(token % 2 for token in even.result())
        wait_until(lambda: engine.warmed_up)
        assert first < count / 2 and engine.programs.compiled == count
        compiled.clear()
        assert [engine.submit(prompt, 12, Sampling(temperature=0)).result() for prompt in prompts([3, 30, 16])] == texts
        assert not compiled


@pytest.mark.longer
def test_with_a_warm_cache_an_engine_starts_with_few_programs_and_with_a_cold_one_with_all(persistent_cache, compiled):
    config = EngineConfig(**SIZES)
    answers = list[list[int]]()
    for started in ("cold", "warm"):
        jax.clear_caches()
        with Engine(open_tiny(), config, warm_up="cached") as engine:
            assert engine.warmed_up == (started == "cold")
            assert (engine.programs.compiled > 10) == (started == "cold")
            if started == "cold":
                compiled.clear()
            answers.append(engine.submit([1, 2, 3], 12, Sampling(temperature=0)).result())
            assert started == "warm" or not compiled
            wait_until(lambda engine=engine: engine.warmed_up)
    assert answers[0] == answers[1]


def test_requests_that_need_further_programs_are_overtaken_until_these_are_compiled(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(ThreadedCompiler, "has_room", False)
        engine = Engine(open_tiny(), EngineConfig(**SIZES), warm_up="first")
        even = engine.submit([1, 2, 3], 9, constraint=EvenOnly(9))
        assert len(engine.submit([4, 5], 9, Sampling(temperature=0)).result()) == 9
        assert even.times.started is None and engine.waiting == 1
    with engine:
        assert len(even.result()) == 9


@pytest.mark.longer
@pytest.mark.parametrize("settings", [{}, GRADUAL["ngram always"], {"decode_steps": 1}], ids=str)
def test_the_first_programs_suffice_for_plain_requests(settings, monkeypatch):
    """Also for the last token of an answer, which a step by itself computes where all steps have drafts."""
    monkeypatch.setattr(ThreadedCompiler, "has_room", False)
    with Engine(open_tiny(), EngineConfig(**SIZES, **settings), warm_up="first") as engine:
        count = engine.programs.compiled
        for number, sampling in [(12, SAMPLINGS[1]), (2, Sampling(temperature=0)), (1, SAMPLINGS[2])]:
            assert len(engine.submit([1, 2] * 10, number, sampling).result()) == number
        assert engine.programs.compiled == count


@pytest.mark.longer
def test_requests_are_answered_between_the_timings_of_steps(monkeypatch):
    asked = threading.Event()
    answered = list[int]()
    time_chunks = Runner._time_chunks

    def timed(runner: Runner, shape: ChunkShape, chunks: np.ndarray) -> float:
        assert asked.wait(240)
        answered.append(engine.stats.generated_tokens)
        return time_chunks(runner, shape, chunks)

    monkeypatch.setattr(Runner, "_time_chunks", timed)
    config = EngineConfig(slots=4, page_size=4, chunk=128, chunk_slowdown=1000.0)
    with Engine(open_tiny(), config, warm_up="first") as engine:
        # The first turn times a decode step, and takes the page that chunks are timed on.
        wait_until(lambda: engine.pool.used == 1)
        first = engine.submit([4, 5], 9, Sampling(temperature=0))
        asked.set()
        assert len(first.result()) == 9
        wait_until(lambda: engine.warmed_up)
        assert len(answered) == len(engine.scheduler.shapes) == 3 and answered[-1] > 0
        assert engine.pool.used == 0


@pytest.mark.longer
@pytest.mark.parametrize("model", ["paged", *longer("states")])
def test_a_gradual_warm_up_ends_though_there_is_always_a_request(model, monkeypatch):
    """Steps are timed beside requests; where layers have states, only while the slot that is overwritten is free."""
    beside = list[int]()
    time_chunks = Runner._time_chunks

    def timed(runner: Runner, shape: ChunkShape, chunks: np.ndarray) -> float:
        beside.append(engine.running)
        return time_chunks(runner, shape, chunks)

    monkeypatch.setattr(Runner, "_time_chunks", timed)
    decoder = open_tiny() if model == "paged" else open_model("sums")
    with Engine(decoder, EngineConfig(**SIZES), warm_up="first") as engine:
        texts = set[tuple[int, ...]]()
        running = [engine.submit([4, 5], 200, Sampling(temperature=0)) for _ in range(2)]
        until = time.monotonic() + 240
        while not engine.warmed_up and time.monotonic() < until:
            running.append(engine.submit([4, 5], 200, Sampling(temperature=0)))
            texts.add(tuple(running.pop(0).result()))
        assert engine.warmed_up and any(beside) and len(texts) == 1
        assert {tuple(request.result()) for request in running} == texts and engine.pool.used == 0


def test_steps_are_timed_until_one_is_too_slow(monkeypatch):
    """Those with more tokens would stop the answers for longer, and be left out nevertheless, as would deeper ones."""
    short, narrow, half, whole = ChunkShape(1, 4), ChunkShape(2, 4), ChunkShape(1, 8), ChunkShape(1, 16)
    timed = list[tuple[ChunkShape, int]]()

    def time_chunks(self: Runner, shape: ChunkShape, chunks: np.ndarray) -> float:
        timed.append((shape, int(chunks[0, Column.START])))
        assert {*chunks[:, Column.SLOT]} == {3}
        return 0.3 * shape.tokens

    monkeypatch.setattr(runner, "seconds_of", lambda run: 1.0)
    monkeypatch.setattr(runner, "timed_depths", lambda longest: [0.5, 1.0])
    monkeypatch.setattr(Runner, "_time_chunks", time_chunks)
    with Engine(open_tiny(), EngineConfig(**SIZES), warm_up=False) as engine:
        timing = Runner.time_steps(engine._runner, (short, narrow, half, whole), 0, 2)
        with pytest.raises(StopIteration) as ended:
            for _ in range(9):
                next(timing)
    assert timed == [(short, 124), (narrow, 124), (half, 120), (short, 252)]
    assert ended.value.value.shapes_within(2, 0.5) == ended.value.value.shapes_within(2, 1) == (short,)


class SimulatedDevice:
    """A clock, and a device that computes the calls of a program in turn while the host launches the next ones."""

    def __init__(self, launch: float, compute: float):
        self.launch, self.compute = launch, compute
        self.now = self.free = 0.0

    def run(self) -> "SimulatedDevice":
        self.now += self.launch
        self.free = max(self.free, self.now) + self.compute
        return self

    def block_until_ready(self) -> None:
        self.now = max(self.now, self.free)


@pytest.mark.parametrize(("launch", "compute", "seconds"), [(2, 5, 5), (6, 5, 6), (2, 30, 32)])
def test_steps_are_timed_as_they_follow_one_another(launch, compute, seconds, monkeypatch):
    """The launch of short ones does not count as far as the device computes meanwhile."""
    device = SimulatedDevice(launch / 1e3, compute / 1e3)
    monkeypatch.setattr(runner.time, "perf_counter", lambda: device.now)
    assert runner.seconds_of(device.run) == pytest.approx(seconds / 1e3)


def test_requests_that_wait_for_programs_end_when_the_engine_is_closed(monkeypatch):
    monkeypatch.setattr(ThreadedCompiler, "has_room", False)
    engine = Engine(open_tiny(), EngineConfig(**SIZES), warm_up="first")
    even = engine.submit([1, 2, 3], 9, constraint=EvenOnly(9))
    wait_until(lambda: bool(engine.scheduler.waiting))
    assert not engine.drain(0.1)
    engine.close()
    assert even.finish_reason == "cancelled"


@pytest.mark.longer
def test_an_engine_that_drains_compiles_what_its_requests_wait_for():
    with Engine(open_tiny(), EngineConfig(**SIZES), warm_up="first") as engine:
        even = engine.submit([1, 2, 3], 9, constraint=EvenOnly(9))
        assert engine.drain(240) and len(even.result()) == 9


def test_requests_that_are_submitted_together_start_together_during_the_warm_up(monkeypatch):
    monkeypatch.setattr(ThreadedCompiler, "has_room", False)
    with Engine(open_tiny(), EngineConfig(**SIZES), warm_up="first") as engine:
        with engine.together():
            first = engine.submit([1, 2, 3], 9, Sampling(temperature=0))
            time.sleep(0.2)
            assert first.times.started is None
        assert len(first.result()) == 9


def test_an_engine_that_is_closed_during_its_warm_up_compiles_no_more():
    engine = Engine(open_tiny(), EngineConfig(**SIZES), warm_up="first")
    first = engine.programs.compiled
    engine.close()
    assert engine.programs.compiled < first + 12
    with pytest.raises(EngineClosed):
        engine.submit([1], 1)


def wait_until(condition: Callable[[], bool], seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def make_programs() -> tuple[ThreadedCompiler, Callable[..., jax.Array], Callable[..., jax.Array]]:
    compiler = ThreadedCompiler()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    fill = compiler.jit(
        lambda value, *, cache: (cache + value).at[0].set(7), donate_argnames="cache", out_shardings=sharding
    )
    power = compiler.jit(lambda x, times: jnp.prod(jnp.stack([x] * times)), static_argnames="times")
    return compiler, fill, power


@pytest.mark.quick
def test_calls_compile_at_the_same_time_and_run_nothing(monkeypatch, compiled):
    """The second program takes the first one's output; each compilation waits until the other has begun."""
    monkeypatch.setattr(compilation, "_THREADS", 2)
    together = threading.Barrier(2, timeout=60)
    compile_one = jax.stages.Lowered.compile

    def compile_together(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        together.wait()
        return compile_one(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_together)
    compiler, fill, power = make_programs()
    cache = jax.device_put(np.zeros(5, np.float32), jax.devices()[0])
    compiled.clear()
    with compiler.compiling():
        for value in (1, 2):
            filled = fill(np.float32(value), cache=cache)
            assert isinstance(filled, jax.ShapeDtypeStruct) and filled.shape == (5,)
            assert power(filled, times=3).shape == ()
    assert len(compiled) == 4 and not cache.is_deleted()
    filled = fill(np.float32(1), cache=cache)
    assert cache.is_deleted() and filled.tolist() == [7, 1, 1, 1, 1]
    assert np.asarray(power(filled, times=3)).tolist() == 343 and len(compiled) == 4
    assert np.asarray(power(filled, times=2)).tolist() == 49 and len(compiled) == 6  # compiled by its call


def test_an_error_of_a_compilation_is_raised_and_the_next_calls_run(monkeypatch):
    compiler, fill, power = make_programs()
    with monkeypatch.context() as patched:
        patched.setattr(jax.stages.Lowered, "compile", lambda _: jnp.zeros(3).reshape(2))
        with pytest.raises(TypeError, match="reshape"), compiler.compiling():
            power(np.ones(3, np.float32), times=3)
    assert power(np.ones(3, np.float32), times=3) == 1
    with pytest.raises(ZeroDivisionError), compiler.compiling():
        1 / 0  # noqa: B018
    assert fill(np.float32(2), cache=jnp.zeros(2)).tolist() == [7, 2]


def test_what_fails_beside_others_is_compiled_again_by_itself(monkeypatch, compiled):
    """As where so many processes of the compiler cannot be started at once."""
    compile_one = jax.stages.Lowered.compile

    def compile_alone(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        if threading.current_thread() is not threading.main_thread():
            raise jax.errors.JaxRuntimeError("INTERNAL: Failed to launch ptxas")
        return compile_one(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_alone)
    compiler, _, power = make_programs()
    with compiler.compiling():
        power(np.ones(3, np.float32), times=3)
    compiled.clear()
    assert power(np.full(3, 2, np.float32), times=3).tolist() == 512 and not compiled


def test_an_engine_whose_compilation_fails_raises_the_error_at_its_start(monkeypatch):
    def fail(_: jax.stages.Lowered) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        Engine(open_tiny(), EngineConfig(**SIZES))
