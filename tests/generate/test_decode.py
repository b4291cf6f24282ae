"""Decoding: greedy equals the argmax of the full forward, rows do not touch each other, and seeds repeat."""

import jax
import numpy as np
import pytest

from jaxstack.errors import ConfigError
from jaxstack.functional import FunctionalModule
from jaxstack.generate import Decoder, Sampling
from jaxstack.models import ModelConfig, Transformer
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=48,
    layer_types=("sliding_attention", "full_attention"), sliding_window=6, initialization="fan_in",
    initializer_range=0.5, max_position_embeddings=100,
)  # fmt: skip
PROMPTS = [[5, 9, 2, 44, 17, 3, 8], [7], [30, 31, 32]]
GREEDY = Sampling(temperature=0)


def open_decoder(tensor: int = 1) -> Decoder:
    module = FunctionalModule(lambda rngs: Transformer(CONFIG, rngs))
    rules = make_rules(make_mesh(ParallelConfig(tensor=tensor), jax.devices()[:tensor]))
    shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules), is_leaf=lambda x: isinstance(x, jax.P))
    params, rest = module.init(jax.random.key(0))
    return Decoder(module, jax.device_put(params, shardings), rest, rules)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return open_decoder()


def run(decoder: Decoder, prompts, tokens: int, sampling: Sampling, seed: int = 0) -> list[list[int]]:
    return np.stack(list(decoder.generate(prompts, tokens, sampling, seed=seed)), 1).tolist()


@pytest.fixture(scope="module")
def greedy(decoder) -> list[list[int]]:
    return run(decoder, PROMPTS, 12, GREEDY)


def test_greedy_is_the_argmax_of_the_full_forward(decoder, greedy):
    model = decoder.module.merge(decoder.params, decoder.rest)
    for prompt, found in zip(PROMPTS, greedy, strict=True):
        sequence = np.array([prompt + found], np.int32)
        wanted = np.argmax(model(sequence), -1)[0, len(prompt) - 1 : -1]
        assert found == wanted.tolist()


def test_a_row_does_not_depend_on_the_others(decoder, greedy):
    assert run(decoder, [PROMPTS[2], PROMPTS[0], PROMPTS[1]], 12, GREEDY) == [greedy[2], greedy[0], greedy[1]]


def test_weights_on_two_devices_give_the_same_text(greedy):
    assert run(open_decoder(tensor=2), PROMPTS, 12, GREEDY) == greedy


def test_the_same_seed_gives_the_same_text(decoder):
    sampling = Sampling(temperature=1.0, top_k=30)
    first = run(decoder, PROMPTS, 12, sampling, seed=3)
    assert first == run(decoder, PROMPTS, 12, sampling, seed=3) != run(decoder, PROMPTS, 12, sampling, seed=4)
    equal = run(decoder, [PROMPTS[0]] * 3, 12, sampling)
    assert equal[0] != equal[1], "rows draw apart"


def test_a_prompt_beyond_a_block_is_padded_further(decoder):
    long = np.random.default_rng(0).integers(0, 61, 70).tolist()
    model = decoder.module.merge(decoder.params, decoder.rest)
    found = run(decoder, [long], 2, GREEDY)[0]
    assert found[0] == int(np.argmax(model(np.array([long], np.int32))[0, -1]))


def test_what_does_not_fit_is_refused(decoder):
    with pytest.raises(ConfigError, match="at most 30 new tokens fit"):
        run(decoder, [[1] * 70], 31, GREEDY)
    for empty in ([], [[]], [[1], []]):
        with pytest.raises(ConfigError, match="at least one token"):
            run(decoder, empty, 3, GREEDY)
