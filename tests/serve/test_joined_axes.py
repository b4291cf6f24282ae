"""A server splits layers over the devices of `fsdp` and `expert` too: the same texts, and whole experts."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
from jaxstack.parallel.layout_rules import serving_degrees, serving_problems
from jaxstack.parallel.rules import WHOLE_EXPERTS
from jaxstack.run.load import load
from jaxstack.serve.config import EngineConfig
from tests.serve.tiny import CONFIG
from tests.word_models import make_word_model

GREEDY = Sampling(temperature=0)
SMALL = EngineConfig(slots=4, page_size=4, chunk=16)
PROMPTS = ([5, 6, 7, 8, 9], [10, 20, 30], [7] * 20)
MIXTURES: dict[str, dict[str, Any]] = {
    "plain": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "shared experts, of all layers but one": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2,
        "scoring_func": "sigmoid", "first_k_dense_replace": 1,
    },
    "biases": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "expert_bias": True,
        "router_bias": True,
    },
}  # fmt: skip


def mixture(moe: dict[str, Any]) -> ModelConfig:
    sizes = {"num_kv_heads": 4, "num_layers": 2, "moe": moe}
    return ModelConfig.model_validate(CONFIG.model_dump() | sizes)


def open_mixture(config: ModelConfig, tensor: int = 1, *, whole: bool = False) -> Decoder:
    module = ModuleArrays(lambda rngs: Transformer(config, rngs))
    mesh = make_mesh(ParallelConfig(tensor=tensor), jax.devices()[:tensor])
    rules = make_rules(mesh, overrides=WHOLE_EXPERTS if whole else None)
    params, non_params = jax.jit(module.init)(jax.random.key(0))
    shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules), is_leaf=lambda x: isinstance(x, jax.P))
    return Decoder(module, jax.device_put(params, shardings), non_params, rules)


def answers(decoder: Decoder) -> list[list[int]]:
    with Engine(decoder, SMALL, warm_up=False) as engine:
        handles = [engine.submit(prompt, 8, GREEDY) for prompt in PROMPTS]
        return [handle.result() for handle in handles]


def random_biases(decoder: Decoder) -> Decoder:
    """With zeros, as they are initialized, nothing would show whether each is added once."""

    def change(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        biased = "bias" in str(path[-1].key)
        values = np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32)
        return jax.device_put(values, x.sharding) if biased else x

    decoder.load(jax.tree_util.tree_map_with_path(change, decoder.params), decoder.non_params)
    return decoder


@pytest.mark.longer
@pytest.mark.parametrize("kind", MIXTURES)
def test_texts_with_whole_experts_are_those_of_one_device(kind):
    config = mixture(MIXTURES[kind])
    alone = random_biases(open_mixture(config))
    served = random_biases(open_mixture(config, 4, whole=True))
    experts = MIXTURES[kind]["num_experts"] // 4
    last: Any = served.params["decoder"]["layers"]["1"]["mlp"]["down_proj"]["kernel"]
    assert {shard.data.shape for shard in last.addressable_shards} == {(experts, *last.shape[1:])}
    tokens = np.asarray([PROMPTS[2]])
    np.testing.assert_allclose(served.logits(tokens), alone.logits(tokens), rtol=1e-4, atol=1e-4)
    assert answers(served) == answers(alone)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("family", "recipe"),
    [("mixtral", None), ("deepseek-v3", None), ("gpt-oss", None), ("mixtral", "int8"), ("qwen3-moe", "fp8")],
)
def test_a_stored_mixture_is_served_over_all_axes(tmp_path, family, recipe):
    """With packed experts too; each device has some of the experts, unless no degree is given for them."""
    folder = make_word_model(family, tmp_path / family)
    dtype = "precision.compute=float32"
    expected = answers(load(folder, ["parallel.tensor=1", dtype], recipe=recipe, serving=True).decoder)
    for axes, split in (({"expert": 4}, 0), ({"expert": 2, "fsdp": 2}, 0), ({"fsdp": 2}, 2)):
        layout = [f"parallel.{axis}={degree}" for axis, degree in axes.items()]
        decoder = load(folder, [*layout, dtype], recipe=recipe, serving=True).decoder
        assert decoder.rules.mesh.shape["tensor"] == decoder.rules.mesh.size == math.prod(axes.values())
        kernel: Any = decoder.params["decoder"]["layers"]["1"]["mlp"]["up_proj"]["kernel"]
        if recipe is None:
            assert kernel.sharding.spec[split] == "tensor"
        else:
            stored = kernel.arrays["q"]
            parts = {shard.data.size for shard in stored.addressable_shards}
            assert parts == {stored.size // decoder.rules.mesh.size}, "it stays packed, a part on each device"
        assert answers(decoder) == expected


def test_degrees_are_joined():
    given = ParallelConfig(data=2, fsdp=2, expert=2, tensor=2)
    assert serving_degrees(given).degrees == ParallelConfig(data=2, tensor=8).degrees


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"expert": 8}, "model.num_heads (4) must be divisible by parallel.tensor (8)"),
        ({"expert": 3}, "model.num_heads (4) must be divisible by parallel.tensor (3)"),
        ({"fsdp": 8}, "all 8 devices of parallel.tensor, fsdp and expert: model.num_heads (4)"),
    ],
)
def test_layouts_that_do_not_fit_are_told_with_their_devices(degrees, words):
    problems = serving_problems(mixture(MIXTURES["plain"]), ParallelConfig(**degrees))
    assert any(words in problem for problem in problems)


def test_a_layout_that_does_not_fit_ends_with_one_message(tmp_path):
    folder = make_word_model("mixtral", tmp_path / "mixtral")
    with pytest.raises(ConfigError, match="splits layers over all 8 devices of parallel.tensor, fsdp and expert"):
        load(folder, ["parallel.fsdp=4", "parallel.tensor=2"], serving=True)


def test_experts_that_the_devices_do_not_divide_are_told():
    config = mixture(MIXTURES["plain"] | {"num_experts": 6})
    (problem,) = serving_problems(config, ParallelConfig(expert=2, tensor=2))
    assert "model.moe.num_experts (6) must be divisible by their number; numbers that fit: 1, 2, 3, 6." in problem
