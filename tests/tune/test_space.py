"""Search spaces: types from the configuration's schema, conditional keys, and one message for every mistake."""

import re
from pathlib import Path

import pytest
import yaml

from jaxstack.errors import ConfigError
from jaxstack.tune import space
from jaxstack.tune.space import Choice, Range, load_study, read_space
from tests.tune.studies import write_config, write_study


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("space"))


def read(config, space, *overrides):
    return read_space(space, config, overrides, "s.yaml")


def test_ranges_take_the_type_of_their_key(config):
    found = read(config, {"train.steps": {"low": 10, "high": 55, "step": 10}, "optimizer.b1": {"low": 0, "high": 0.9}})
    assert found.dimensions["train.steps"] == Range(10, 50, step=10, whole=True), "a value of the grid"
    assert found.dimensions["optimizer.b1"] == Range(0, 0.9)
    config = found.configuration({"train.steps": 30, "optimizer.b1": 0.5})
    assert config.train.steps == 30 and config.optimizer.b1 == 0.5
    assert config.train.global_batch_size == 4, "the rest is the file's"


def test_choices_may_be_of_any_type(config):
    kinds = [{"name": "softmax"}, {"name": "longformer", "window": 64}]
    found = read(config, {"model.attention": kinds, "model.qk_norm": [True, False]})
    assert found.dimensions["model.qk_norm"] == Choice((True, False))
    assert found.configuration({"model.attention": kinds[1], "model.qk_norm": True}).model.attention.window == 64


def test_keys_of_another_optimizer_are_left_out(config):
    space = {"optimizer.name": ["adamw", "sgd"], "optimizer.b2": {"low": 0.5, "high": 0.9}}
    space |= {"optimizer.momentum": {"low": 0.0, "high": 0.9}}
    found = read(config, space)
    values = {"optimizer.b2": 0.75, "optimizer.momentum": 0.5}
    assert found.configuration({"optimizer.name": "adamw", **values}).optimizer.b2 == 0.75
    assert found.configuration({"optimizer.name": "sgd", **values}).optimizer.momentum == 0.5
    assert list(found.used({"optimizer.name": "sgd", **values})) == ["optimizer.name", "optimizer.momentum"]
    with pytest.raises(ConfigError, match="unknown key 'optimizer.rms'"):
        read(config, {**space, "optimizer.rms": [0.1, 0.2]})


def test_base_values_are_the_configurations_own_where_they_are_in_the_space(config):
    space = {"train.steps": {"low": 10, "high": 50, "step": 10}, "optimizer.name": ["adamw", "lion"]}
    assert read(config, space).base_values() == {"train.steps": 20, "optimizer.name": "adamw"}
    space["train.steps"] = {"low": 15, "high": 45, "step": 10}
    assert read(config, space).base_values() is None, "not on the grid"
    assert read(config, {"train.steps": [5, 10]}).base_values() is None


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"optimizer.learning_rte": [1, 2]}, "unknown key 'optimizer.learning_rte'; did you mean 'learning_rate'"),
        ({"optimizer.b1": {"low": 0.5, "high": 0.5}}, r"low \(0.5\) must be less than high \(0.5\)"),
        ({"optimizer.b1": {"low": 0, "high": 0.5, "log": True}}, "more than 0 for a logarithmic range"),
        ({"optimizer.b1": {"low": 0.1, "high": 0.5, "log": True, "step": 0.1}}, "not for logarithmic ranges"),
        ({"optimizer.b1": {"low": 0.1, "high": 1.5}}, "should be less than 1; found 1.5"),
        ({"optimizer.b1": {"low": 0.1}}, "list of choices or"),
        ({"optimizer.b1": {"low": 0.1, "hgh": 0.5}}, "unknown key 'hgh'; did you mean 'high'"),
        ({"train.steps": {"low": 10, "high": 20, "step": 11}}, r"step \(11\) must be at most high - low \(10\)"),
        ({"optimizer.b1": {"low": 0.1, "high": 0.5, "lg": True}}, "unknown key 'lg'; did you mean 'log'"),
        ({"optimizer.b1": {"low": "a", "high": 0.5}}, "low must be a finite number"),
        ({"optimizer.b1": {"low": 0.1, "high": float("inf")}}, "high must be a finite number"),
        ({"optimizer.b1": 0.5}, "list of choices or"),
        ({"optimizer.b1": [0.5]}, "at least two different choices"),
        ({"optimizer.b1": [0.5, 0.5]}, "at least two different choices"),
        ({"optimizer.b1": [0.5, 2.0]}, "should be less than 1"),
        ({"train.steps": {"low": 10, "high": 20.5}}, "whole number"),
        ({"model.norm": {"low": 1, "high": 2}}, "model.norm cannot be"),
        ({"optimizer.name": ["adamw", "adamm"]}, "did you mean 'adamw'"),
        ({"run.name": ["a", "b"]}, "the study sets it"),
        ({"b1": [0.5, 0.6]}, "section.key"),
        ({"optimizer.b2": [0.5, 0.6]}, "also set on the command line"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_wrong_space_is_refused_with_its_key(config, space, said):
    with pytest.raises(ConfigError, match=said) as error:
        read(config, space, "optimizer.b2=0.9")
    assert str(error.value).startswith(f"s.yaml: space.{next(iter(space))}")


def test_studies_of_the_documentation_are_studies(tmp_path):
    root = Path(space.__file__).parents[2]
    shown = re.findall(r"^```yml\n(.*?)^```", (root / "docs" / "tuning.md").read_text(), re.M | re.S)
    shipped = (root / "configs" / "studies" / "quickstart.yaml").read_text()
    assert len(shown) == 2 and yaml.safe_load(shown[0]) == yaml.safe_load(shipped)
    for text in shown:
        (tmp_path / "shown.yaml").write_text(text)
        found = load_study(tmp_path / "shown.yaml")
        read_space(found.space, root / "configs" / "quickstart.yaml", ["train.steps=200"], "shown.yaml")


def test_study_files(tmp_path):
    assert load_study(write_study(tmp_path, "my study", trials=7)).name == "my-study"
    for keys, said in (
        ({"trails": 3}, "unknown key 'trails'; did you mean 'trials'"),
        ({"trials": 0}, "trials: should be greater than or equal to 1"),
        ({"sampler": "tpee"}, "did you mean 'tpe'"),
        ({"name": "a/b"}, "as a directory's name; found 'a/b'"),
        ({"space": {}}, "space: should have at least one section.key"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_study(write_study(tmp_path, **keys))
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="must hold keys such as `trials:` and `space:`; it holds a list"):
        load_study(tmp_path / "list.yaml")
    with pytest.raises(ConfigError, match="does not exist"):
        load_study(tmp_path / "none.yaml")
