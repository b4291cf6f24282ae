"""The sampler computes the tokens of a prompt once for all of its answers, which stay those of each prompt alone."""

import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest

from jaxstack.reinforce.config import SamplerConfig
from jaxstack.reinforce.sampler import Answer, Sampler, SamplerSize
from tests.small_runs import VOCABULARY, make_trainer, small_config


@pytest.mark.longer
@pytest.mark.parametrize("scan", ["true", "false"])
def test_answers_share_the_tokens_of_their_prompt(scan):
    trainer = make_trainer(small_config(f"model.scan_layers={scan}", "model.num_kv_heads=4"))
    large = jax.tree.map(lambda x: 5 * x, trainer.state.params)  # probabilities then differ between the prompts
    state = trainer.state._replace(params=large)
    size = SamplerSize(prompts=2, answers=6, requests=6, longest=11, context=16)
    sampler = Sampler(trainer, SamplerConfig(page_size=4), size, vocab_size=VOCABULARY, stop_tokens=frozenset())
    first, second = np.random.default_rng(0).integers(0, VOCABULARY, (2, 11)).tolist()

    def sample(prompts: list[list[int]], seeds: list[int]) -> list[tuple[int, ...]]:
        sampler.load(sampler.weights(state))
        answers = sampler.sample(prompts, [5] * len(prompts), [1.0] * len(prompts), seeds)
        sampler.unload()
        return [answer.tokens for answer in answers]

    together = sample([first, first, first, second, second, second], [1, 2, 2, 1, 2, 3])
    stats = sampler._engines[0].stats
    assert stats.computed_tokens == 2 * 11 + 4 * (11 - 8), "all but the last page, which is not full, are shared"
    compiled = sampler.compiled
    assert together == sample([first, first, first, second, second, second], [1, 2, 2, 1, 2, 3])
    assert sampler.compiled == compiled, "later rollouts compile nothing"
    assert together[1] == together[2] and len({*together}) == 5
    assert [sample([prompt], [1])[0] for prompt in (first, second)] == [together[0], together[3]]


@pytest.mark.longer
def test_a_further_turn_computes_its_new_tokens():
    """The tokens of the turn before are found in the cache, except for those after its last full page."""
    trainer = make_trainer(small_config("model.num_kv_heads=4"))
    size = SamplerSize(prompts=2, answers=4, requests=4, longest=5, context=32)
    sampler = Sampler(trainer, SamplerConfig(page_size=4), size, vocab_size=VOCABULARY, stop_tokens=frozenset())
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, (4, 5)).tolist()
    sampler.load(sampler.weights(trainer.state))
    first = sampler.sample(prompts, [6] * 4, [1.0] * 4, [1, 2, 3, 4])
    stats = sampler._engines[0].stats
    before = stats.computed_tokens
    longer = [[*prompt, *answer.tokens, 1, 2, 3] for prompt, answer in zip(prompts, first, strict=True)]
    second = sampler.sample(longer, [3, 4, 5, 6], [1.0] * 4, [1, 2, 3, 4])
    assert stats.computed_tokens - before == 4 * (14 - 8), "the last sampled token is in no full page"
    assert [len(answer.tokens) for answer in second] == [3, 4, 5, 6]
    sampler.unload()
    sampler.load(sampler.weights(trainer.state))
    for answer, alone in zip(second, sampler.sample(longer, [3, 4, 5, 6], [1.0] * 4, [1, 2, 3, 4]), strict=True):
        assert answer.tokens == alone.tokens, "as from an empty cache"
        # XLA may sum in another order where a prompt is computed in parts.
        np.testing.assert_allclose(answer.log_probabilities, alone.log_probabilities, rtol=1e-5)


@pytest.mark.longer
def test_each_device_samples_its_share_by_itself():
    """Two devices of fsdp answer half of the prompts each, with programs of one device; texts are those of one."""
    size = SamplerSize(prompts=4, answers=8, requests=8, longest=7, context=16)
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, (4, 7)).tolist()
    asked = [prompt for prompt in prompts for _ in range(2)]
    sampled = []
    for devices in (1, 2):
        layout = f"parallel={{data: 1, fsdp: {devices}, overlap: never}}"
        trainer = make_trainer(small_config("model.num_kv_heads=4", layout))
        sampler = Sampler(trainer, SamplerConfig(page_size=4), size, vocab_size=VOCABULARY, stop_tokens=frozenset())
        compiled = []
        for _ in range(2):
            sampler.load(sampler.weights(trainer.state))
            answers = sampler.sample(asked, [6] * 8, [1.0] * 8, [*range(8)])
            compiled.append(sampler.compiled)
            sampler.unload()
        assert compiled[0] == compiled[1], "later rollouts compile nothing"
        engines = sampler._engines
        assert [engine.model.rules.mesh.size for engine in engines] == [1] * devices
        assert {engine.model.layout.peer_sums for engine in engines} == {"never"}, "as parallel.overlap says"
        assert [engine.stats.finished.total() for engine in engines] == [16 // devices] * devices
        sampled.append(answers)
    one, two = sampled
    assert [answer.tokens for answer in one] == [answer.tokens for answer in two]
    for first, second in zip(one, two, strict=True):
        np.testing.assert_allclose(first.log_probabilities, second.log_probabilities, atol=1e-5)


def after_steps(count: int) -> Callable[[Sequence[bool]], bool]:
    numbers = itertools.count(1)
    return lambda ended: next(numbers) >= count


@pytest.mark.longer
def test_an_answer_goes_on_as_if_it_had_not_been_left():
    """With the same weights, answers that are left at several places are those that are sampled at once."""
    trainer = make_trainer(small_config("model.num_kv_heads=4"))
    size = SamplerSize(prompts=2, answers=4, requests=4, longest=5, context=16)
    config = SamplerConfig(page_size=4, decode_steps=1)
    sampler = Sampler(trainer, config, size, vocab_size=VOCABULARY, stop_tokens=frozenset(range(8)))
    first, second = np.random.default_rng(0).integers(8, VOCABULARY, (2, 5)).tolist()
    asked = [first, first, second, second], [11] * 4, [1.0] * 4, [1, 2, 3, 4]
    weights = sampler.weights(trainer.state)

    def sample(version: int, *more) -> list[Answer]:
        sampler.load(weights, version)
        answers = sampler.sample(*asked, *more)
        sampler.unload()
        return answers

    at_once = sample(0)
    lengths = [len(answer.tokens) for answer in at_once]
    assert all(answer.ended for answer in at_once) and min(lengths) < max(lengths) - 1
    answers = sample(3, None, after_steps(3))
    assert not any(answer.ended for answer in answers[:1])
    answers = sample(8, sample(5, answers, after_steps(2)))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in at_once]
    for answer, whole in zip(answers, at_once, strict=True):
        np.testing.assert_allclose(answer.log_probabilities, whole.log_probabilities, atol=1e-5)
        assert answer.ended and list(answer.versions) == sorted(answer.versions)
        assert len(answer.versions) == len(answer.tokens)
    assert {version for answer in answers for version in answer.versions} == {3, 5, 8}
