"""FP8 in the model: which layers, training in each recipe and layout, the scaling state through step and checkpoint."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.errors import ConfigError
from jaxstack.loop import LoopSettings
from jaxstack.models import ModelConfig, Transformer, count_fp8_matmuls, in_fp8
from jaxstack.models.low_precision import describe_fp8
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.module_arrays.pipeline_order import StagedArrays
from jaxstack.observe.config import ObserveConfig
from jaxstack.observe.what_ran import refuse_missing_fp8, summarise_program
from jaxstack.precision import Fp8Matmul, PrecisionConfig, ScalingState, use_fp8
from jaxstack.run_config import load_config
from pallas_kernels import record_choices
from tests.reliability.states import read_checkpoint
from tests.small_runs import make_trainer, run_steps, small_config

STEPS = 3


def losses(*overrides: str, steps: int = STEPS) -> list[float]:
    return run_steps(make_trainer(small_config(*overrides)), steps)


@functools.cache
def on_one_device(recipe: str) -> list[float]:
    return losses(f"precision.fp8={recipe}")


# --- which layers -------------------------------------------------------------------------------------------------


def paths_in_fp8(precision: PrecisionConfig, **model) -> set[str]:
    config = ModelConfig(vocab_size=64, hidden_size=32, num_layers=4, **model)
    abstract = nnx.eval_shape(lambda: in_fp8(Transformer(config, nnx.Rngs(0)), precision))
    modules = nnx.iter_modules(abstract)
    return {"/".join(map(str, path)) for path, m in modules if isinstance(getattr(m, "dot_general", None), Fp8Matmul)}


PROJECTIONS = {
    *(f"attention/{name}_proj" for name in "qkvo"),
    *(f"mlp/{name}_proj" for name in ("gate", "up", "down")),
}


EVERY = ({"path": "_proj", "fp8": True},)


def test_all_projections_but_of_the_first_and_the_last_layer():
    found = paths_in_fp8(PrecisionConfig(fp8="current"), scan_layers=False)
    assert found == {f"decoder/layers/{i}/{name}" for i in (1, 2) for name in PROJECTIONS}
    # Scanned: the layers at the ends are the first and the last of three modules.
    found = paths_in_fp8(PrecisionConfig(fp8="current"), unscanned_end_layers=1)
    assert found == {f"decoder/layers/1/{name}" for name in PROJECTIONS}
    assert not paths_in_fp8(PrecisionConfig())


def test_a_rule_takes_the_first_and_the_last_layer_too():
    found = paths_in_fp8(PrecisionConfig(fp8="current", fp8_rules=EVERY), scan_layers=False)
    assert found == {f"decoder/layers/{i}/{name}" for i in range(4) for name in PROJECTIONS}
    found = paths_in_fp8(PrecisionConfig(fp8="current", fp8_rules=EVERY), unscanned_end_layers=1)
    assert found == {f"decoder/layers/{i}/{name}" for i in range(3) for name in PROJECTIONS}


def test_one_scan_of_all_layers_runs_all_in_fp8():
    assert paths_in_fp8(PrecisionConfig(fp8="current")) == {f"decoder/layers/0/{name}" for name in PROJECTIONS}


def test_a_run_in_fp8_scans_the_layers_between():
    assert load_config(None, ["precision.fp8=current"]).model.unscanned_end_layers == 1
    assert load_config(None, ["precision.fp8=current", "model.unscanned_end_layers=0"]).model.unscanned_end_layers == 0
    assert load_config(None, ["precision.fp8=current", "parallel.pipeline=2"]).model.unscanned_end_layers == 0
    assert load_config(None, []).model.unscanned_end_layers == 0


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("model", [{}, {"unscanned_end_layers": 1}, {"scan_layers": False}], ids=str)
@pytest.mark.parametrize("num_layers", [2, 4])
def test_the_log_says_which_layers_run_in_fp8(num_layers, model, staged):
    config = ModelConfig(vocab_size=64, hidden_size=32, num_layers=num_layers, **model)
    precision = PrecisionConfig(fp8="delayed")

    def make(rngs):
        return in_fp8(Transformer(config, rngs), precision)

    module = StagedArrays(make, 2) if staged else ModuleArrays(make)
    every = module.fp8_matmuls == 3 * len(PROJECTIONS) * num_layers
    said = describe_fp8(config, precision, staged=staged)
    assert said.startswith("FP8 (delayed) in all layers") and ("but the first and the last" in said) == (not every)
    assert ("as without a pipeline" in said) == (every and staged and num_layers > 2)
    rules = precision.model_copy(update={"fp8_rules": EVERY})
    assert "precision.fp8_rules" in describe_fp8(config, rules, staged=staged)
    assert describe_fp8(config, PrecisionConfig(), staged=staged) == ""


MIXTURE = {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}}
"""A mixture whose first layer is one too."""


@pytest.mark.parametrize("scan", [True, False])
def test_experts_are_counted(scan):
    config = ModelConfig(
        vocab_size=64, hidden_size=32, num_layers=4, scan_layers=scan, unscanned_end_layers=1, **MIXTURE
    )

    def module(*rules, fp8="current"):
        precision = PrecisionConfig(fp8=fp8, fp8_rules=rules)
        return ModuleArrays(lambda rngs: in_fp8(Transformer(config, rngs), precision))

    # Gate and up share their input's gradient.
    without = module({"path": "mlp/(gate|up|down)_proj", "fp8": False}).fp8_matmuls
    assert without == 3 * 4 * 2
    assert module().fp8_matmuls == without + 8 * 2
    assert module(*EVERY).fp8_matmuls > 2 * module().fp8_matmuls
    assert module(fp8="none").fp8_matmuls == 0
    said = describe_fp8(config, PrecisionConfig(fp8="current"), staged=False)
    assert said == "FP8 (current) in all layers but the first and the last, experts with a scale for every 128 values"


EXPERTS = ("model.num_layers=2", "model.moe={num_experts: 4, num_experts_per_tok: 2}")


def test_experts_compute_in_fp8():
    trainer = make_trainer(small_config(*EXPERTS, "precision.fp8=current"))
    trainer.compile(trainer.peek_batch(), create_state=True)
    ran = trainer.describe()
    operations = {kernel["operation"] for kernel in ran["kernels"]}
    assert "fp8_grouped_matmul" in operations and "grouped_matmul" not in operations
    assert "fp8_grouped_matmul: xla" in summarise_program(ran)


def test_experts_in_fp8_train_as_in_the_compute_dtype():
    only_experts = 'precision.fp8_rules=[{path: "attention", fp8: false}]'
    plain, fp8 = losses(*EXPERTS), losses(*EXPERTS, "precision.fp8=blockwise", only_experts)
    assert fp8 != plain
    np.testing.assert_allclose(fp8, plain, rtol=2e-3)
    sharded = losses(*EXPERTS, "precision.fp8=blockwise", only_experts, "parallel.expert=2", "parallel.data=2")
    np.testing.assert_allclose(sharded, fp8, rtol=1e-4)


def test_rules_leave_layers_out():
    rules = ({"path": "layers/(0|3)/", "fp8": False}, {"path": "o_proj", "fp8": False})
    found = paths_in_fp8(PrecisionConfig(fp8="blockwise", fp8_rules=rules), scan_layers=False)
    assert found == {f"decoder/layers/{i}/{name}" for i in (1, 2) for name in PROJECTIONS - {"attention/o_proj"}}


def test_rules_that_tell_scanned_layers_apart_are_refused():
    with pytest.raises(ConfigError, match=r"layers/1/.* is to run in FP8 and .*layers/0/.*scan_layers to false"):
        paths_in_fp8(PrecisionConfig(fp8="current", fp8_rules=({"path": "layers/0/", "fp8": False},)))


def test_a_rule_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"'k_porj' matches no parameter; .*layers/0/attention/q_proj/kernel"):
        paths_in_fp8(PrecisionConfig(fp8="current", fp8_rules=({"path": "k_porj", "fp8": False},)))


def test_layers_of_alternating_kinds_are_numbered_as_in_the_model():
    kinds = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4}
    rules = ({"path": "layers/(0|2)/", "fp8": False},)
    found = paths_in_fp8(PrecisionConfig(fp8="current", fp8_rules=rules), **kinds)
    assert found == {f"decoder/layers/1/{name}" for name in PROJECTIONS}


@pytest.mark.parametrize("scan", [True, False])
def test_the_number_of_matmuls(scan):
    config = ModelConfig(vocab_size=64, hidden_size=32, num_layers=4, scan_layers=scan, unscanned_end_layers=1)

    def count(*rules) -> int:
        precision = PrecisionConfig(fp8="current", fp8_rules=rules)
        return count_fp8_matmuls(nnx.eval_shape(lambda: in_fp8(Transformer(config, nnx.Rngs(0)), precision)))

    assert count() == 3 * 7 * 2
    assert count(*EVERY) == 3 * 7 * 4


def test_a_users_own_layers():
    module = nnx.Sequential(nnx.Linear(32, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 8, rngs=nnx.Rngs(1)))
    use_fp8(module, lambda path: Fp8Matmul("current") if path[-1] == 0 else None)
    with record_choices() as choices:
        module(jnp.ones((16, 32)))
    assert [choice.operation for choice in choices] == ["fp8_dot_general"]


def test_a_step_with_fewer_fp8_matmuls_than_it_should_have_is_refused():
    ran = {"matmuls": {"all": 9, "fp8": 5, "fp8_expected": 6}}
    with pytest.raises(ConfigError, match=r"5 FP8 matmuls and should have 6"):
        refuse_missing_fp8(ran)
    refuse_missing_fp8({"matmuls": {"all": 9, "fp8": 6, "fp8_expected": 6}})


# --- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise"])
def test_it_trains_nearly_as_float32(recipe):
    found = on_one_device(recipe)
    wanted = on_one_device("none")
    assert found != wanted and found == pytest.approx(wanted, rel=0.01)


LAYOUTS = (
    "parallel.fsdp=2 parallel.data=2",
    "parallel.tensor=2 train.gradient_accumulation=2",
    "parallel.fsdp=2 parallel.tensor=2 model.scan_layers=false",
    "parallel.data=2 model.remat=full train.gradient_accumulation=2",
)
QUICK = {("current", LAYOUTS[1]), ("delayed", LAYOUTS[0])}


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param(recipe, layout, marks=[] if (recipe, layout) in QUICK else pytest.mark.exhaustive)
        for recipe in ("current", "delayed", "blockwise")
        for layout in LAYOUTS
    ],
)
def test_layouts_train_nearly_as_one_device(recipe, layout):
    """Nearly: a device scales its own rows."""
    found = losses(f"precision.fp8={recipe}", *layout.split())
    assert found == pytest.approx(on_one_device(recipe), rel=2e-3)


PIPELINE = ("parallel.pipeline=2", "train.gradient_accumulation=4")
EVERY_LAYER = ("model.num_layers=4", "precision.fp8_rules=[{path: _proj, fp8: true}]")
PIPELINES = (
    "parallel.pipeline_schedule=zero_bubble model.unscanned_end_layers=1",
    "parallel.pipeline_schedule=interleaved parallel.data=2",
    "parallel.tensor=2 model.scan_layers=false",
)


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param(
            recipe, layout, marks=[] if (recipe, layout) == ("delayed", PIPELINES[0]) else pytest.mark.exhaustive
        )
        for recipe in ("current", "delayed", "blockwise")
        for layout in PIPELINES
    ],
)
@pytest.mark.exhaustive
def test_a_pipeline_runs_in_fp8_what_one_device_does(recipe, layout):
    """Until a difference of float32 makes a number another in FP8; blocks of gradients end where microbatches do."""
    model = [o for o in layout.split() if o.startswith("model.")] or ["model.unscanned_end_layers=0"]
    shape = (*EVERY_LAYER, *model, f"precision.fp8={recipe}")
    trainer, alone = (make_trainer(small_config(*shape, *o)) for o in ((*PIPELINE, *layout.split()), ()))
    inputs = len(PROJECTIONS) if recipe != "blockwise" else 4  # those of q, k, v; o; gate, up; down
    assert trainer.module.fp8_matmuls == alone.module.fp8_matmuls == 4 * (2 * len(PROJECTIONS) + inputs)
    exact = 1e-3 if recipe == "blockwise" else 1e-5
    assert run_steps(trainer, 3) == pytest.approx(run_steps(alone, 3), rel=exact)
    found, wanted = (t.stored_state.non_params for t in (trainer, alone))
    chex.assert_trees_all_close(found, wanted, rtol=1e-2, atol=0)
    assert len(jax.tree.leaves(wanted)) > 0 or recipe != "delayed"


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_gathered_bytes_give_the_same_loss(recipe):
    """Widths at which also blocks' shards are whole blocks, so that FP8 is what is gathered."""
    shape = ("model.hidden_size=256", "model.intermediate_size=256", "model.head_dim=32", f"precision.fp8={recipe}")
    assert losses(*shape, "parallel.fsdp=2") == pytest.approx(losses(*shape), rel=2e-3)


# --- the scaling state --------------------------------------------------------------------------------------------


def states_after(*overrides: str) -> dict[str, np.ndarray]:
    trainer = make_trainer(small_config("precision.fp8=delayed", "precision.fp8_history=4", *overrides))
    run_steps(trainer, 2)
    scaling, _ = trainer.module.split_scaling(trainer.state.non_params)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(scaling)}


def test_histories_are_the_same_however_the_batch_is_cut():
    """The maximum over microbatches and devices, not their sum."""
    whole = states_after()
    assert len(whole) == len(PROJECTIONS)
    cut = states_after("parallel.data=2", "train.gradient_accumulation=2")
    for name, history in whole.items():
        assert history.shape == (2, 3, 4), "layers, roles, steps"
        assert (history[..., :2] > 0).all() and (history[..., 2:] == 0).all()
        np.testing.assert_allclose(cut[name][:, :2, 1], history[:, :2, 1], rtol=1e-2)
        np.testing.assert_allclose(cut[name], history, rtol=0.2)


def test_a_skipped_step_keeps_the_histories():
    trainer = make_trainer(small_config("precision.fp8=delayed"))
    run_steps(trainer, 1)
    before = jax.device_get(trainer.module.split_scaling(trainer.state.non_params)[0])
    state = trainer.state
    trainer.state = state._replace(params={**state.params, "head": state.params["head"] * jnp.nan})
    run_steps(trainer, 1)
    after = jax.device_get(trainer.module.split_scaling(trainer.state.non_params)[0])
    assert int(trainer.state.skipped) == 1
    chex.assert_trees_all_equal(after, before)


def test_scaling_states_are_no_parameters():
    trainer = make_trainer(small_config("precision.fp8=delayed"))
    plain = make_trainer(small_config())
    assert jax.tree.structure(trainer.abstract_state.params) == jax.tree.structure(plain.abstract_state.params)
    assert jax.tree.structure(trainer.abstract_state.optimizer) == jax.tree.structure(plain.abstract_state.optimizer)
    variables = nnx.state(trainer.trained_module, ScalingState)
    assert len(jax.tree.leaves(variables)) == len(PROJECTIONS)


@pytest.mark.exhaustive
def test_a_delayed_run_resumes_bit_for_bit(tmp_path):
    settings = LoopSettings(
        checkpoint=CheckpointConfig(every_steps=2),
        observe=ObserveConfig(log_every=1, trackers=("jsonl",), progress=False),
    )

    def state_after(directory, steps):
        trainer = make_trainer(small_config("precision.fp8=delayed", f"train.steps={steps}", "schedule.name=constant"))
        trainer.fit(directory, settings)
        return jax.device_get(trainer.state._replace(key=jax.random.key_data(trainer.state.key)))

    whole = state_after(tmp_path / "whole", 4)
    state_after(tmp_path / "cut", 2)
    saved, wanted = (read_checkpoint(tmp_path / name, 2) for name in ("cut", "whole"))
    assert [name for name in wanted if saved[name] != wanted[name]] == [], "before anything is resumed"
    chex.assert_trees_all_equal(state_after(tmp_path / "cut", 4), whole)
