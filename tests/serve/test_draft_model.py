"""Speculation with a draft model: sampled tokens keep the model's distribution, greedy ones are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.decoding.draft_model import accept_drafts
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.sampling import RowSampling, Sampling, probabilities
from jaxstack.errors import ConfigError
from jaxstack.serve.config import EngineConfig
from tests.marks import longer
from tests.serve.test_engine import GREEDY, SAMPLINGS, EvenOnly, expected, prompts
from tests.serve.tiny import CONFIG as CONFIG_OF_TESTS
from tests.serve.tiny import open_tiny

CONFIG = EngineConfig(slots=4, page_size=4, chunk=16, draft_tokens=3, drafts="always")
ROWS = 20_000
WIDTH = 3
V = 6


def sampling_rows(temperature: float, top_k: int) -> RowSampling:
    def full(value, dtype):
        return jnp.full(ROWS, value, dtype)

    seeds = jnp.arange(ROWS, dtype=jnp.uint32)
    limits = full(top_k, jnp.int32), full(1, jnp.float32), full(0, jnp.float32)
    return RowSampling(seeds, full(5, jnp.int32), full(temperature, jnp.float32), *limits)


accept = jax.jit(accept_drafts, static_argnames="mode")


@pytest.mark.parametrize("case", [("limited", 0.7, 3), *longer(("free", 1.0, V))])
def test_accepted_and_replaced_tokens_have_the_distribution_of_the_model(case):
    """Of both drafts and of the token after them; the logits depend on no token, so that all are independent."""
    mode, temperature, top_k = case
    random = np.random.default_rng(0)
    target, guess = (jnp.asarray(random.normal(0, 1.5, (WIDTH, V)), jnp.float32) for _ in range(2))
    rows = sampling_rows(temperature, top_k)
    logits, guessed = (jnp.broadcast_to(x, (ROWS, WIDTH, V)) for x in (target, guess))
    few = RowSampling(*(part[:WIDTH] for part in rows))
    both = jax.jit(lambda *logits: [probabilities(x, few, mode) for x in logits])(target, guess)
    p, q = (np.asarray(x, np.float64) for x in both)
    drafted = np.stack([random.choice(V, ROWS, p=q[column - 1] / q[column - 1].sum()) for column in range(WIDTH)], 1)
    samples, kept = map(np.asarray, accept(logits, guessed, drafted, np.full(ROWS, WIDTH), rows, mode=mode))
    for column in range(WIDTH):
        found = samples[kept >= column, column]
        share = np.bincount(found, minlength=V) / len(found)
        assert np.all(np.abs(share - p[column]) < 4.5 * np.sqrt(p[column] * (1 - p[column]) / len(found)) + 1e-9)
    chance = np.minimum(p[0], q[0]).sum()  # of accepting a draft
    assert abs((kept >= 1).mean() - chance) < 4.5 * np.sqrt(chance * (1 - chance) / ROWS)


def test_rows_may_have_fewer_drafts_and_greedy_rows_take_the_likeliest():
    logits = jax.nn.one_hot(jnp.array([[1, 2, 3], [1, 2, 3], [4, 2, 3], [0, 0, 0]]), V) * 9
    drafted = jnp.array([[0, 1, 5], [0, 0, 2], [0, 1, 2], [0, 0, 0]])
    rows = jax.tree.map(lambda x: x[:4], sampling_rows(0, V))
    for mode in ("greedy", "free"):
        samples, kept = accept(logits, logits, drafted, jnp.array([3, 2, 3, 0]), rows, mode=mode)
        assert kept.tolist() == [1, 1, 0, 0]
        assert samples[0, :2].tolist() == [1, 2] and samples[1, 1] == 2 and samples[2, 0] == 4
    samples, kept = accept(logits, logits, drafted, jnp.array([1, 1, 1, 1]), rows, mode="greedy")
    assert kept.tolist() == [0, 0, 0, 0] and samples[:, 2].tolist() == [3, 3, 3, 0]


def test_greedy_tokens_are_the_same_and_those_of_an_equal_draft_model_are_accepted():
    model = open_tiny()
    prompt = prompts([21])[0]
    whole = expected(model, prompt, 14)
    for draft in (model, open_tiny(seed=1)):
        with Engine(model, CONFIG.model_copy(update={"slots": 1}), draft=draft, warm_up=False) as engine:
            assert engine.submit(prompt, 14, GREEDY).result() == whole
            assert engine.pool.used == 0
            assert engine.stats.draft_tokens >= 6 and engine.state.stats.accepted_tokens <= engine.stats.draft_tokens
            assert engine.stats.draft_steps > engine.stats.programs["decode"], "some programs had several steps"
            if draft is model:
                assert engine.stats.accepted_tokens == engine.stats.draft_tokens


@pytest.mark.exhaustive
def test_a_text_depends_on_its_prompt_and_seed_alone():
    """Beside others, after preemption, from cached pages, and with a constraint."""
    model = open_tiny()
    draft = open_tiny(seed=1)
    asked = [(prompt, 20, SAMPLINGS[i % 5], i) for i, prompt in enumerate(prompts([8, 8, 9, 8, 7, 30]))]
    with Engine(model, CONFIG, draft=draft) as engine:
        compiled = engine.programs.compiled
        alone = [engine.submit(p, count, sampling, seed=seed).result() for p, count, sampling, seed in asked]
        again = [engine.submit(p, count, sampling, seed=seed) for p, count, sampling, seed in asked]
        assert [handle.result() for handle in again] == alone
        even = engine.submit([1, 2, 3, 1, 2], 8, Sampling(1.0), constraint=EvenOnly(5))
        assert len(even.result()) == 5 and engine.programs.compiled == compiled
    few = CONFIG.model_copy(update={"pages": 12, "context": 50})
    with Engine(model, few, draft=draft, warm_up=False) as engine:
        handles = [engine.submit(p, count, sampling, seed=seed) for p, count, sampling, seed in asked[:4]]
        assert [handle.result() for handle in handles] == alone[:4]
        assert engine.scheduler.preemptions > 0 and engine.pool.used == 0
    greedy = [number for number, (*_, sampling, _) in enumerate(asked) if sampling.temperature == 0]
    assert [alone[number] for number in greedy] == [expected(model, *asked[number]) for number in greedy]


@pytest.mark.exhaustive
def test_greedy_tokens_are_the_same_with_layers_of_the_draft_model_that_run_together():
    """Beside other requests and after a cached prefix; the last layers are fewer than a group."""
    config = CONFIG_OF_TESTS.model_copy(update={"num_layers": 3})
    model = open_tiny(config=config)
    asked = prompts([21, 9, 33, 21])
    with Engine(model, CONFIG.model_copy(update={"draft_layers_together": 2}), draft=model, warm_up=False) as engine:
        handles = [engine.submit(prompt, 14, GREEDY) for prompt in asked]
        assert [handle.result() for handle in handles] == [expected(model, prompt, 14) for prompt in asked]
        again = engine.submit([*asked[0], *handles[0].result()], 9, GREEDY)
        assert again.result() == expected(model, list(again.prompt), 9) and again.cached_tokens > 20
        assert 0 < engine.stats.accepted_tokens < engine.stats.draft_tokens
        assert engine.pool.used == 0
    stacked = open_tiny(config=config.model_copy(update={"scan_layers": True}))
    with pytest.raises(ConfigError, match="scan_layers=false"):
        Engine(model, CONFIG.model_copy(update={"draft_layers_together": 2}), draft=stacked, start=False)


def test_a_draft_model_needs_draft_tokens():
    model = open_tiny()
    with pytest.raises(ConfigError, match="engine.draft_tokens"):
        Engine(model, EngineConfig(slots=1, chunk=16), draft=model, start=False)
