"""Decoding within CUDA graphs: loops of several steps, and on two GPUs sums that a kernel computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.sampling import Sampling
from jaxstack.models import ModelConfig, Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, StepLayout, make_mesh, make_rules
from pallas_kernels import record_choices
from tests.gpu.conftest import on_hopper

CONFIG = ModelConfig(
    vocab_size=512, hidden_size=1024, num_layers=4, num_heads=8, num_kv_heads=4, intermediate_size=2048,
    scan_layers=False, initialization="fan_in", max_position_embeddings=256,
)  # fmt: skip


def open_decoder(devices, sums, dtype=jnp.bfloat16) -> Decoder:
    module = ModuleArrays(lambda rngs: Transformer(CONFIG, rngs, dtype=dtype))
    rules = make_rules(make_mesh(ParallelConfig(tensor=len(devices)), devices))
    shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules), is_leaf=lambda x: isinstance(x, jax.P))
    params, non_params = module.init(jax.random.key(0))
    decoder = Decoder(module, jax.device_put(params, shardings), non_params, rules, layout=StepLayout(peer_sums=sums))
    decoder.join_projections()
    return decoder


@pytest.fixture
def exact_products():
    """Products of float32 arrays in float32: TF32 rounds near ties of greedy tokens differently in two programs."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")  # for all threads: engines trace in their own
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}])
def test_loops_of_steps_sample_the_tokens_of_single_steps(settings):
    decoder = open_decoder(jax.devices()[:1], "never", jnp.float32)
    sampling = Sampling(**({"temperature": 0} | settings))
    prompts = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (5, 24)).tolist()
    texts = dict[int, list[list[int]]]()
    for steps in (1, 8):
        config = EngineConfig(slots=8, context=128, chunk=32, decode_steps=steps)
        with Engine(decoder, config) as engine:
            with engine.together():
                requests = [engine.submit(prompt, 30 + 7 * i, sampling, seed=i) for i, prompt in enumerate(prompts)]
            texts[steps] = [request.result() for request in requests]
            assert (engine.stats.programs["decode"] < 30) == (steps > 1)
    assert texts[8] == texts[1]


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("guesses", ["n-gram", "draft model"])
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}])
def test_loops_of_steps_with_drafts_give_the_tokens_of_single_ones(guesses, settings):
    decoder = open_decoder(jax.devices()[:1], "never", jnp.float32)
    prompts = (np.random.default_rng(0).integers(0, 4, (5, 24)) * 100).tolist()
    texts = dict[int, list[list[int]]]()
    programs = dict[int, int]()
    for steps in (1, 8):
        config = EngineConfig(slots=8, context=128, chunk=32, decode_steps=steps, draft_tokens=3, drafts="always")
        with Engine(decoder, config, draft=decoder if guesses == "draft model" else None) as engine:
            with engine.together():
                requests = [
                    engine.submit(prompt, 30 + 7 * i, Sampling(**settings), seed=i) for i, prompt in enumerate(prompts)
                ]
            texts[steps] = [request.result() for request in requests]
            programs[steps] = engine.stats.programs["decode"]
            if guesses == "draft model":
                assert engine.stats.accepted_tokens > 0.9 * engine.stats.draft_tokens
    assert texts[8] == texts[1] and programs[8] < programs[1]


def test_sums_by_a_kernel_give_the_same_logits_and_the_same_text_each_time(two_gpus):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (8, 24))
    logits = {}
    decoders = {sums: open_decoder(two_gpus, sums) for sums in ("auto", "never")}
    for sums, decoder in decoders.items():
        with record_choices() as choices:
            logits[sums] = np.asarray(decoder.logits(tokens), np.float64)
        backends = {choice.backend for choice in choices if choice.operation == "all_reduce"}
        assert backends == ({"mosaic" if on_hopper() else "xla"} if sums == "auto" else set())
    difference = np.linalg.norm(logits["auto"] - logits["never"]) / np.linalg.norm(logits["never"])
    assert difference < 0.02
    texts = [
        np.stack(list(decoders["auto"].generate(tokens.tolist(), 64, Sampling(temperature=0)))).tolist()
        for _ in range(4)
    ]
    assert all(text == texts[0] for text in texts)
