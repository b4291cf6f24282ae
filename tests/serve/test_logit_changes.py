"""Penalties, biases and least lengths change the logits of their request alone, as vLLM defines them."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.step import ScoredPrograms
from jaxstack.errors import ConfigError
from jaxstack.serve.config import EngineConfig
from tests.serve.test_engine import forward, prompts
from tests.serve.test_scores import ENGINES, SIZES
from tests.serve.tiny import open_tiny

KINDS = {
    "presence": Sampling(0, presence_penalty=2.0),
    "frequency": Sampling(0, frequency_penalty=-1.5),
    "repetition": Sampling(0, repetition_penalty=1.7),
    "bias": Sampling(0, logit_bias={7: 3.5, 9: -100, 200: 4.0}),
    "all": Sampling(0, None, None, None, 0.7, 0.4, 1.2, {3: 2.0}, 2),
}


def expected(
    decoder: Decoder, prompt: list[int], count: int, sampling: Sampling, ends: tuple[int, ...] = ()
) -> list[int]:
    """The greedy answer by whole forward passes and a loop over the tokens of the text."""
    model = decoder.module.merge(decoder.params, decoder.non_params)
    answer: list[int] = []
    for number in range(count):
        ids = np.zeros((1, 128), np.int32)
        ids[0, : len(prompt) + number] = [*prompt, *answer]
        with jax.set_mesh(decoder.rules.mesh):
            logits = np.array(forward(model, ids)[0, len(prompt) + number - 1], np.float64)
        for token, value in (sampling.logit_bias or {}).items():
            logits[token] += value
        for token in ends if number < sampling.min_tokens else ():
            logits[token] = -np.inf
        for token in {*prompt, *answer}:
            logits[token] *= sampling.repetition_penalty ** (-1 if logits[token] > 0 else 1)
        for token in set(answer):
            logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * answer.count(token)
        answer.append(int(logits.argmax()))
        if answer[-1] in ends:
            return answer[:-1]
    return answer


@pytest.mark.longer
@pytest.mark.parametrize("name", ENGINES)
def test_answers_are_those_of_changed_logits(name):
    """Of more requests than slots, so that slots are used again, beside requests without changes and with scores."""
    decoder = open_tiny()
    asked = prompts([20, 5, 33, 9, 12, 5, 5])
    kinds = [*KINDS.values(), Sampling(0), Sampling(0)]
    with ENGINES[name](decoder) as engine:
        requests = [
            engine.submit(prompt, 10, dataclasses.replace(sampling, logprobs=1 if number % 3 else None))
            for number, (prompt, sampling) in enumerate(zip(asked, kinds, strict=True))
        ]
        answers = [request.result() for request in requests]
        assert engine.programs.changes is None
    wanted = [expected(decoder, prompt, 10, sampling) for prompt, sampling in zip(asked, kinds, strict=True)]
    assert answers == wanted
    assert all(wanted[i] != expected(decoder, asked[i], 10, Sampling(0)) for i in range(len(KINDS)))


@pytest.mark.longer
def test_no_stop_token_ends_an_answer_before_its_least_length():
    decoder = open_tiny()
    plain = expected(decoder, [1, 2, 3], 8, Sampling(0))
    ends = (plain[1], plain[3])
    with Engine(decoder, EngineConfig(**SIZES), warm_up=False) as engine:
        for least in (0, 3):
            sampling = Sampling(0, min_tokens=least)
            answer = engine.submit([1, 2, 3], 12, sampling, stop_tokens=ends).result()
            assert answer == expected(decoder, [1, 2, 3], 12, sampling, ends) and len(answer) >= least


@pytest.mark.longer
def test_what_an_answer_has_is_counted_again_after_a_preemption():
    decoder = open_tiny()
    config = EngineConfig(slots=2, page_size=4, chunk=16, pages=14, prefix_cache=False)
    asked = prompts([20, 20])
    with Engine(decoder, config, warm_up=False) as engine:
        requests = [engine.submit(prompt, 16, KINDS["all"]) for prompt in asked]
        answers = [request.result() for request in requests]
        assert engine.scheduler.preemptions > 0
    assert answers == [expected(decoder, prompt, 16, KINDS["all"]) for prompt in asked]


def test_changes_that_an_engine_cannot_make_are_refused():
    decoder = open_tiny()
    engine = Engine(decoder, EngineConfig(**SIZES), warm_up=False, start=False)
    for sampling, message in (
        (Sampling(0, logit_bias={257: 1.0}), "logit_bias must name ids below 257, their number; found 257"),
        (Sampling(0, min_tokens=6), r"min_tokens must be at most max_tokens \(5\); found 6"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.submit([1], 5, sampling)
    scored = Engine(decoder, EngineConfig(**SIZES), make_programs=ScoredPrograms, warm_up=False, start=False)
    with pytest.raises(ConfigError, match="would change the log-probabilities of this engine"):
        scored.submit([1], 5, KINDS["bias"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty must be -2 to 2; found 2.1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be -2 to 2; found nan"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0 and finite; found 0"),
        ({"logit_bias": {5: 101}}, "logit_bias must add -100 to 100 to the logits of token ids; found 5: 101"),
        ({"min_tokens": -1}, "min_tokens must be at least 0; found -1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(0, **settings)
