"""Models with states of fixed size: cached prefixes by snapshots give each request the text that it has alone."""

import jax
import numpy as np
import pytest

from jaxstack.decoding import cache_room
from jaxstack.decoding.cache_room import cache_bytes
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.requests import Request
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig
from jaxstack.models.layer import CacheRoom
from jaxstack.serve.config import EngineConfig
from tests.serve.test_engine import GREEDY, KINDS, expected, prompts
from tests.serve.tiny import CONFIG, open_tiny

DELTA = {"delta": {"num_heads": 2, "head_dim": 16, "num_key_heads": 1, "key_head_dim": 16}}
SSD = {"ssd": {"num_heads": 2, "head_dim": 16, "state_size": 16}}
MODELS = {
    "plain": dict(num_layers=1),
    "delta": dict(num_layers=2, layer_types=("delta", "full_attention"), **DELTA),
    "stacked": dict(num_layers=4, scan_layers=True, layer_types=("delta", "full_attention"), **DELTA),
    "ssd": dict(num_layers=2, layer_types=("ssd", "full_attention"), **SSD),
    "states alone": dict(num_layers=1, layer_types=("ssd_only",), **SSD),
    "rings": dict(attention=KINDS["longformer"]),
    "sums": dict(attention=KINDS["linear"]),
}

CASES = ["delta", "stacked", "ssd", "states alone", "rings", "sums"]


def open_model(name: str) -> Decoder:
    return open_tiny(config=ModelConfig(**{**CONFIG.model_dump(exclude_unset=True), **MODELS[name]}))


@pytest.mark.quick
def test_a_prompt_begins_after_the_snapshot_of_an_earlier_one():
    """With states alone, of which nothing is in pages."""
    decoder = open_model("states alone")
    first, second = prompts((68, 2))
    second = [*first[:66], *second]
    config = EngineConfig(slots=1, page_size=4, context=80, chunk=64, decode_steps=1)
    with Engine(decoder, config, warm_up=False) as engine:
        assert [engine.submit(prompt, 1, GREEDY).result() for prompt in (first, second)] == [
            expected(decoder, prompt, 1) for prompt in (first, second)
        ]
        assert engine.scheduler.prefix_hits == 64 and engine.stats.computed_tokens == 68 + 4


@pytest.mark.longer
@pytest.mark.quick
def test_snapshots_get_a_part_of_the_memory_that_slots_leave(monkeypatch):
    model = open_model("delta")
    config = EngineConfig(slots=8, context=128, memory_fraction=0.5)
    one = cache_bytes(model, CacheRoom(0, 128, 0, 16, 1))
    assert one == (2 * 16 * 16 + 3 * (16 + 16 + 2 * 16)) * 4, "a state, and three inputs of the convolution"
    slots = cache_bytes(model, CacheRoom(8, 128, 0, 16))

    def room(free: int, snapshots: int | None = None) -> CacheRoom:
        monkeypatch.setattr(cache_room, "memory_per_device", lambda: 2 * (model.weight_bytes + slots + 2 * free))
        return cache_room.choose_room([model], config.model_copy(update={"snapshots": snapshots}))

    assert room(100 * one).snapshots == 8, "as many as slots"
    few = room(13 * one)
    used = cache_bytes(model, few) - slots
    assert few.snapshots == 3 and used <= 13 * one < used + cache_bytes(model, CacheRoom(0, 128, 1, 16))
    assert room(100 * one, 20).snapshots == 20 and room(100 * one, 0).snapshots == 0
    with pytest.raises(ConfigError, match=r"the states, 4,000 snapshots \(engine.snapshots\) and logits of 8 requests"):
        room(100 * one, 4000)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_any_interleaving_of_requests_with_common_prefixes_gives_the_texts_of_each_alone(name):
    """Requests arrive while others run; there are fewer snapshots than places for one, and too few pages for all."""
    decoder = open_model(name)
    random = np.random.default_rng(1)
    text = random.integers(0, 61, 150).tolist()
    asked = [[*text[: int(cut)], *random.integers(0, 61, 9).tolist()] for cut in random.choice([70, 140], 8)]
    samplings = [GREEDY, Sampling(1.0)]
    config = EngineConfig(slots=3, page_size=4, pages=52, context=190, chunk=64, decode_steps=4, snapshots=2)
    handles = []
    with Engine(decoder, config, warm_up=False, start=False) as engine:
        turn = 0
        while engine.step() or len(handles) < len(asked):
            if turn % 3 == 0 and len(handles) < len(asked):
                number = len(handles)
                handles.append(engine.submit(asked[number], 30, samplings[number % 2], seed=number))
            turn += 1
        for number, handle in enumerate(handles):
            assert handle.result() == expected(decoder, asked[number], 30, samplings[number % 2], number)
        assert engine.pool.used == 0 and engine.scheduler.preemptions > 0
        reused = sum(handle.cached_tokens for handle in handles)
        assert 0 < reused <= engine.scheduler.prefix_hits and all(handle.cached_tokens % 64 == 0 for handle in handles)


def guess_with_errors(answers: dict[tuple[int, ...], list[int]]):
    """In place of `Request.draft_by_ngram`: the tokens of the known answer, of which each fifth is wrong."""

    def guess(request: Request, count: int) -> tuple[int, ...]:
        first = request.count
        known = answers[request.prompt][first : first + count]
        return tuple(token + ((first + i) % 5 == 4) for i, token in enumerate(known))

    return guess


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_rejected_drafts_are_not_in_a_state(name, monkeypatch):
    """Greedy and sampled, beside chunks of other prompts, with preemption, a stop token and cached prefixes."""
    decoder = open_model(name)
    config = EngineConfig(slots=3, page_size=4, pages=45, context=110, chunk=64, draft_tokens=3, drafts="always")
    asked = [(prompt, 30, [GREEDY, Sampling(1.0)][i % 2], i) for i, prompt in enumerate(prompts((66, 5, 70, 1)))]
    answers = [expected(decoder, *request) for request in asked]
    guess = guess_with_errors({tuple(prompt): answer for (prompt, *_), answer in zip(asked, answers, strict=True)})
    monkeypatch.setattr(Request, "draft_by_ngram", guess)
    handles = []
    with Engine(decoder, config, warm_up=False) as engine:
        for _ in range(2):
            handles = [engine.submit(prompt, count, sampling, seed=seed) for prompt, count, sampling, seed in asked]
            assert [handle.result() for handle in handles] == answers
        assert handles[2].cached_tokens == 64 and engine.scheduler.preemptions
        assert 0.5 < engine.stats.accepted_tokens / engine.stats.draft_tokens < 0.9
        handle = engine.submit(asked[0][0], 30, GREEDY, stop_tokens=[answers[0][20]])
        assert handle.result() == answers[0][: answers[0].index(answers[0][20])] and engine.pool.used == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["delta", "ssd", "other model", "rings"])
def test_drafts_of_a_model_with_states_change_no_token(name):
    """The draft model is almost the model, so that some guesses are rejected, or it drafts for one without states."""
    target = open_model("plain" if name == "other model" else name)
    draft = open_model("delta" if name == "other model" else name)
    keys = iter(jax.random.split(jax.random.key(1), 100))
    draft.params = jax.tree.map(lambda x: x * (1 + 0.1 * jax.random.normal(next(keys), x.shape)), draft.params)
    config = EngineConfig(slots=2, page_size=4, context=110, chunk=64, draft_tokens=3, drafts="always")
    asked = prompts((70, 9, 1))
    asked.append(asked[0])
    with Engine(target, config, draft=draft, warm_up=False) as engine:
        handles = [engine.submit(prompt, 20, GREEDY) for prompt in asked]
        assert [handle.result() for handle in handles] == [expected(target, prompt, 20) for prompt in asked]
        assert handles[-1].cached_tokens == 64
        if name != "other model":
            assert 0.2 < engine.stats.accepted_tokens / engine.stats.draft_tokens < 1
