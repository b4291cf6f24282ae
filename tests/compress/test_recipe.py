"""Recipes: shipped ones, mistakes, and which weights they choose."""

import pytest
from flax import nnx

from jaxstack.compress.base import method_name
from jaxstack.compress.config import RECIPES, Recipe, choose_methods, load_recipe
from jaxstack.compress.matrix import compressible_weights, find_weights, other_parameters
from jaxstack.config.loader import build_component
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer

MODEL = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48)
WEIGHTS = compressible_weights(MODEL)


def recipe(*rules):
    return build_component(Recipe, {"layers": list(rules)}, "recipe.yaml")


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_shipped_recipe_is_valid(name):
    assert load_recipe(name).layers


def test_weights_are_listed_in_the_order_of_the_forward_pass():
    names = list(WEIGHTS)
    assert names[0] == "embedding/table" and names[-1] == "head" and len(names) == 2 + 2 * 7
    assert WEIGHTS["decoder/layers/1/attention/o_proj/kernel"].dims == ((4, 8), (32,))
    assert WEIGHTS["head"].size == WEIGHTS["embedding/table"].size == (64, 32)


def test_the_first_rule_that_matches_holds():
    chosen = choose_methods(
        recipe(
            {"path": "layers/0/", "method": "keep"},
            {"path": "mlp", "method": "rtn", "bits": 4, "group_size": 16},
            {"path": "head|o_proj", "method": "bfp"},
        ),
        WEIGHTS,
    )
    assert {path: method_name(method) for path, method in chosen.items()} == {
        "decoder/layers/1/mlp/down_proj/kernel": "rtn",
        "decoder/layers/1/mlp/gate_proj/kernel": "rtn",
        "decoder/layers/1/mlp/up_proj/kernel": "rtn",
        "decoder/layers/1/attention/o_proj/kernel": "bfp",
        "head": "bfp",
    }


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"path": ".*", "method": "rtm"}, "layers.0.method cannot be 'rtm'; did you mean 'rtn'"),
        ({"path": ".*"}, "layers.0.method is required; choose one of: 'awq'"),
        ({"path": ".*", "method": "rtn", "bit": 4}, "unknown key 'layers.0.bit'; did you mean 'bits'"),
        ({"path": ".*", "method": "wanda", "pattern": "4:2"}, "pattern 4:2 keeps n of every m inputs, with n below m"),
        ({"path": ".*", "method": "wanda", "pattern": "2-4"}, "pattern '2-4' must be n:m, which keeps n of every m"),
        ({"path": "(", "method": "rtn"}, "layers.0.path: '\\(' is not a regular expression"),
    ],
)
def test_a_mistake_in_a_rule_is_one_message(rule, message):
    with pytest.raises(ConfigError, match=message):
        recipe(rule)


def test_an_unknown_recipe_is_one_message():
    with pytest.raises(ConfigError, match="no recipe 'int9', and no file; did you mean 'int8'"):
        load_recipe("int9")


def test_overrides_replace_values_of_a_recipe():
    shipped = load_recipe("int4-gptq")
    found = load_recipe("int4-gptq", ["calibration.data=[texts/*.txt]", "calibration.sequences=8"])
    assert found.layers == shipped.layers and found.calibration.data == ("texts/*.txt",)
    assert (shipped.calibration.sequences, found.calibration.sequences) == (128, 8)
    with pytest.raises(ConfigError, match="calibration.sequence=8: unknown key .* did you mean 'sequences'"):
        load_recipe("int4-gptq", ["calibration.sequence=8"])


def test_a_rule_that_is_never_used_is_one_message():
    with pytest.raises(ConfigError, match="'mlp' is never used, as earlier rules match all of its weights"):
        choose_methods(recipe({"path": ".*", "method": "rtn"}, {"path": "mlp", "method": "rtn", "bits": 4}), WEIGHTS)
    twice = {"path": "mlp", "method": "rtn"}
    with pytest.raises(ConfigError, match="'mlp' is never used"):
        choose_methods(recipe(twice, twice), WEIGHTS)


def test_a_rule_that_matches_nothing_or_does_not_fit_is_one_message():
    with pytest.raises(ConfigError, match="layers of the recipe: 'mpl' matches no parameter"):
        choose_methods(recipe({"path": "mpl", "method": "rtn"}), WEIGHTS)
    with pytest.raises(ConfigError, match="down_proj/kernel cannot be compressed by rtn: group_size 32"):
        choose_methods(recipe({"path": ".*", "method": "rtn", "group_size": 32}), WEIGHTS)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("router", r"'router' matches decoder/layers/0/mlp/router/kernel, which is no dense layer\. Recipes compress "
         r"dense layers, experts, .* other matrices in bfloat16\. Remove the rule"),
        ("moe/up_proj", "'moe/up_proj' matches no parameter"),
    ],
)  # fmt: skip
def test_a_rule_for_weights_that_recipes_do_not_compress_says_so(path, message):
    config = build_component(ModelConfig, {**MODEL.model_dump(), "moe": {"num_experts": 4}}, "model")
    rules = recipe({"path": "attention", "method": "rtn"}, {"path": path, "method": "rtn"})
    with pytest.raises(ConfigError, match=message):
        choose_methods(rules, compressible_weights(config), other_parameters(config))


def test_biases_of_experts_are_no_weights():
    experts = {"num_experts": 4, "expert_bias": True, "router_bias": True}
    config = build_component(ModelConfig, {**MODEL.model_dump(), "moe": experts}, "model")
    found = find_weights(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))
    assert any("mlp/up_proj/kernel" in weight.path for weight in found)
    assert not any("bias" in weight.path for weight in found)
