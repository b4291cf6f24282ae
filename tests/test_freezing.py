"""Frozen parameters: no update, no gradient, no optimizer state, in every layout."""

import re

import jax
import numpy as np
import pytest

from jaxstack.errors import ConfigError
from jaxstack.parameter_paths import path_name
from tests.compilation import fully_optimized
from tests.small_runs import make_trainer, run_steps, small_config

pytestmark = pytest.mark.longer  # a few seconds each

FREEZE = "optimizer.groups=[{path: embedding|mlp/, frozen: true}]"
LAYOUTS = {
    "unrolled, accumulation": ("model.scan_layers=false", "train.gradient_accumulation=2"),
    "fsdp": ("parallel.data=2", "parallel.fsdp=2", "train.gradient_accumulation=2"),
    "tensor": ("parallel.fsdp=2", "parallel.tensor=2", "parallel.sequence=true"),
    "zero": ("parallel.data=4", "parallel.zero=2"),
    "unrolled pipeline": ("parallel.pipeline=2", "parallel.data=2", "model.scan_layers=false"),
}


def named(tree) -> dict[str, jax.Array]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def trainer_of(*overrides: str):
    return make_trainer(small_config("train.global_batch_size=8", "model.vocab_size=96", *overrides))


@pytest.fixture(scope="module")
def on_one_device() -> list[float]:
    return run_steps(trainer_of(FREEZE), 3)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.exhaustive] if "pipeline" in name else []) for name in LAYOUTS]
)
def test_only_what_is_not_frozen_moves_and_the_loss_is_that_of_one_device(layout, on_one_device):
    trainer = trainer_of(FREEZE, *LAYOUTS[layout])
    before = jax.tree.map(np.asarray, trainer.state.params)
    losses = run_steps(trainer, 3)
    if "unrolled" not in layout:  # their initial values are others
        np.testing.assert_allclose(losses, on_one_device, rtol=2e-5)
    assert losses[-1] < losses[0]
    for path, now in named(trainer.state.params).items():
        frozen = re.search("embedding|mlp/", path) is not None
        assert np.array_equal(named(before)[path], now) == frozen, path


def test_optimizer_and_gradients_hold_the_trained_leaves_only():
    trainer = trainer_of(FREEZE)
    trained = {path: x for path, x in named(trainer.state.params).items() if not re.search("embedding|mlp/", path)}
    moments = [x for x in jax.tree.leaves(trainer.state.optimizer) if x.ndim]
    assert sum(x.nbytes for x in moments) == 2 * sum(x.nbytes for x in trained.values())
    gradients = jax.eval_shape(
        trainer.steps.gradients, trainer.state.params, trainer.state.non_params, trainer.peek_batch(), jax.random.key(0)
    )[0].gradients
    assert {path: x.shape for path, x in named(gradients).items()} == {path: x.shape for path, x in trained.items()}


@fully_optimized()
def test_a_step_computes_and_sends_no_gradient_of_what_is_frozen():
    def cost(*overrides: str) -> tuple[float, int]:
        trainer = trainer_of("parallel.fsdp=4", *overrides)
        program = trainer.compile(trainer.peek_batch())
        return program.cost_analysis()["flops"], program.as_text().count(" reduce-scatter(")

    (flops, sums), (fewer, none) = cost(), cost("optimizer.groups=[{path: embedding|head|kernel, frozen: true}]")
    assert sums > 5 and none == 0
    assert fewer < 0.7 * flops, "forward and the gradients of activations are two thirds"


@pytest.mark.exhaustive
def test_a_run_with_frozen_parameters_resumes_exactly(tmp_path):
    trainer_of(FREEZE, "train.steps=2", "schedule.name=constant").fit(tmp_path / "a")
    wanted = trainer_of(FREEZE, "train.steps=4", "schedule.name=constant")
    wanted.fit()
    resumed = trainer_of(FREEZE, "train.steps=4", "schedule.name=constant")
    resumed.fit(tmp_path / "a")
    assert int(resumed.state.step) == 4
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, wanted.state.params)


def test_a_rule_that_freezes_everything_is_refused():
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        trainer_of("optimizer.groups=[{path: '.*', frozen: true}]")


def test_a_pipeline_refuses_to_freeze_one_of_the_layers_that_it_stores_together():
    with pytest.raises(ConfigError, match="drop the layer's number"):
        trainer_of(
            "optimizer.groups=[{path: layers/1/, frozen: true}]", "parallel.pipeline=2", "model.scan_layers=false"
        )
