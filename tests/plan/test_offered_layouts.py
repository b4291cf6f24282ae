"""Layouts that the planner offers run: each compiles, and its losses are those of one device."""

import numpy as np
import pytest

from jaxstack.cost_model.layouts import enumerate_layouts
from jaxstack.plan.cluster_search import SearchOptions, search_cluster
from jaxstack.plan.rehearsal import can_compile
from jaxstack.run_config import load_config
from tests.small_runs import make_trainer, run_steps, small_config

MIXTURE = "model.moe={num_experts: 4, num_experts_per_tok: 2, router_aux_loss_coef: 0.0}"
MODELS = {"dense": [], "mixture": [MIXTURE, "model.intermediate_size=32"]}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.exhaustive
def test_offered_layouts_compile_and_train_alike(name):
    config = small_config("train.global_batch_size=8", "model.num_layers=4", *MODELS[name])
    expected = run_steps(make_trainer(config), 2)
    layouts, _ = enumerate_layouts(config, 4)
    assert len(layouts) > 200
    for row in np.random.default_rng(0).choice(len(layouts), 5, replace=False):
        offered = layouts.configuration(int(row), config)
        assert run_steps(make_trainer(offered), 2) == pytest.approx(expected, rel=1e-4), offered.parallel


@pytest.mark.exhaustive
def test_verified_memory_is_that_of_the_compiler():
    if not can_compile():
        pytest.skip("needs the CUDA plugin of JAX: pip install 'jaxstack[cuda]'")
    sizes = ["train.global_batch_size=16", "train.sequence_length=2048", "data.packing=false"]
    config = load_config(None, ["model.preset=llama3-1b", "model.num_layers=4", *sizes])
    result = search_cluster(config, SearchOptions(cluster="2 h200", verify=1))
    (compiled,) = result.verified
    assert compiled["fits"] and compiled["predicted_bytes"] == pytest.approx(result.found.best.memory_bytes, rel=0.15)
    assert "compiled" in result.draw()
