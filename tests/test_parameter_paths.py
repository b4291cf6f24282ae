"""Path rules: names of parameters, first match wins, what matches nothing is refused."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.parameter_paths import check_patterns, map_by_path, match, path_name

TREE = {"decoder": {"layers": [{"kernel": 1, "bias": 2}, {"kernel": 3}]}, "head": 4}


def names(tree) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def test_names_join_keys_of_any_kind():
    assert names(TREE) == ["decoder/layers/0/bias", "decoder/layers/0/kernel", "decoder/layers/1/kernel", "head"]
    assert names((1, {"value": 2})) == ["0", "1/value"]


def test_an_nnx_state_is_named_by_its_variables():
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert names(state) == ["bias", "kernel"]


def test_the_first_match_wins():
    rules = [("layers/0", "first"), ("kernel$", "kernel"), (".*", "rest")]
    found = map_by_path(lambda path, leaf: match(path, rules), TREE)
    assert found["decoder"]["layers"] == [{"kernel": "first", "bias": "first"}, {"kernel": "kernel"}]
    assert found["head"] == "rest"


def test_no_match_raises_and_names_the_rules():
    with pytest.raises(KeyError, match=r"'head'.*kernel"):
        match("head", [("kernel", 1)])


def test_map_takes_further_trees():
    doubled = map_by_path(lambda path, a, b: (path, a + b), {"x": jnp.ones(2)}, {"x": 3.0})
    assert doubled["x"][0] == "x" and float(doubled["x"][1][0]) == 4


def test_patterns_that_match_nothing_are_refused():
    check_patterns(["layers/1", "head"], TREE, "optimizer.groups")
    with pytest.raises(ConfigError, match=r"optimizer.groups: 'haed' matches no parameter; paths look like decoder"):
        check_patterns(["head", "haed"], TREE, "optimizer.groups")
