"""Speculation by the model's own layer for multi-token prediction: the same greedy tokens, and the layer's guesses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.decoding.engine import Engine
from jaxstack.loss import IGNORE
from jaxstack.models.recurrent import GatedDelta
from jaxstack.serve.config import EngineConfig
from tests.serve.test_engine import GREEDY, expected, prompts
from tests.serve.tiny import CONFIG as CONFIG_OF_TESTS
from tests.serve.tiny import open_tiny

pytestmark = pytest.mark.longer  # a few seconds each

CONFIG = CONFIG_OF_TESTS.model_copy(update={"num_nextn_predict_layers": 1, "vocab_size": 8})
"""With so few ids some guesses of random weights are right."""


def few_ids(lengths: list[int]) -> list[list[int]]:
    return [[token % 8 for token in prompt] for prompt in prompts(lengths)]


def guesses(model: ModelOnMesh, tokens: list[int]) -> list[int]:
    """What the layer, in a forward pass of the whole text, guesses to follow each token but the first."""

    @jax.jit
    def run(tokens: jax.Array) -> jax.Array:
        module = model.module.merge(model.params, model.non_params)
        batch = {"tokens": tokens, "labels": tokens}
        found = next(module.mtp(module.hidden(tokens), batch, module.inputs_of_layers, None, IGNORE))
        return jnp.argmax(module.logits(found.hidden), -1)

    return [-1, *np.asarray(run(jnp.asarray([tokens])))[0, :-1].tolist()]


def test_one_draft_a_step_is_what_the_layer_guesses_in_a_forward_pass():
    """Of a prompt in several chunks; every accepted guess saves a step."""
    model = open_tiny(config=CONFIG)
    (prompt,) = few_ids([37])
    whole = expected(model, prompt, 30)
    guessed = guesses(model, [*prompt, *whole])
    config = EngineConfig(slots=1, page_size=4, chunk=16, draft_tokens=1, drafts="always")
    with Engine(model, config, warm_up=False) as engine:
        assert engine.submit(prompt, 30, GREEDY).result() == whole
        stats = engine.stats
    newest, right, drafts = len(prompt), 0, 0
    while newest < len(prompt) + 30 - 2:  # the last token has no room for a draft after it
        drafts += 1
        hit = guessed[newest] == whole[newest + 1 - len(prompt)]
        right += hit
        newest += 1 + hit
    assert (stats.accepted_tokens, stats.draft_tokens) == (right, drafts) and right > 0


@pytest.mark.parametrize("drafts", [1, 3])
def test_a_hybrid_drafts_by_a_layer_with_attention(drafts):
    """Its states are those of the accepted tokens alone."""
    delta = {"num_heads": 2, "head_dim": 8, "num_key_heads": 1, "key_head_dim": 8}
    changes = {"num_layers": 2, "layer_types": ("delta", "full_attention"), "delta": GatedDelta(**delta)}
    model = open_tiny(config=CONFIG.model_copy(update=changes))
    asked = few_ids([21, 9])
    config = EngineConfig(slots=2, page_size=4, chunk=16, draft_tokens=drafts, drafts="always")
    with Engine(model, config, warm_up=False) as engine:
        handles = [engine.submit(prompt, 14, GREEDY) for prompt in asked]
        assert [handle.result() for handle in handles] == [expected(model, prompt, 14) for prompt in asked]
        assert 0 < engine.stats.accepted_tokens < engine.stats.draft_tokens


@pytest.mark.exhaustive
def test_greedy_tokens_are_the_same_beside_others_and_after_a_cached_prefix():
    model = open_tiny(config=CONFIG)
    asked = few_ids([21, 9, 33, 21])
    config = EngineConfig(slots=4, page_size=4, chunk=16, draft_tokens=3, drafts="always")
    with Engine(model, config, warm_up=False) as engine:
        handles = [engine.submit(prompt, 14, GREEDY) for prompt in asked]
        assert [handle.result() for handle in handles] == [expected(model, prompt, 14) for prompt in asked]
        again = engine.submit([*asked[0], *handles[0].result()], 9, GREEDY)
        assert again.result() == expected(model, list(again.prompt), 9) and again.cached_tokens > 20
        assert 0 < engine.stats.accepted_tokens < engine.stats.draft_tokens
        assert engine.pool.used == 0
