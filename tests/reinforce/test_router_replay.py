"""Training sends tokens to the experts that the sampler sent them to."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.models.moe.router import ROUTER
from jaxstack.reinforce.config import SamplerConfig
from jaxstack.reinforce.policy import token_log_probabilities
from jaxstack.reinforce.rollout import pack_answers
from jaxstack.reinforce.sampler import Answer, Sampler, SamplerSize
from tests.small_runs import LENGTH, VOCABULARY, make_trainer, small_config

MIXTURE = ("model.moe={num_experts: 16, num_experts_per_tok: 2, first_k_dense_replace: 1}", "model.num_layers=3")
PROMPTS = np.random.default_rng(0).integers(8, VOCABULARY, (4, 5)).tolist()


def sampled(dtype) -> tuple[object, list[list[int]], list[Answer]]:
    """A trainer of a small mixture whose routers have clear preferences, and answers, four to each prompt."""
    trainer = make_trainer(small_config(*MIXTURE), dtype=dtype)
    state = trainer.state._replace(params=jax.tree.map(lambda x: 3 * x, trainer.state.params))
    trainer.state = state
    sampler = Sampler(
        trainer,
        SamplerConfig(page_size=4, slots=8),
        SamplerSize(prompts=len(PROMPTS), answers=16, requests=16, longest=5, context=LENGTH),
        vocab_size=VOCABULARY,
        stop_tokens=frozenset(range(4)),
        records_experts=True,
    )
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    sampler.load(sampler.weights(trainer.state))
    answers = sampler.sample(prompts, [LENGTH - 5] * 16, [1.0] * 16, list(range(16)))
    sampler.unload()
    assert sampler.experts_shape == (3, 2) and len({len(answer.tokens) for answer in answers}) > 1
    return trainer, prompts, answers


def batch_of(prompts: list[list[int]], answers: list[Answer]) -> dict[str, Any]:
    rows = len(prompts)
    batch = {"tokens": np.zeros((rows, LENGTH), np.int32), "labels": np.full((rows, LENGTH), -100, np.int32)}
    batch["experts"] = np.full((rows, LENGTH, 3, 2), -1, np.int16)
    batch["sampler"] = np.zeros((rows, LENGTH), np.float32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = [*prompt, *answer.tokens]
        batch["tokens"][row, : len(ids) - 1] = ids[:-1]
        batch["labels"][row, len(prompt) - 1 : len(ids) - 1] = answer.tokens
        batch["sampler"][row, len(prompt) - 1 : len(ids) - 1] = answer.log_probabilities
        assert answer.experts is not None and len(answer.experts) == len(ids) - 1
        batch["experts"][row, : len(ids) - 1] = answer.experts
    return batch


def log_probabilities(model, batch: dict[str, Any], experts: np.ndarray | None = None) -> tuple[np.ndarray, Any]:
    """Of the labels with these experts, and the sums of the routers."""
    given = {} if experts is None else {"experts": jnp.asarray(experts)}
    found, sums = token_log_probabilities(model, {name: batch[name] for name in ("tokens", "labels")} | given)
    return np.asarray(found), sums[ROUTER]


@pytest.mark.longer
def test_recorded_experts_are_those_of_the_model():
    """In float32 all tokens of prompts and answers, prompts in shared pages included, have the model's own experts."""
    trainer, prompts, answers = sampled(np.float32)
    batch = batch_of(prompts, answers)
    model, experts = trainer.trained_module, batch["experts"]
    known = experts[..., 1:, :] >= 0
    own = model.hidden_and_sums(batch["tokens"], records_experts=True)[1][ROUTER].experts
    np.testing.assert_array_equal(experts[..., 1:, :][known], np.asarray(own)[..., 1:, :][known])
    replayed, routers = log_probabilities(model, batch, experts)
    assert float(routers.metrics("router")["router_changed"]) == 0
    np.testing.assert_array_equal(routers.given, [0, *[(experts[..., 1, 0] >= 0).sum()] * 2])
    np.testing.assert_array_equal(replayed, log_probabilities(model, batch)[0])
    np.testing.assert_allclose(log_probabilities(model, batch, experts[..., ::-1])[0], replayed, atol=1e-5)
    changed, routers = log_probabilities(model, batch, np.where(experts < 0, -1, (experts + 8) % 16))
    assert float(routers.metrics("router")["router_changed"]) > 0.9
    lengths = (experts[..., 1, 0] >= 0).sum(1)
    packed = pack_answers(batch, lengths, np.arange(len(experts)), 1)
    assert (packed["experts"] >= 0).sum() == (experts >= 0).sum(), "padding of packed rows is not sent anywhere"
    assert np.abs(changed - replayed).max() > 0.1


@pytest.mark.longer
def test_replay_brings_sampler_and_trainer_together():
    """In bfloat16 routers choose other experts for some tokens; without their choices log-probabilities differ less."""
    trainer, prompts, answers = sampled(jnp.bfloat16)
    batch = batch_of(prompts, answers)
    model = trainer.trained_module
    replayed, routers = log_probabilities(model, batch, batch["experts"])
    free, _ = log_probabilities(model, batch)
    answered = batch["labels"] >= 0
    difference, without = (float(np.abs(x - batch["sampler"])[answered].mean()) for x in (replayed, free))
    changed = float(routers.metrics("router")["router_changed"])
    assert 0 < changed < 0.1 and 0 < difference < 0.9 * without
