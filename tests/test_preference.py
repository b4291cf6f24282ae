"""Preference losses: values computed by hand and by TRL, their properties, and what a step does with pairs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

from jaxstack.models import ModelConfig, Transformer
from jaxstack.module_arrays.companion import Companion
from jaxstack.preference import LOSSES, Pairs, PreferenceConfig, preference_loss, sum_over_pairs
from jaxstack.run.build import make_trainer
from jaxstack.run_config import load_config
from jaxstack.trainer import Trainer
from jaxstack.worker_steps import features_of
from tests.small_runs import unpacked_batch_at

CHOSEN = [[-0.5, -1.0, -0.25], [-2.0, -0.5, -0.5, -1.0]]
REJECTED = [[-1.5, -0.75], [-0.3, -0.2, -1.0]]
CHOSEN_REFERENCE = [[-0.7, -1.1, -0.4], [-1.8, -0.6, -0.5, -1.2]]
REJECTED_REFERENCE = [[-1.2, -0.5], [-0.4, -0.3, -0.8]]
COUNTED = jnp.ones(2, bool)


def sums(chosen: list[list[float]], rejected: list[list[float]]) -> jax.Array:
    return jnp.array([[sum(c), sum(r)] for c, r in zip(chosen, rejected, strict=True)])


LENGTHS = jnp.array([[len(c), len(r)] for c, r in zip(CHOSEN, REJECTED, strict=True)], jnp.float32)
PAIRS = Pairs(sums(CHOSEN, REJECTED), sums(CHOSEN_REFERENCE, REJECTED_REFERENCE), LENGTHS)


def mean_loss(pairs: Pairs, **settings) -> jax.Array:
    loss, _ = sum_over_pairs(pairs, jnp.ones(len(pairs.policy), bool), PreferenceConfig(**settings))
    return loss.total / loss.count


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"loss": "dpo"}, 0.666278),  # TRL 1.16.0: loss_type sigmoid
        ({"loss": "dpo", "label_smoothing": 0.1}, 0.671778),
        ({"loss": "robust", "label_smoothing": 0.1}, 0.659403),  # TRL
        ({"loss": "ipo"}, 22.840625),  # TRL
        ({"loss": "hinge"}, 0.945),  # TRL
        ({"loss": "simpo"}, 1.389638),  # TRL: beta 2, gamma 1
        ({"loss": "orpo"}, 0.1 * 0.808495 + (1.75 / 3 + 1) / 2),  # TRL's term of the odds
        ({"loss": "dpo", "sft_weight": 0.5}, 0.666278 + 0.5 * (1.75 / 3 + 1) / 2),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_losses_equal_reference_values(settings, expected):
    np.testing.assert_allclose(mean_loss(PAIRS, **settings), expected, rtol=1e-6)


def test_reward_models_equal_reference_values():
    pairs = PAIRS._replace(policy=jnp.array([[1.2, 0.7], [0.3, 0.8]]))
    np.testing.assert_allclose(mean_loss(pairs, loss="reward_model"), 0.724077, rtol=1e-6)
    pairs = pairs._replace(margins=jnp.array([0.5, 0.0]))
    np.testing.assert_allclose(mean_loss(pairs, loss="reward_model"), 0.833612, rtol=1e-6)
    # TRL's center_rewards_coefficient.
    centered = mean_loss(pairs._replace(margins=0.0), loss="reward_model", center_rewards=0.01)
    np.testing.assert_allclose(centered, 0.748177, rtol=1e-6)


def test_kto_equals_its_reference_value():
    np.testing.assert_allclose(mean_loss(PAIRS._replace(drift=0.05), loss="kto"), 0.493126, rtol=1e-6)


@pytest.mark.longer
def test_kto_of_answers_without_a_partner_equals_its_formula():
    """The mean of w (1 - sigmoid(b (g - z))) over good answers and of w (1 - sigmoid(b (z - g))) over bad ones."""
    gains = np.array([1.5, -0.5, 0.25])
    good = np.array([True, False, False])
    policy = jnp.zeros((3, 2)).at[jnp.arange(3), jnp.where(good, 0, 1)].set(gains)
    counted = jnp.stack([good, ~good], axis=1)
    pairs = Pairs(policy, jnp.zeros((3, 2)), jnp.full((3, 2), 4.0), drift=0.3)
    settings = PreferenceConfig(loss="kto", beta=0.5, desirable_weight=1.5, undesirable_weight=0.75)
    loss, further = sum_over_pairs(pairs, counted, settings)
    weights = np.where(good, 1.5, 0.75)
    expected = weights * (1 - 1 / (1 + np.exp(-0.5 * np.where(good, gains - 0.3, 0.3 - gains))))
    np.testing.assert_allclose(loss.total / loss.count, expected.mean(), rtol=1e-6)
    found = {name: (float(x.total), float(x.count)) for name, x in further.items()}
    assert found["chosen_reward"] == (0.75, 1) and found["rejected_reward"] == (-0.125, 2)
    assert found["margin"] == (0, 0) and found["drift"][1] == 3


def test_metrics_of_the_pairs():
    loss, further = sum_over_pairs(PAIRS, COUNTED, PreferenceConfig(loss="dpo"))
    found = {name: float(x.total / x.count) for name, x in further.items()}
    probability = (math.exp(-1.75 / 3) + math.exp(-1)) / 2
    expected = [1.0, 0.055, (0.045 + 0.01) / 2, (-0.055 + 0.0) / 2, probability]
    np.testing.assert_allclose(list(found.values()), expected, atol=1e-6)
    assert list(found) == ["accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_probability"]
    assert float(loss.count) == 2


@pytest.mark.longer
def test_the_gradient_of_a_chosen_tokens_log_probability():
    gradient = jax.grad(lambda policy: mean_loss(PAIRS._replace(policy=policy), loss="dpo"))(PAIRS.policy)
    np.testing.assert_allclose(gradient[0], [-0.023751, 0.023751], atol=1e-6)


@pytest.mark.parametrize("loss", [name for name, row in LOSSES.items() if row.needs_reference])
def test_the_reference_itself_is_indifferent(loss):
    """Where the models are equal, the loss does not depend on the answers, and DPO's is exactly log 2."""
    equal = PAIRS._replace(reference=PAIRS.policy)
    found = float(mean_loss(equal, loss=loss))
    expected = {"dpo": math.log(2), "robust": math.log(2), "ipo": 25.0, "hinge": 1.0, "kto": 0.5}
    assert found == float(np.float32(expected[loss]))


@pytest.mark.longer
@pytest.mark.parametrize("loss", LOSSES)
def test_pairs_that_only_fill_a_batch_change_nothing(loss):
    settings = PreferenceConfig(loss=loss)
    padding = (0.0, 0.0, 1.0)
    filled = Pairs(*(jnp.concatenate([x, jnp.full((3, 2), y)]) for x, y in zip(PAIRS[:3], padding, strict=True)))
    counted = jnp.array([True, True, False, False, False])

    def total(policy: jax.Array, pairs: Pairs, counted: jax.Array) -> jax.Array:
        loss, _ = sum_over_pairs(pairs._replace(policy=policy), counted, settings)
        return loss.total / loss.count

    found = jax.value_and_grad(total)(filled.policy, filled, counted)
    value, gradient = jax.value_and_grad(total)(PAIRS.policy, PAIRS, COUNTED)
    np.testing.assert_allclose(found[0], value, rtol=1e-6)
    np.testing.assert_allclose(found[1], jnp.concatenate([gradient, jnp.zeros((3, 2))]), rtol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_raises_the_chosen_answer_over_the_rejected_one(loss):
    gradient = jax.grad(lambda policy: mean_loss(PAIRS._replace(policy=policy), loss=loss))(PAIRS.policy)
    assert (gradient[:, 0] < 0).all() and (gradient[:, 1] > 0).all()


def test_smoothed_labels_mix_both_orders():
    swapped = Pairs(*(x[:, ::-1] for x in PAIRS[:3]))
    mixed = 0.8 * mean_loss(PAIRS, loss="dpo") + 0.2 * mean_loss(swapped, loss="dpo")
    np.testing.assert_allclose(mean_loss(PAIRS, loss="dpo", label_smoothing=0.2), mixed, rtol=1e-6)
    # The robust loss has the mean of DPO's under labels that are wrong at this rate.
    noisy = 0.8 * mean_loss(PAIRS, loss="robust", label_smoothing=0.2)
    noisy += 0.2 * mean_loss(swapped, loss="robust", label_smoothing=0.2)
    np.testing.assert_allclose(noisy, mean_loss(PAIRS, loss="dpo"), rtol=1e-6)


@pytest.mark.longer
@pytest.mark.parametrize("mean", [0.0, -1e-12, -1e-7, -0.6931, -0.6932, -50.0, -200.0])
def test_orpo_is_finite_where_answers_are_certain_or_impossible(mean):
    def loss(policy: jax.Array) -> jax.Array:
        return mean_loss(Pairs(policy, jnp.zeros((1, 2)), jnp.ones((1, 2))), loss="orpo")

    value, gradient = jax.value_and_grad(loss)(jnp.array([[mean, -0.7]]))
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all()


MODEL = ("model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.intermediate_size=48")
PAIR_SETTINGS = (*MODEL, "model.vocab_size=64", "train.sequence_length=16", "train.global_batch_size=8")


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> str:
    """The directory of a run that has the model and no parameters."""
    place = tmp_path_factory.mktemp("start")
    config = load_config(None, PAIR_SETTINGS)
    (place / "config.yaml").write_text(yaml.safe_dump({"model": config.model.model_dump(mode="json")}))
    return str(place)


def pairs_at(step: int, pairs: int = 8, rows: int = 2) -> dict[str, np.ndarray]:
    """Pairs whose answers begin and end in different places; the last two pairs only fill the batch."""
    flat = unpacked_batch_at(step, rows * pairs, 16, 64)
    batch = {name: x.reshape(pairs, rows, 16).copy() for name, x in flat.items()}
    batch["labels"][-2:] = -100
    return {**batch, "margin": np.zeros(pairs, np.float32)}


def companions_of(trainer: Trainer) -> list[str]:
    return [view.name for view in trainer.module.views if isinstance(view, Companion)]


def take_steps(start: str, *overrides: str, count: int = 2) -> tuple[list[dict[str, float]], Trainer]:
    """The metrics of some steps of a trainer whose reference equals the model that it begins with."""
    config = load_config(None, [*PAIR_SETTINGS, f"run.init_from={start}", *overrides])
    devices = math.prod(config.parallel.degrees.values())
    trainer = make_trainer(config, lambda step: {}, jax.devices()[:devices])
    for name in companions_of(trainer):
        own = trainer.module.split_added(trainer.module.split_saved(trainer.state.params)[0])[0]
        trainer.load_unsaved({name: jax.tree.map(jnp.copy, own)})
    pairs = pairs_at(0, rows=config.preference.method.rows)
    if config.preference.cache_reference:  # of another model, to which most answers are less likely
        pairs["reference"] = np.random.default_rng(1).normal(-60, 5, pairs["tokens"].shape[:2]).astype(np.float32)
    batch = trainer.put(pairs)
    return [trainer.read(trainer.train_step(batch)) for _ in range(count)], trainer


def test_a_run_begins_at_log_2_learns_and_leaves_the_reference_as_it_is(start):
    found, trainer = take_steps(start, "preference.loss=dpo", "optimizer.learning_rate=0.01", count=6)
    assert found[0]["loss"] == np.float32(math.log(2)) and found[0]["margin"] == 0 and found[0]["count"] == 6
    assert found[-1]["loss"] < 0.6 and found[-1]["accuracy"] == 1 and 0 < found[-1]["chosen_probability"] < 1
    rewards = [found[-1][f"{side}_reward"] for side in ("chosen", "rejected")]
    np.testing.assert_allclose(found[-1]["margin"], rewards[0] - rewards[1], rtol=1e-5)
    assert "reference" not in trainer.stored_state.params
    reference = trainer.state.params["reference"]["head"]
    assert float(jnp.abs(reference - trainer.state.params["head"]).max()) > 0.01


ROBUST = ["preference.loss=robust", "preference.label_smoothing=0.1", "preference.sft_weight=0.1"]


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        (ROBUST, ["parallel.fsdp=2", "parallel.data=2", "train.gradient_accumulation=2"]),
        (["preference.loss=kto", "optimizer.learning_rate=0.003"], ["parallel.fsdp=2", "parallel.data=2"]),
        (ROBUST, ["parallel.context=2", "parallel.fsdp=2", "train.gradient_accumulation=2"]),
        (["preference.loss=kto", "optimizer.learning_rate=0.003"], ["parallel.context=4"]),
        (["preference.loss=reward_model"], ["parallel.context=2", "parallel.tensor=2"]),
        (["preference.loss=simpo"], ["parallel.pipeline=2", "parallel.fsdp=2", "parallel.microbatches=2"]),
        (["preference.loss=reward_model"], ["parallel.pipeline=2", "parallel.tensor=2"]),
        (["preference.loss=orpo"], ["parallel.pipeline=2", "parallel.context=2"]),
    ],
    ids=[
        "robust",
        "kto",
        "robust_context",
        "kto_context",
        "reward_model_context",
        "simpo_pipeline",
        "reward_model_pipeline",
        "orpo_pipeline_context",
    ],
)
def test_pairs_split_over_devices_and_microbatches_train_as_on_one_device(start, settings, layout):
    (one, _), (several, _) = (take_steps(start, *settings, *more, count=3) for more in ([], layout))
    for a, b in zip(one, several, strict=True):
        names = sorted(a.keys() - {"accuracy"})  # of margins that are 0 but for rounding
        np.testing.assert_allclose([b[name] for name in names], [a[name] for name in names], rtol=1e-3, atol=1e-6)
    assert one[-1].get("drift") != 0


@pytest.mark.exhaustive
def test_kto_with_a_cached_reference_has_the_drift_of_each_microbatch_of_a_pipeline(start):
    settings = ["preference.loss=kto", "preference.cache_reference=true", "optimizer.learning_rate=0.003"]
    layouts = ["train.gradient_accumulation=2"], ["parallel.pipeline=2", "parallel.microbatches=2"]
    (one, _), (stages, _) = (take_steps(start, *settings, *layout) for layout in layouts)
    for a, b in zip(one, stages, strict=True):
        assert a["drift"] > 0
        names = ["loss", "grad_norm", "drift", "margin", "chosen_reward", "rejected_reward"]
        np.testing.assert_allclose([b[name] for name in names], [a[name] for name in names], rtol=1e-4)


def test_adapters_switched_off_are_the_reference(start):
    """The model without its adapters is the same reference as a second model with the weights of the beginning."""
    adapters = "adapters.rules=[{path: attention|mlp, rank: 2}]"
    settings = ["preference.loss=dpo", "optimizer.learning_rate=0.01", adapters]
    alone, trainer = take_steps(start, *settings)
    assert not companions_of(trainer) and alone[0]["loss"] == np.float32(math.log(2)) != alone[1]["loss"]
    both, trainer = take_steps(start, *settings, f"preference.reference={start}")
    assert companions_of(trainer) == ["reference"] and "preferences" in features_of(trainer)
    np.testing.assert_allclose([m["loss"] for m in alone], [m["loss"] for m in both], rtol=1e-6)
    _, trainer = take_steps(start, *settings, "optimizer.groups=[{path: norm, frozen: false}]", count=0)
    assert companions_of(trainer) == ["reference"]


def test_a_reward_model_begins_at_log_2_and_reads_rewards_at_the_stop_token(start):
    found, trainer = take_steps(start, "preference.loss=reward_model", "optimizer.learning_rate=0.01", count=4)
    assert found[0]["loss"] == np.float32(math.log(2)) and found[0]["accuracy"] == 0
    assert found[-1]["loss"] < 0.6 and "chosen_probability" not in found[-1]
    model = trainer.trained_module
    batch = {name: jnp.asarray(x) for name, x in pairs_at(0).items()}
    loss, further = preference_loss(model, batch, settings=PreferenceConfig(loss="reward_model"))
    pair = batch["labels"][0]
    hidden = model.hidden(batch["tokens"][0])
    last = [int(np.flatnonzero(row != -100)[-1]) + 1 for row in pair]
    expected = [float(hidden[i, min(at, 15)] @ model.reward_head[...]) for i, at in enumerate(last)]
    first = {name: x[:1] for name, x in batch.items()}
    _, alone = preference_loss(model, first, settings=PreferenceConfig(loss="reward_model"))
    np.testing.assert_allclose([alone["chosen_reward"].total, alone["rejected_reward"].total], expected, rtol=1e-5)
    assert float(loss.count) == float(further["margin"].count) == 6


def test_log_probabilities_are_those_of_the_answers_alone():
    config = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, vocab_size=64, final_logit_softcapping=2.0)
    model, reference = (Transformer(config, nnx.Rngs(seed)) for seed in (0, 1))
    model.attach("reference", reference, "preferences")
    batch = {name: jnp.asarray(x) for name, x in pairs_at(0).items()}
    counted = (batch["labels"] != -100).any(-1).all(-1)

    def sums(model: Transformer) -> np.ndarray:
        log = jax.nn.log_softmax(model(batch["tokens"].reshape(-1, 16)))
        labels = batch["labels"].reshape(-1, 16)
        chosen = np.take_along_axis(np.asarray(log), np.maximum(labels, 0)[..., None], -1)[..., 0]
        return np.where(labels == -100, 0, chosen).sum(-1).reshape(-1, 2)

    gain = sums(model) - sums(reference)
    margins = (0.5 * (gain[:, 0] - gain[:, 1]))[counted]
    loss, further = preference_loss(model, batch, settings=PreferenceConfig(loss="hinge", beta=0.5))
    np.testing.assert_allclose(loss.total, np.maximum(0, 1 - margins).sum(), rtol=1e-5)
    np.testing.assert_allclose(further["margin"].total, margins.sum(), rtol=1e-4)
    assert float(loss.count) == counted.sum()
