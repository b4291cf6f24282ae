"""The engine gives each request the tokens of whole forward passes, whatever runs beside it, and leaks no pages."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from flax import nnx

from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine, EngineBusy, EngineClosed
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.step import ScoredPrograms
from jaxstack.errors import ConfigError
from jaxstack.models.attention.block_sparse import BlockSparseAttention, StridedPattern
from jaxstack.models.attention.linear import LinearAttention
from jaxstack.models.attention.longformer import LongformerAttention
from jaxstack.models.attention.performer import PerformerAttention
from jaxstack.models.attention.projected import ProjectedAttention
from jaxstack.serve.config import EngineConfig
from jaxstack.serve.engine import EngineGroup, open_engine
from pallas_kernels import record_choices
from tests.decoding.plain_sampling import sample
from tests.decoding.test_decode import open_decoder
from tests.marks import longer
from tests.serve.tiny import CONFIG as TINY
from tests.serve.tiny import open_tiny

GREEDY = Sampling(temperature=0)
SAMPLINGS = [GREEDY, Sampling(1.0), Sampling(0.8, top_k=10), Sampling(1.1, top_p=0.8), Sampling(0.9, min_p=0.05)]
SMALL = EngineConfig(slots=4, page_size=4, chunk=16)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fp8", *longer("int4")])
def test_answers_over_pages_in_few_bits_are_those_of_the_decoder(name):
    """Pages of chunked prompts, a cached prefix and draft tokens round keys and values as the decoder's cache does."""
    decoder = open_tiny(kv_cache=name)
    asked = prompts([60, 50])
    asked.append([*asked[0][:48], 7, 8])
    config = EngineConfig(slots=2, chunk=16, draft_tokens=2, drafts="always")
    with Engine(decoder, config, warm_up=False) as engine:
        answers = [engine.submit(prompt, 6, GREEDY).result() for prompt in asked]
    assert answers == [expected(decoder, prompt, 6) for prompt in asked]


@pytest.mark.longer
@pytest.mark.parametrize("tensor", [1, 2])
def test_joined_projections_write_keys_and_values_in_fp8(tensor):
    """Rotated and written in one call; under tensor parallelism each device has the pages of its heads."""
    asked = prompts([30, 9])
    alone = open_tiny(kv_cache="fp8")
    served = open_tiny(kv_cache="fp8", tensor=tensor)
    served.join_projections()
    config = EngineConfig(slots=2, chunk=16)
    with record_choices() as choices, Engine(served, config, warm_up=False, start=False) as engine:
        handles = [engine.submit(prompt, 6, GREEDY) for prompt in asked]
        while engine.step():
            pass
        assert [handle.result() for handle in handles] == [expected(alone, prompt, 6) for prompt in asked]
    assert {"rotate_into_cache", "paged_attention"} <= {choice.operation for choice in choices}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return open_decoder()


@pytest.fixture(scope="module")
def engine(decoder):
    with Engine(decoder, SMALL.model_copy(update={"chunk": 64}), warm_up=False) as engine:
        yield engine


def expected(decoder: Decoder, prompt, count: int, sampling: Sampling = GREEDY, seed: int = 0) -> list[int]:
    """The answer by whole forward passes without a cache, each token sampled with its own key by sorting."""
    model = decoder.module.merge(decoder.params, decoder.non_params)
    ids = np.zeros((1, -(-(len(prompt) + count) // 128) * 128), np.int32)
    ids[0, : len(prompt)] = prompt
    with jax.set_mesh(decoder.rules.mesh):
        for number in range(count):
            end = len(prompt) + number
            logits = forward(model, ids)[:, end - 1]
            key = jax.random.fold_in(jax.random.key(seed), number)
            ids[0, end] = sample(logits, key[None], sampling)[0]
    return ids[0, len(prompt) : len(prompt) + count].tolist()


@nnx.jit
def forward(model, ids):
    return model(ids)


def prompts(lengths, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 61, n).tolist() for n in lengths]


@pytest.mark.quick
def test_greedy_answers_are_the_argmax_of_the_full_forward():
    """Two requests at once; then one of which most of the prompt is cached."""
    decoder = open_tiny()
    asked = prompts([60, 50])
    asked.append([*asked[0][:48], 7, 8])
    with Engine(decoder, EngineConfig(slots=2, chunk=128), warm_up=False) as engine:
        handles = [engine.submit(prompt, 4, GREEDY) for prompt in asked]
        answers = [handle.result() for handle in handles]
    assert handles[2].cached_tokens == 48
    assert answers == [expected(decoder, prompt, 4) for prompt in asked]


KINDS = {
    "linear": LinearAttention(),
    "performer": PerformerAttention(),
    "longformer": LongformerAttention(window=20, global_tokens=3),
    "projected": ProjectedAttention(block_size=16, summaries=2),
    "block_sparse": BlockSparseAttention(block_size=16, pattern=StridedPattern(local=2, stride=3)),
}


@pytest.mark.parametrize("name", ["linear", *longer("performer", "longformer", "projected", "block_sparse")])
def test_every_attention_kind_is_served(name):
    """Prompts of several chunks, more requests than slots, a repeated prompt, several decode steps in a program."""
    decoder = open_tiny(config=TINY.model_copy(update={"attention": KINDS[name]}))
    asked = prompts([60, 33, 5, 20])
    asked.append(asked[0])
    config = EngineConfig(slots=2, page_size=4, chunk=16, decode_steps=4)
    with Engine(decoder, config, warm_up=False) as engine:
        handles = [engine.submit(prompt, 4, GREEDY) for prompt in asked]
        assert [handle.result() for handle in handles] == [expected(decoder, prompt, 4) for prompt in asked]
    assert engine.pool.used == 0 and (handles[-1].cached_tokens > 0) == (name == "block_sparse")


def test_each_request_has_its_own_text_at_any_length_and_setting(decoder, engine):
    """Prompts of one token, of several chunks, of whole pages; more requests than slots."""
    settings = [*SAMPLINGS, *SAMPLINGS]
    asked = [(prompt, 9, settings[i], 100 + i) for i, prompt in enumerate(prompts((1, 40, 8, 70, 3, 16, 17)))]
    handles = [engine.submit(prompt, count, sampling, seed=seed) for prompt, count, sampling, seed in asked]
    for handle, request in zip(handles, asked, strict=True):
        assert handle.result() == expected(decoder, *request)
        assert handle.finish_reason == "length"
    assert engine.pool.used == 0 and engine.running == engine.waiting == 0


def test_a_text_depends_on_its_prompt_and_seed_and_not_on_its_neighbours(decoder, engine):
    prompt = prompts([12])[0]
    sampling = Sampling(1.0)
    alone = engine.submit(prompt, 10, sampling, seed=5).result()
    others = [engine.submit(p, 30, sampling, seed=i) for i, p in enumerate(prompts((5, 25, 30), seed=1))]
    beside = [engine.submit(prompt, 10, sampling, seed=seed) for seed in (5, 6)]
    assert beside[0].result() == alone != beside[1].result()
    assert all(len(handle.result()) == 30 for handle in others)


def test_a_repeated_prompt_computes_at_most_a_page_and_a_token(decoder):
    prompt = prompts([65])[0]
    with Engine(decoder, SMALL, warm_up=False) as engine:
        first = engine.submit(prompt, 5, GREEDY).result()
        before = engine.stats.computed_tokens
        handle = engine.submit(prompt, 5, GREEDY)
        assert handle.result() == first == expected(decoder, prompt, 5)
        assert before == 65 and engine.stats.computed_tokens - before <= SMALL.page_size + 1
        assert handle.cached_tokens == 64
        longer = [*prompt, *first]
        assert engine.submit(longer, 5, GREEDY).result() == expected(decoder, longer, 5)
        assert engine.stats.computed_tokens - before <= 2 * (SMALL.page_size + 1) + 1
        programs = engine.stats.programs
        nanoseconds = engine.stats.nanoseconds
        assert programs["decode"] and len(programs) > 1 and set(programs) == set(nanoseconds)
        assert 0 < engine.stats.waiting <= sum(nanoseconds.values())


@pytest.mark.exhaustive
def test_warming_up_again_overwrites_no_cached_page(decoder):
    prompt = prompts([65])[0]
    with Engine(decoder, SMALL, start=False) as engine:
        assert engine.pool.used == 0
        seconds = engine.scheduler.shapes_beside.func.__self__
        assert all(set(found) == set(engine.scheduler.shapes) for found in seconds.chunks.values())
        assert min(seconds.decode, *(min(found.values()) for found in seconds.chunks.values())) > 0
        for _ in range(2):
            handle = engine.submit(prompt, 5, GREEDY)
            while engine.step():
                pass
            assert handle.result() == expected(decoder, prompt, 5)
            engine.warm_up()
        assert handle.cached_tokens == 64


@pytest.mark.exhaustive
def test_too_few_pages_preempt_the_newest_and_change_no_text(decoder):
    """Twelve pages for four requests that need seven each."""
    config = SMALL.model_copy(update={"pages": 12, "context": 40})
    asked = [(prompt, 20, SAMPLINGS[i], i) for i, prompt in enumerate(prompts([8] * 4))]
    with Engine(decoder, config, warm_up=False) as engine:
        handles = [engine.submit(prompt, count, sampling, seed=seed) for prompt, count, sampling, seed in asked]
        for handle, request in zip(handles, asked, strict=True):
            assert handle.result() == expected(decoder, *request)
        assert engine.scheduler.preemptions > 0 and engine.pool.used == 0


def test_cancelled_requests_free_their_pages_and_disturb_nobody(decoder, engine):
    kept = engine.submit(prompts([9])[0], 40, GREEDY)
    cancelled = [engine.submit(prompt, 60, Sampling(1.0)) for prompt in prompts((30, 5, 11, 7), seed=2)]
    first = next(iter(cancelled[0]))
    for handle in cancelled:
        handle.cancel()
    assert all(len(handle.result()) < 60 and handle.finish_reason == "cancelled" for handle in cancelled)
    assert 0 <= first < 61 and kept.result() == expected(decoder, prompts([9])[0], 40)
    kept.cancel()  # nothing is left to cancel
    assert engine.pool.used == 0


def test_a_stop_token_ends_an_answer_and_is_not_part_of_it(decoder, engine):
    prompt = prompts([7])[0]
    whole = expected(decoder, prompt, 12)
    handle = engine.submit(prompt, 12, GREEDY, stop_tokens=[whole[5]])
    assert handle.result() == whole[: whole.index(whole[5])] and handle.finish_reason == "stop"
    assert engine.submit(prompt, 12, GREEDY, stop_tokens=[]).result() == whole


def test_scored_programs_give_the_log_probability_of_each_token(decoder, engine):
    """At the temperature, among all ids, of the stop token too; the tokens are those without scores."""
    stop = engine.submit([3, 1, 2], 12, Sampling(0.7, top_k=5), seed=5).result()[6]
    with Engine(decoder, SMALL, stop_tokens={stop}, make_programs=ScoredPrograms, warm_up=False) as scored:
        requests = [scored.submit([3, 1, 2], 12, Sampling(0.7, top_k=5), seed=seed) for seed in (5, 6)]
        answers = [request.result() for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        found = [*answer, *([] if request.stop_token is None else [request.stop_token])]
        ids = np.zeros((1, 128), np.int32)
        ids[0, : 3 + len(found)] = [3, 1, 2, *found]
        with jax.set_mesh(decoder.rules.mesh):
            logits = forward(decoder.module.merge(decoder.params, decoder.non_params), ids)[0, 2 : 2 + len(found)]
        wanted = jax.nn.log_softmax(logits / 0.7)[np.arange(len(found)), found]
        np.testing.assert_allclose(request.log_probabilities, wanted, atol=1e-5)
    assert requests[0].stop_token == stop


class EvenOnly:
    """Allows even ids, and ends after a given number."""

    def __init__(self, count: int):
        self.left = count

    def fill_mask(self, mask: np.ndarray) -> None:
        mask[:] = 0x55555555

    def accept(self, token: int) -> bool:
        assert token % 2 == 0
        self.left -= 1
        return self.left > 0


def test_a_constraint_limits_its_own_request_alone(decoder, engine):
    prompt = prompts([10])[0]
    free = engine.submit(prompt, 8, Sampling(1.0), seed=3)
    even = engine.submit(prompt, 8, Sampling(1.0), seed=3, constraint=EvenOnly(5))
    assert len(even.result()) == 5 and even.finish_reason == "stop"
    assert free.result() == expected(decoder, prompt, 8, Sampling(1.0), 3)


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 4, "at least one token"),
        ([61], 4, "61 is outside of the model's vocabulary"),
        ([-1], 4, "at least 0; found -1"),
        ([1], 0, "max_tokens must be at least 1"),
        ([1] * 90, 11, "90 tokens, which with 11 new tokens exceeds the context of 100 tokens; at most 10"),
        ([1] * 100, 1, "100 tokens, which with 1 new tokens exceeds the context of 100 tokens; shorten the prompt"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(engine, prompt, count, message):
    with pytest.raises(ConfigError, match=message):
        engine.submit(prompt, count)


def test_a_full_queue_and_a_closed_engine_refuse_requests(decoder):
    engine = Engine(decoder, SMALL.model_copy(update={"queue": 1}), warm_up=False, start=False)
    for _ in range(5):
        engine.submit([1, 2], 2)
    with pytest.raises(EngineBusy, match="engine.queue: 1"):
        engine.submit([1, 2], 2)
    while engine.step():
        pass
    assert engine.drain(1)
    with pytest.raises(EngineClosed, match="shutting down"):
        engine.submit([1, 2], 2)
    engine.close()


def test_a_failure_ends_every_request_with_the_reason(decoder, monkeypatch):
    engine = Engine(decoder, SMALL, warm_up=False, start=False)
    handle = engine.submit([1, 2, 3], 5)

    def fail(*_, **__):
        raise RuntimeError("out of order")

    monkeypatch.setattr(engine.programs, "run", fail)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    thread = threading.Thread(target=engine._run)
    thread.start()
    thread.join()
    with pytest.raises(Exception, match="out of order"):
        handle.result()
    with pytest.raises(EngineClosed, match="out of order"):
        engine.submit([1], 2)


def test_tensor_parallelism_gives_the_same_text(decoder):
    prompt = prompts([20])[0]
    with Engine(open_decoder(tensor=2), SMALL, warm_up=False) as engine:
        assert engine.submit(prompt, 8, GREEDY).result() == expected(decoder, prompt, 8)
        assert engine.submit(prompt, 8, GREEDY).result() == expected(decoder, prompt, 8)
    with pytest.raises(ConfigError, match="splits no batch"):
        Engine(open_decoder(fsdp=2), SMALL)


def test_speculation_changes_no_token_and_accepts_repetitions(decoder):
    """Greedy and sampled, with chunks of other prompts beside it, constraints, preemption and stop tokens."""
    config = SMALL.model_copy(update={"draft_tokens": 3, "drafts": "always", "pages": 30, "context": 90})
    asked = [(prompt * 3, 30, SAMPLINGS[i % 3], i) for i, prompt in enumerate(prompts((2, 5, 9, 12, 1, 20)))]
    with Engine(decoder, config, warm_up=False) as engine:
        handles = [engine.submit(prompt, count, sampling, seed=seed) for prompt, count, sampling, seed in asked]
        even = engine.submit([1, 2, 3, 1, 2], 8, GREEDY, constraint=EvenOnly(5))
        for handle, request in zip(handles, asked, strict=True):
            assert handle.result() == expected(decoder, *request)
        assert len(even.result()) == 5 and engine.pool.used == 0
        assert 0 < engine.stats.accepted_tokens <= engine.stats.draft_tokens
        repeated = engine.submit(asked[0][0], 30, GREEDY)  # over pages that speculation has filled
        assert repeated.result() == expected(decoder, *asked[0])
        steps = engine.stats.steps
        whole = expected(decoder, [7] * 6, 40)
        assert engine.submit([7] * 6, 40, GREEDY).result() == whole
        if len(set(whole)) < 10:  # a loop, as greedy answers of random models mostly are
            assert engine.stats.steps - steps < 40
        handle = engine.submit([7] * 6, 40, GREEDY, stop_tokens=[whole[20]])
        assert handle.result() == whole[: whole.index(whole[20])]


def test_requests_that_are_submitted_together_start_in_one_step(decoder):
    asked = prompts([15, 16, 14])
    with Engine(decoder, SMALL.model_copy(update={"step_tokens": 64}), warm_up=False) as engine:
        with engine.together():
            handles = [engine.submit(prompt, 1, GREEDY) for prompt in asked]
            time.sleep(0.2)
            assert engine.stats.steps == 0 and engine.waiting == 3
        assert [handle.result() for handle in handles] == [expected(decoder, prompt, 1) for prompt in asked]
        assert engine.stats.steps == 1


@pytest.mark.parametrize("group", [False, True])
def test_a_block_of_requests_holds_up_nobody_else(decoder, group):
    """Other threads submit and cancel in it, an error ends it, and so does closing the engine."""
    engine = Engine(decoder, SMALL, warm_up=False)
    with EngineGroup([engine]) if group else engine as served, ThreadPoolExecutor(2) as threads:
        with served.together():
            first = served.submit([1, 2], 3, GREEDY)
            others = list(threads.map(lambda prompt: served.submit(prompt, 4, GREEDY), [[3], [4, 5]], timeout=60))
            threads.submit(others[0].cancel).result(60)
            assert engine.waiting == 3 and engine.stats.steps == 0
            with pytest.raises(ConfigError, match="at least one token"), served.together():
                served.submit([], 1)
            time.sleep(0.2)
            assert engine.stats.steps == 0
        assert first.result() == expected(decoder, [1, 2], 3)
        assert others[1].result() == expected(decoder, [4, 5], 4)
        assert others[0].result() == [] and others[0].finish_reason == "cancelled"
        with served.together():
            last = served.submit([6], 4, GREEDY)
            served.close()
        assert last.finish_reason == "cancelled"


@pytest.mark.exhaustive
def test_data_parallelism_gives_the_same_text_from_several_copies(decoder):
    asked = [(prompt, 12, SAMPLINGS[i % 3], i) for i, prompt in enumerate(prompts([5, 9, 20, 3]))]
    with open_engine(open_decoder(data=2, tensor=2), SMALL, warm_up=False) as group:
        assert isinstance(group, EngineGroup)
        handles = [group.submit(prompt, count, sampling, seed=seed) for prompt, count, sampling, seed in asked]
        for handle, request in zip(handles, asked, strict=True):
            assert handle.result() == expected(decoder, *request)
        assert [engine.stats.generated_tokens for engine in group.engines] == [24, 24]
        meshes = [set(engine.model.rules.mesh.devices.flat) for engine in group.engines]
        assert len(meshes[0]) == len(meshes[1]) == 2 and not meshes[0] & meshes[1]
        assert group.state.stats.finished["length"] == 4 and group.state.pages == 2 * group.engines[0].pool.count
        assert group.failure is None and group.most_requests == 2 * (256 + 4)


@pytest.mark.exhaustive
def test_random_arrivals_are_five_times_as_fast_as_one_after_another_without_compilation(decoder):
    """64 requests on 16 slots, against `Decoder.generate` for one at a time; the fastest of up to ten runs of each."""
    random = np.random.default_rng(0)
    asked = list(zip(prompts(random.integers(1, 40, 64)), random.integers(10, 40, 64).tolist(), strict=True))
    waits = random.exponential(0.0005, 64)
    config = SMALL.model_copy(update={"slots": 16, "chunk": 128, "prefix_cache": False})
    one_by_one = [expected(decoder, prompt, count) for prompt, count in asked]  # compiles
    with Engine(decoder, config) as engine:
        compiled = engine.programs.compiled
        sequential = []
        together = []
        while not together or (min(sequential) < 5 * min(together) and len(together) < 10):
            start = time.perf_counter()
            assert [expected(decoder, prompt, count) for prompt, count in asked] == one_by_one
            sequential.append(time.perf_counter() - start)
            start = time.perf_counter()
            handles = []
            steps = engine.stats.steps
            for (prompt, count), wait in zip(asked, waits, strict=True):
                time.sleep(wait)
                handles.append(engine.submit(prompt, count, GREEDY))
            assert [handle.result() for handle in handles] == one_by_one
            together.append(time.perf_counter() - start)
            assert engine.stats.steps - steps <= sum(count for _, count in asked) / 5
        for sampling in SAMPLINGS:
            engine.submit([1, 2, 3], 4, sampling, constraint=EvenOnly(9)).result()
        assert engine.programs.compiled == compiled
    print(f"sequential {min(sequential):.3f} s, together {min(together):.3f} s")
    assert min(sequential) >= 5 * min(together)


@pytest.mark.exhaustive
def test_many_requests_with_random_cancellations_leak_nothing(decoder):
    random = np.random.default_rng(1)
    config = SMALL.model_copy(update={"pages": 40})
    with Engine(decoder, config, warm_up=False) as engine:
        for _ in range(5):
            handles = [engine.submit(p, 15, Sampling(1.0)) for p in prompts(random.integers(1, 60, 12))]
            for handle in handles:
                if random.random() < 0.5:
                    time.sleep(random.random() * 0.01)
                    handle.cancel()
            assert all(handle.result() is not None for handle in handles)
        assert engine.pool.used == 0 and engine.pool.available == 40
