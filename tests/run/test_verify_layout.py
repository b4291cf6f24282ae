"""`resilience.verify_layout`: a small model in the run's layout against one device."""

import dataclasses
import functools

import jax
import pytest

from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.run import verify_layout as module
from jaxstack.run.verify_layout import small_copy, verify_layout
from tests.small_runs import small_config

LAYOUT = ("parallel.fsdp=2", "parallel.tensor=2", "train.global_batch_size=4")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, value in (("_WIDTH", 32), ("_VOCABULARY", 64), ("_LENGTH", 16)):
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.preset=llama3-70b", "parallel.tensor=8", "train.sequence_length=1024"),
        ("model.preset=deepseek-v3", "parallel.expert=4", "parallel.tensor=2", "train.global_batch_size=8"),
        (
            "model.preset=gemma2-2b",
            "model.num_layers=26",
            "parallel.pipeline=2",
            "parallel.context=2",
            "train.gradient_accumulation=4",
        ),
    ],
    ids=str,
)
def test_a_small_copy_has_the_kinds_of_layers_of_the_model(overrides):
    config = small_config(*overrides)
    small = small_copy(config)
    assert small.layout_problems() == [] and small.parallel == config.parallel
    assert set(small.model.layers()) == set(config.model.layers())
    assert small.model.num_layers <= 8 and small.model.hidden_size == 32


@pytest.mark.longer
def test_a_right_layout_is_said_and_a_wrong_gradient_stops_the_run(monkeypatch):
    config = small_config(*LAYOUT)
    said = []
    verify_layout(config, said.append)
    assert said[0].startswith("layout fsdp 2 x tensor 2: a small copy of the model has the loss and gradients of one")

    def wrong(config, data, devices):
        """A layout that adds the gradients of a norm over half of the devices."""
        trainer = make_trainer(config, data, devices)
        if len(devices) > 1:
            gradients = trainer.steps.gradients

            def halved(*args, **settings):
                sums, others = gradients(*args, **settings)
                half = jax.tree.map_with_path(
                    lambda path, g: g / 2 if "final_norm" in jax.tree_util.keystr(path) else g, sums.gradients
                )
                return dataclasses.replace(sums, gradients=half), others

            trainer.steps.gradients = functools.wraps(gradients)(halved)
        return trainer

    make_trainer = module.make_trainer
    monkeypatch.setattr(module, "make_trainer", wrong)
    message = r"fsdp 2 x tensor 2 computes another gradient of .*final_norm/scale.* 0\.5 "
    with pytest.raises(JaxstackError, match=message):
        verify_layout(config, said.append)


def test_one_worker_is_checked_in_one_process_only(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = small_config("parallel.workers=2")
    with pytest.raises(ConfigError, match=r"with parallel.workers \(2\) set it to false"):
        verify_layout(config, print)
