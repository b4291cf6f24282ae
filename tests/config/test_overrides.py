"""What overrides on the command line change besides the value that they name, and how their mistakes are told."""

import pytest

from jaxstack.errors import ConfigError
from jaxstack.optim.optimizers import SGD
from jaxstack.run_config import load_config

FILE = """
model: {preset: tiny}
train: {steps: 3000, global_batch_size: 4}
optimizer: {learning_rate: 3.0e-3, b2: 0.98}
schedule: {name: linear, warmup_steps: 100}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(FILE)
    return path


def load(path, *overrides):
    notes = []
    return load_config(path, overrides, report=notes.append), notes


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps=-5", "override train.steps=-5: train.steps: should be greater than or equal to 1; found -5."),
        ("train.stps=3", "override train.stps=3: unknown key 'train.stps'; did you mean 'steps'?"),
        ("model.num_heads=3", "override model.num_heads=3: model: hidden_size"),
        ("schedule.warmup_steps=4000", "override schedule.warmup_steps=4000: schedule.warmup_steps (4000) must not"),
    ],
)
def test_a_wrong_override_is_told_as_one(path, override, said):
    with pytest.raises(ConfigError) as raised:
        load(path, override)
    assert str(raised.value).startswith(said) and "file.yaml" not in str(raised.value)


def test_mistakes_of_the_file_are_told_as_the_files(path):
    path.write_text(FILE.replace("3000", "-1"))
    with pytest.raises(ConfigError, match=r"file\.yaml: train\.steps"):
        load(path, "run.seed=3")


@pytest.mark.parametrize("override", ["optimizer.name=sgd", "optimizer={name: sgd}"])
def test_another_optimizer_drops_the_keys_of_the_former(path, override):
    config, notes = load(path, override)
    assert config.optimizer == SGD(learning_rate=3e-3)
    assert notes == ["optimizer.name=sgd has no optimizer.b2: the file's value is left out"]


def test_keys_given_with_the_new_component_are_kept_and_checked(path):
    with pytest.raises(ConfigError, match=r"override optimizer\.b2=0\.9: unknown key 'optimizer\.b2'"):
        load(path, "optimizer.name=sgd", "optimizer.b2=0.9")


def test_another_schedule_and_attention(path):
    path.write_text(FILE.replace("warmup_steps: 100", "warmup_steps: 100, final_fraction: 0.1"))
    config, notes = load(path, "schedule.name=constant")
    assert (config.schedule.name, config.schedule.warmup_steps) == ("constant", 100) and "final_fraction" in notes[0]
    path.write_text("model: {attention: {name: longformer, window: 8}}")
    config, notes = load(path, "model.attention.name=softmax")
    assert config.model.attention.name == "softmax" and "model.attention.window" in notes[0]


def test_a_run_made_shorter_than_its_warmup_warms_up_for_a_tenth(path):
    config, notes = load(path, "train.steps=50")
    assert (config.train.steps, config.schedule.warmup_steps) == (50, 5)
    assert notes == ["schedule.warmup_steps is 5 instead of 100, because train.steps=50"]
    with pytest.raises(ConfigError, match="must not exceed"):
        load(path, "train.steps=50", "schedule.warmup_steps=60")


def test_a_decay_that_the_optimizer_does_not_need_is_noted(path):
    (note,) = load(path, "optimizer.name=schedule_free_adamw", "schedule.name=linear")[1]
    assert "needs no decay" in note and "schedule.name=constant" in note
    assert not load(path, "optimizer.name=schedule_free_adamw", "schedule.name=constant")[1]


def test_whole_numbers_with_an_exponent(path):
    config, _ = load(path, "train.steps=1e3", "optimizer.learning_rate=1e-3")
    assert load(path, "optimizer.learning_rate=1e30")[0].optimizer.learning_rate == 1e30
    assert config.train.steps == 1000 and config.optimizer.learning_rate == 1e-3
    with pytest.raises(ConfigError, match="whole number"):
        load(path, "train.steps=1.5e0")


def test_merge_keys(tmp_path):
    path = tmp_path / "merge.yaml"
    path.write_text("train: &base {steps: 7, global_batch_size: 2}\nrun: {seed: 1}\n")
    assert load_config(path).train.steps == 7
    path.write_text("defaults: &base {steps: 7, global_batch_size: 2}\ntrain: {<<: *base, steps: 9}\n")
    with pytest.raises(ConfigError, match="unknown key 'defaults'"):
        load_config(path)
    path.write_text("train: {<<: {steps: 7, global_batch_size: 2}, steps: 9}\n")
    assert (load_config(path).train.steps, load_config(path).train.global_batch_size) == (9, 2)


def test_a_file_in_utf_16_is_called_so(tmp_path):
    path = tmp_path / "wide.yaml"
    path.write_text(FILE, encoding="utf-16")
    with pytest.raises(ConfigError, match=r"it is UTF-16; save it as UTF-8\."):
        load_config(path)
