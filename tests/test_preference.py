"""Preference losses: values computed by hand and by TRL, their properties, and what a step does with pairs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.preference import LOSSES, Pairs, PreferenceConfig, sum_over_pairs

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


def test_metrics_of_the_pairs():
    loss, further = sum_over_pairs(PAIRS, COUNTED, PreferenceConfig(loss="dpo"))
    found = {name: float(x.total / x.count) for name, x in further.items()}
    probability = (math.exp(-1.75 / 3) + math.exp(-1)) / 2
    expected = [1.0, 0.055, (0.045 + 0.01) / 2, (-0.055 + 0.0) / 2, probability]
    np.testing.assert_allclose(list(found.values()), expected, atol=1e-6)
    assert list(found) == ["accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_probability"]
    assert float(loss.count) == 2


def test_the_gradient_of_a_chosen_tokens_log_probability():
    gradient = jax.grad(lambda policy: mean_loss(PAIRS._replace(policy=policy), loss="dpo"))(PAIRS.policy)
    np.testing.assert_allclose(gradient[0], [-0.023751, 0.023751], atol=1e-6)


@pytest.mark.parametrize("loss", [name for name, row in LOSSES.items() if row.needs_reference])
def test_the_reference_itself_is_indifferent(loss):
    """Where the models are equal, the loss does not depend on the answers, and DPO's is exactly log 2."""
    equal = PAIRS._replace(reference=PAIRS.policy)
    found = float(mean_loss(equal, loss=loss))
    assert found == float(np.float32({"dpo": math.log(2), "robust": math.log(2), "ipo": 25.0, "hinge": 1.0}[loss]))


@pytest.mark.parametrize("loss", LOSSES)
def test_pairs_that_only_fill_a_batch_change_nothing(loss):
    settings = PreferenceConfig(loss=loss)
    padding = (0.0, 0.0, 1.0)
    filled = Pairs(*(jnp.concatenate([x, jnp.full((3, 2), y)]) for x, y in zip(PAIRS, padding, strict=True)))
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
    swapped = Pairs(*(x[:, ::-1] for x in PAIRS))
    mixed = 0.8 * mean_loss(PAIRS, loss="dpo") + 0.2 * mean_loss(swapped, loss="dpo")
    np.testing.assert_allclose(mean_loss(PAIRS, loss="dpo", label_smoothing=0.2), mixed, rtol=1e-6)
    # The robust loss has the mean of DPO's under labels that are wrong at this rate.
    noisy = 0.8 * mean_loss(PAIRS, loss="robust", label_smoothing=0.2)
    noisy += 0.2 * mean_loss(swapped, loss="robust", label_smoothing=0.2)
    np.testing.assert_allclose(noisy, mean_loss(PAIRS, loss="dpo"), rtol=1e-6)


@pytest.mark.parametrize("mean", [0.0, -1e-12, -1e-7, -0.6931, -0.6932, -50.0, -200.0])
def test_orpo_is_finite_where_answers_are_certain_or_impossible(mean):
    def loss(policy: jax.Array) -> jax.Array:
        return mean_loss(Pairs(policy, jnp.zeros((1, 2)), jnp.ones((1, 2))), loss="orpo")

    value, gradient = jax.value_and_grad(loss)(jnp.array([[mean, -0.7]]))
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all()
