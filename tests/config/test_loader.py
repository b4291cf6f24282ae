"""YAML and overrides: what is read, and what one message says about what cannot be."""

import math
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxstack.config.base import Component
from jaxstack.config.loader import build_component, dump_yaml, load_yaml, merge_overrides, merge_trees
from jaxstack.config.sections import RunSection, TrainConfig
from jaxstack.errors import ConfigError, nearest
from jaxstack.run_config import RunConfig, config_from_tree, load_config


def read(tmp_path, text: str | bytes):
    path = tmp_path / "some.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_yaml(path)


def message(action, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        action(*arguments)
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.e-3", "+1e-3", "1.0e-3", ".001", "0.1e-2"])
def test_exponents_are_numbers(tmp_path, text):
    assert read(tmp_path, f"optimizer: {{learning_rate: {text}}}") == {"optimizer": {"learning_rate": 0.001}}
    assert load_config(None, [f"optimizer.learning_rate={text}"]).optimizer.learning_rate == 0.001


YAML_1_2 = {
    "0100": 100, "-07": -7, "0o17": 15, "0x1F": 31, "5.": 5.0, ".5": 0.5, "1e3": 1000, ".inf": float("inf"),
    "1_000": "1_000", "1:30": "1:30", "yes": "yes", "off": "off", "true": True, "~": None,
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), YAML_1_2.items())
def test_plain_values_are_those_of_yaml_1_2(tmp_path, text, value):
    found = read(tmp_path, f"run: {{name: {text}}}")["run"]["name"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["08", "0o17", "0x1F", "1e3", "yes", "null", "1_000"])
def test_a_text_that_looks_like_a_number_is_written_as_text(tmp_path, text):
    written = dump_yaml(RunSection(name=text))
    assert read(tmp_path, written)["name"] == text


def test_a_directory_is_answered_with_its_files(tmp_path):
    (tmp_path / "small.yaml").write_text("{}")
    said = message(load_yaml, tmp_path)
    assert f"{tmp_path}: it is a directory" in said and f"'{tmp_path / 'small.yaml'}'" in said


def test_empty_file_is_an_empty_tree(tmp_path):
    assert read(tmp_path, "# only a comment\n") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2\n", "key 'a' stands twice"),
        ("train:\n  steps: 1\n  steps: 2\n", "line 3"),
        ("- 1\n- 2\n", "it holds a list"),
        ("just text", "it holds a text"),
        ("model:\n\tnum_layers: 2\n", "line 2"),
        ("model: {num_layers: 2\n", "is not valid YAML"),
        (f"train: {{steps: 0x{'f' * 5000}}}\n", "a whole number of 20000 bits"),
        ('run: {dir: "a\\0b"}\n', "a null character"),
        ("1: 2\n", "a key must be text"),
        ("? [a, b]\n: 1\n", "a key must be text"),
        (b"model: {name: \xff\xfe}", "cannot read"),
        ("a: !!python/object/apply:os.system ['true']\n", "is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML"),
        ("a: *missing\n", "is not valid YAML"),
        ("a: \x07\n", "is not valid YAML"),
        ("[" * 20000, "is not valid YAML"),
        ("a: " + "{b: " * 3000 + "1" + "}" * 3000, "is not valid YAML"),
        ("a: 2024-13-45\n", "is not valid YAML"),
    ],
)
def test_bad_files_are_explained(tmp_path, text, said):
    found = message(read, tmp_path, text)
    assert said in found and "some.yaml" in found


def test_alias_bomb_is_refused_quickly(tmp_path):
    """Nine aliases of nine aliases ...: 9^30 nodes when written out."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    assert "alias" in message(load_config, path)


def test_a_value_that_holds_itself_is_refused(tmp_path):
    path = tmp_path / "loop.yaml"
    path.write_text("model: &m {preset: *m}\n")
    assert "alias" in message(load_config, path)


def test_missing_file_names_the_like(tmp_path):
    (tmp_path / "quickstart.yaml").write_text("{}")
    assert "quickstart.yaml" in message(load_yaml, tmp_path / "quikstart.yaml")
    assert "cannot read" in message(load_yaml, tmp_path)


@pytest.mark.parametrize("path", ["\0", "x" * 5000])
def test_impossible_paths(path):
    message(load_yaml, path)


@pytest.mark.parametrize("override", ["steps", "=1", "train.=1", ".steps=1", "train..steps=1", ""])
def test_malformed_overrides(override):
    assert "section.key=value" in message(merge_overrides, {}, [override])


def test_overrides_lie_over_the_file_and_leave_it_alone():
    tree = {"model": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "num_layers": 3}}
    merged = merge_overrides(
        tree, ["model.num_layers=5", "model.rope_scaling={factor: 4.0}", "run.name=a=b", "x.y.z=[1]"]
    )
    assert merged["model"] == {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "num_layers": 5}
    assert merged["run"] == {"name": "a=b"} and merged["x"] == {"y": {"z": [1]}}
    assert tree["model"]["num_layers"] == 3


def test_overrides_change_items_of_a_list_by_number():
    tree = {"layers": [{"path": "mlp", "bits": 8}, {"path": "head"}], "data": ["a", "b"]}
    merged = merge_overrides(tree, ["layers.0.bits=4", "layers.1={bits: 3}", "data.1=c", "new=[{a: 1}]", "new.0.a=2"])
    assert merged["layers"] == [{"path": "mlp", "bits": 4}, {"path": "head", "bits": 3}]
    assert merged["data"] == ["a", "c"] and merged["new"] == [{"a": 2}] and tree["layers"][0]["bits"] == 8


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("layers.2.bits=4", "layers is a list with the items layers.0 to layers.1"),
        ("layers.bits=4", "layers is a list with the items layers.0 to layers.1"),
        ("data.1=x", "data is a list whose only item is data.0"),
        ("none.0=x", "none is a list without items, which can be given as none=[...]"),
        ("rules.0.rank=4", "there is no list rules whose item 0 it could change"),
        ("layers.0.path.0=x", "there is no list layers.0.path whose item 0"),
    ],
)
def test_an_override_of_an_item_that_is_not_there_is_explained(override, said):
    tree = {"layers": [{"path": "mlp"}, {"path": "head"}], "data": ["a"], "none": []}
    found = message(merge_overrides, tree, [override])
    assert said in found and override in found


def test_null_takes_the_default_back():
    assert load_config(None, ["optimizer.clip_norm=null"]).optimizer.clip_norm is None
    assert load_config(None, ["train=null"]).train.steps == 1000


def test_merge_trees_goes_down_and_replaces_lists():
    assert merge_trees({"a": {"b": [1, 2], "c": 3}}, {"a": {"b": [4]}, "d": 5}) == {"a": {"b": [4], "c": 3}, "d": 5}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.num_layer=2", "unknown key 'model.num_layer'; did you mean 'num_layers'"),
        ("modle.num_layers=2", "unknown key 'modle'; did you mean 'model'"),
        ("optimizer.learning_rte=1", "did you mean 'learning_rate'"),
        ("optimizer.name=adam", "optimizer.name cannot be 'adam'; did you mean 'adamw'"),
        ("schedule.name=cos", "schedule.name cannot be 'cos'"),
        ("model.mlp=gatd", "model.mlp cannot be 'gatd'; did you mean 'gated'"),
        ("checkpoint.asynch=true", "did you mean 'async'"),
        ("data.sources=[{pth: x}]", "'data.sources.0.pth'; did you mean 'path'"),
        ("model.rope_scaling={rope_type: llama3, factr: 2}", "did you mean 'factor'"),
        ("optimizer.groups=[{path: x, frozn: true}]", "did you mean 'frozen'"),
        ("train.steps=true", "train.steps must be a whole number; found true/false value True"),
        ("train.steps='10'", "train.steps must be a whole number; found text '10'"),
        ("train.steps=1.5", "train.steps must be a whole number"),
        ("train.steps=[1]", "train.steps must be a whole number; found a list"),
        ("train.steps=0", "train.steps"),
        ("train.steps=null", "train.steps must be a whole number; found null."),
        ("model.num_layers=1000000", "model.num_layers: should be less than or equal to 4096; found 1000000"),
        ("model.hidden_size=100000000", "model.hidden_size: should be less than or equal to"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate must be a number; found text 'fast'"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate"),
        ("parallel.sequence=1", "parallel.sequence must be true or false"),
        ("run.name=5", "run.name must be text"),
        ("run.name=../x", "run.name"),
        ("run.name=''", "run.name"),
        ("run.seed=-1", "run.seed"),
        ("run.seed=99999999999999999999999999", "run.seed"),
        ("model=5", "model must be a section with keys"),
        ("model=[1]", "model must be a section with keys"),
        ("data.sources=text", "data.sources must be a list; found text 'text'; write sources=[{path: text}]."),
        ("model={train.steps: 3, moe.top: 1}", "in a file, write moe: {top: 1}."),
        ("data.sources=[text]", "found text 'text'; write sources=[{path: text}]."),
        ("model.preset=llama3-8", "did you mean 'llama3-8b'"),
        ("model.preset=[1]", "there is no preset"),
        ("optimizer=adamw", "optimizer"),
        ("schedule=[cosine]", "schedule"),
        ("observe.trackers=[jsonl,tensorbord]", "did you mean 'tensorboard'"),
        ("observe.profile_steps=[1]", "observe.profile_steps"),
        ("optimizer.groups=[{path: '('}]", "is not a regular expression"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_wrong_values_are_explained(override, said):
    assert said in message(load_config, None, [override])


def test_several_problems_in_one_message():
    found = message(load_config, None, ["model.num_layer=2", "train.steps=x", "modle.a=1"])
    assert "3 problems" in found and found.count("\n  - ") == 3


class Part(Component):
    size: int = 3


class Whole(Component):
    part: Part = Part()
    parts: tuple[Part, ...] = ()


def test_components_are_frozen_and_hashable():
    whole = build_component(Whole, {"parts": [{"size": 1}, {"size": 2}]})
    assert whole.parts == (Part(size=1), Part(size=2)) and hash(whole) == hash(whole.model_copy())
    with pytest.raises(Exception, match="frozen"):
        whole.part = Part()


def test_a_list_of_valid_names_is_told_once():
    class Two(Component):
        first: Literal["red", "green"] = "red"
        second: Literal["red", "green"] = "red"
        third: Literal["one", "two"] = "one"

    told = message(build_component, Two, {"first": "xyz", "second": "uvw", "third": "xyz"})
    assert told.count("'green'") == 1 and "choose one of: 'one', 'two'" in told
    assert "second cannot be 'uvw'; the choices are those listed above." in told


def test_nearest():
    assert nearest("adam", ["adamw", "lion"]) == "did you mean 'adamw'?"
    assert nearest("qqq", ["adamw", "lion"]) == "choose one of: 'adamw', 'lion'"
    assert nearest("qqq", map(str, range(2000))) == "none of 2,000 names is like it"


KEYS = st.sampled_from([
    "run", "model", "data", "train", "optimizer", "schedule", "parallel", "precision", "checkpoint", "observe",
    "resilience", "name", "num_layers", "num_heads", "head_dim", "hidden_size", "sources", "steps", "groups", "preset",
    "rope_scaling", "layer_types", "tensor", "warmup_steps", "tokenizer", "path",
]) | st.text(max_size=5)  # fmt: skip
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["adamw", "llama3-8b", "cosine", "stdlib", -1, 0, 1, 8, math.inf, 10**40])
)  # fmt: skip
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)

OVERRIDES = st.builds("{}.{}={}".format, KEYS, KEYS, st.text(max_size=12))


@pytest.mark.longer
@settings(max_examples=50, deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=5))
def test_any_tree_is_a_configuration_or_a_config_error(tree):
    try:
        config = config_from_tree(tree)
    except ConfigError as error:
        assert str(error)
    else:
        assert isinstance(config, RunConfig)


@pytest.mark.longer
@settings(max_examples=300, deadline=None)
@given(st.lists(OVERRIDES | st.text(max_size=12), max_size=3))
def test_any_overrides_are_a_configuration_or_a_config_error(overrides):
    try:
        load_config(None, overrides)
    except ConfigError as error:
        assert str(error)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab:{}[]&*!|>-?#\n\t '\"%@,0.e~<"), max_size=40))
def test_any_text_is_yaml_or_a_config_error(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(text)
    try:
        load_config(path)
    except ConfigError as error:
        assert str(error)


def test_dump_reads_back_equal(tmp_path):
    config = load_config(None, [
        "model.preset=gemma2-2b", "optimizer={name: lion, groups: [{path: head, weight_decay: 0.5}]}",
        "schedule={name: wsd, decay_fraction: 0.1}", "checkpoint.async=false", "optimizer.learning_rate=1e-5",
        "data.sources=[{path: '/x/*.txt', weight: 2.5}]", "run.name=a-b", "observe.profile_steps=[3, 4]",
        "train.sequence_length=128",
    ])  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    assert load_config(path) == config


@pytest.mark.parametrize(
    "values, said",
    [
        ({"steps": 0}, "TrainConfig: steps should be greater than or equal to 1; found 0."),
        ({"stepss": 1}, "TrainConfig: unknown key 'stepss'; did you mean 'steps'?"),
        ({"steps": "many"}, "TrainConfig: steps should be a valid integer; found 'many'."),
        ({"steps": 0, "z_loss": -1.0}, "found 0; z_loss should be greater than or equal to 0; found -1.0."),
    ],
)
def test_a_component_made_in_python_refuses_plainly(values, said):
    text = message(lambda: TrainConfig(**values))
    assert text.endswith(said) and "pydantic" not in text
