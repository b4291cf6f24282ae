"""Answers of a sampler, and their log-probabilities under its trainer, to compare bit for bit."""

from typing import Any

import jax
import numpy as np

from jaxstack.distributed.xla_options import low_precision_cpu_options
from jaxstack.reinforce.config import SamplerConfig
from jaxstack.reinforce.exact import exact_options
from jaxstack.reinforce.policy import token_log_probabilities
from jaxstack.reinforce.sampler import Answer, Sampler, SamplerSize
from pallas_kernels.target import current_target
from tests.small_runs import LENGTH, VOCABULARY

TEMPERATURE = 0.7


def spread(trainer: Any) -> Any:
    """The trainer with larger weights, so that probabilities and the choices of routers are clear."""
    trainer.state = trainer.state._replace(params=jax.tree.map(lambda x: 3 * x, trainer.state.params))
    return trainer


def sample(trainer: Any, exact: bool, length: int = LENGTH) -> tuple[list[list[int]], list[Answer]]:
    """Prompts of two lengths, and answers, two to each."""
    random = np.random.default_rng(0)
    prompts = [ids for count in (5, 7) for ids in random.integers(8, VOCABULARY, (2, count)).tolist() * 2]
    size = SamplerSize(prompts=4, answers=8, requests=8, longest=7, context=length)
    config = SamplerConfig(page_size=4, slots=4, exact=exact)
    sampler = Sampler(trainer, config, size, vocab_size=VOCABULARY, stop_tokens=frozenset(range(4)))
    sampler.load(sampler.weights(trainer.state))
    return prompts, sampler.sample(prompts, [length - 7] * 8, [TEMPERATURE] * 8, list(range(8)))


def compare(
    trainer: Any, prompts: list[list[int]], answers: list[Answer], exact: bool, length: int = LENGTH
) -> tuple[np.ndarray, Any]:
    """Differences of the log-probabilities of sampled tokens, and the gradients of their sum under the trainer."""
    shape = len(prompts), length
    batch = {"tokens": np.zeros(shape, np.int32), "labels": np.full(shape, -100, np.int32)}
    known = np.zeros(shape, np.float32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = [*prompt, *answer.tokens]
        batch["tokens"][row, : len(ids) - 1] = ids[:-1]
        batch["labels"][row, len(prompt) - 1 : len(ids) - 1] = answer.tokens
        known[row, len(prompt) - 1 : len(ids) - 1] = answer.log_probabilities

    def total(params: Any) -> tuple[jax.Array, jax.Array]:
        model = trainer.module.used.merge(trainer.module.load(params), trainer.state.non_params)
        found, _ = token_log_probabilities(model, batch, TEMPERATURE, length, exact=exact)
        return found.sum(), found

    options = low_precision_cpu_options() if current_target().platform == "cpu" else {}
    options |= exact_options() if exact else {}
    compiled = jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=options)
    with jax.set_mesh(trainer.rules.mesh):
        (_, found), slopes = compiled(trainer.state.params)
    return (np.asarray(found) - known)[batch["labels"] != -100], slopes
