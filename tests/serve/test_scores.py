"""Log-probabilities of tokens: of answers and prompts, beside the likeliest ones, whatever runs in the same steps."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.scores import MOST_LIKELIEST, TokenScore
from jaxstack.decoding.step import ScoredPrograms
from jaxstack.errors import ConfigError
from jaxstack.serve.config import EngineConfig
from tests.serve.test_engine import GREEDY, SAMPLINGS, forward, prompts
from tests.serve.tiny import CONFIG, open_tiny

SIZES = {"slots": 4, "page_size": 4, "chunk": 16}


def expected(decoder: Decoder, tokens: list[int], count: int) -> list[TokenScore]:
    """Scores of all tokens but the first, by one forward pass over the text and a sort."""
    ids = np.zeros((1, 128), np.int32)
    ids[0, : len(tokens)] = tokens
    with jax.set_mesh(decoder.rules.mesh):
        logits = forward(decoder.module.merge(decoder.params, decoder.non_params), ids)[0]
    logits = np.asarray(logits, np.float64)
    scores = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    found = []
    for line, token in zip(scores, tokens[1:], strict=False):
        best = np.argsort(-line)[:count].tolist()
        found.append(TokenScore(line[token], 1 + int((line > line[token]).sum()), tuple((i, line[i]) for i in best)))
    return found


def check(found: Sequence[TokenScore | None], wanted: Sequence[TokenScore]) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert one.rank == other.rank and [i for i, _ in one.likeliest] == [i for i, _ in other.likeliest]
        values = [[score.log_probability, *(value for _, value in score.likeliest)] for score in (one, other)]
        np.testing.assert_allclose(values[0], values[1], atol=2e-5)


def draft_engine(decoder: Decoder) -> Engine:
    draft = open_tiny(seed=1, config=CONFIG.model_copy(update={"num_layers": 2}))
    return Engine(decoder, EngineConfig(**SIZES, draft_tokens=2, drafts="always"), draft=draft, warm_up=False)


ENGINES = {
    "alone": lambda decoder: Engine(decoder, EngineConfig(**SIZES, decode_steps=4), warm_up=False),
    "ngram": lambda decoder: Engine(decoder, EngineConfig(**SIZES, draft_tokens=2, drafts="always"), warm_up=False),
    "draft": draft_engine,
}


@pytest.mark.longer
@pytest.mark.parametrize("name", ENGINES)
def test_scores_are_those_of_one_forward_pass(name):
    """Of prompts of several chunks, one of them cached; of greedy and sampled answers, whose text does not change."""
    decoder = open_tiny()
    asked = prompts([40, 40, 7, 7])
    asked[1] = asked[0]
    asked[3] = asked[2]
    with ENGINES[name](decoder) as engine:
        plain = [engine.submit(prompt, 6, GREEDY if i % 2 else SAMPLINGS[2], seed=i) for i, prompt in enumerate(asked)]
        answers = [request.result() for request in plain]
        requests = [
            engine.submit(
                prompt,
                6,
                dataclasses.replace(
                    request.sampling, logprobs=i if i < 3 else None, prompt_logprobs=[None, 2, 0, None][i]
                ),
                seed=i,
            )
            for i, (prompt, request) in enumerate(zip(asked, plain, strict=True))
        ]
        assert [request.result() for request in requests] == answers
    assert requests[0].cached_tokens == 36 and requests[1].cached_tokens == 0
    for number, (request, prompt, answer) in enumerate(zip(requests, asked, answers, strict=True)):
        scores = expected(decoder, [*prompt, *answer], number)
        check(request.scores, scores[len(prompt) - 1 :]) if number < 3 else None
    check(requests[1].prompt_scores, expected(decoder, asked[1], 2))
    check(requests[2].prompt_scores, expected(decoder, asked[2], 0))
    assert requests[3].scores == plain[0].scores == [] and set(requests[0].prompt_scores) == {None}


@pytest.mark.longer
def test_the_stop_token_has_a_score_too():
    decoder = open_tiny()
    with Engine(decoder, EngineConfig(**SIZES), warm_up=False) as engine:
        answer = engine.submit([1, 2, 3], 5, GREEDY).result()
        stop = next(number for number in range(1, 5) if answer[number] not in answer[:number])
        request = engine.submit([1, 2, 3], 5, dataclasses.replace(GREEDY, logprobs=1), stop_tokens=[answer[stop]])
        assert request.result() == answer[:stop]
    check(request.scores, expected(decoder, [1, 2, 3, *answer[: stop + 1]], 1)[2:])


@pytest.mark.longer
def test_prompts_are_scored_again_after_a_preemption():
    """Two texts outgrow the pages, so that the newer one is computed again, with what it has generated so far."""
    decoder = open_tiny()
    config = EngineConfig(slots=2, page_size=4, chunk=16, pages=14, prefix_cache=False)
    asked = prompts([20, 20])
    with Engine(decoder, config, warm_up=False) as engine:
        scored = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1)
        requests = [engine.submit(prompt, 16, scored) for prompt in asked]
        answers = [request.result() for request in requests]
        assert engine.scheduler.preemptions > 0
    for request, prompt, answer in zip(requests, asked, answers, strict=True):
        check(request.prompt_scores, expected(decoder, prompt, 1))
        check(request.scores, expected(decoder, [*prompt, *answer], 2)[len(prompt) - 1 :])


def test_what_cannot_be_scored_is_refused():
    decoder = open_tiny()
    with Engine(decoder, EngineConfig(**SIZES), warm_up=False, start=False) as engine:
        wrong: list[dict[str, Any]] = [{"logprobs": MOST_LIKELIEST + 1}, {"prompt_logprobs": -1}]
        for fields in wrong:
            with pytest.raises(ConfigError, match=f"logprobs must be 0 to 20; found {[*fields.values()][0]}"):
                engine.submit([1], 1, Sampling(**fields))
    scored = Engine(decoder, EngineConfig(**SIZES), make_programs=ScoredPrograms, warm_up=False, start=False)
    with pytest.raises(ConfigError, match="logprobs need an engine"):
        scored.submit([1], 1, Sampling(logprobs=0))
