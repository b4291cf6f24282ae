"""Policy-gradient losses: values computed by hand and by TRL 1.16.0, and their properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.loss import IGNORE, token_losses
from jaxstack.models import Transformer
from jaxstack.reinforce.policy import ADVANTAGES, KL_ESTIMATORS, LOSSES, PolicyConfig, Tokens, sum_over_tokens
from jaxstack.run_config import load_config
from tests.compilation import run_jitted

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0]], np.float32)
POLICY = [[-0.4, -1.2, -0.3], [-1.0, -0.2], [-0.6, -0.6, -0.9], [-0.1]]
OLD = [[-0.9, -1.0, -0.3], [-0.7, -0.25], [-0.6, -0.9, -1.0], [-0.2]]
REFERENCE = [[-0.8, -1.1, -0.5], [-0.9, -0.2], [-0.5, -0.8, -1.1], [-0.3]]
SAMPLER = [[-0.95, -1.0, -0.2], [-0.7, -1.25], [-0.55, -0.9, -1.0], [-0.2]]
LENGTH = 3


def padded(answers: list[list[float]], width: int = LENGTH) -> jax.Array:
    return jnp.array([[*answer, *[0.0] * (width - len(answer))] for answer in answers])


def tokens_of(settings: PolicyConfig, width: int = LENGTH, **changes: jax.Array) -> Tokens:
    advantages = jnp.array(settings.advantages(REWARDS)).reshape(-1, 1)
    real = padded([[1.0] * len(answer) for answer in POLICY], width)
    shares = real / real.sum(1, keepdims=True)
    known = {"old": padded(OLD, width), "reference": padded(REFERENCE, width), **changes}
    return Tokens(padded(POLICY, width), padded(SAMPLER, width), advantages * real, shares, **known)


def mean_loss(tokens: Tokens, settings: PolicyConfig) -> jax.Array:
    loss, _ = sum_over_tokens(tokens, settings, LENGTH)
    return loss.total / loss.count


@pytest.mark.parametrize(
    ("settings", "with_std", "with_mean"),
    [
        ({"loss": "grpo", "reduce": "tokens"}, 0.113757, 0.065689),  # TRL
        ({"loss": "grpo"}, -0.007382, -0.004263),  # TRL
        ({"loss": "dr_grpo"}, 0.085318, 0.049266),  # TRL
        ({"loss": "dapo"}, 0.106060, 0.061244),  # TRL
        ({"loss": "gspo", "clip": (0.1, 0.1)}, -0.034066, -0.019671),  # TRL
        ({"loss": "cispo", "clip": (1.0, 0.28)}, -0.135532, -0.078263),  # TRL
        ({"loss": "cispo", "clip": (0.2, 0.28)}, -0.141226, -0.081551),
        ({"loss": "reinforce"}, -0.125071, -0.072222),
        ({"loss": "grpo", "reduce": "tokens", "kl": 0.04, "kl_estimator": "k3"}, 0.114471, 0.066403),  # TRL
        ({"loss": "rloo", "sampler_correction": {"method": "truncate"}}, 0.213442, 0.123252),  # TRL
        ({"loss": "rloo", "sampler_correction": {"method": "mask"}}, 0.286090, 0.165203),  # TRL
        ({"loss": "rloo", "sampler_correction": {"method": "mask_answers"}}, -0.066398, -0.038342),  # TRL
        ({"loss": "rloo", "sampler_correction": {"method": "truncate_answers"}}, 0.289817, 0.167355),  # TRL
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_losses_equal_reference_values(settings, with_std, with_mean):
    for advantage, expected in (("group_std", with_std), ("group_mean", with_mean)):
        chosen = PolicyConfig(**settings, advantage=advantage)
        np.testing.assert_allclose(mean_loss(tokens_of(chosen), chosen), expected, atol=1e-6)


def test_advantages_equal_reference_values():
    found = [ADVANTAGES[name](REWARDS)[0, 0] for name in ("group_std", "group_mean", "leave_one_out", "batch_std")]
    np.testing.assert_allclose(found, [0.865875, 0.5, 0.666667, 0.865875], atol=1e-6)


def test_metrics_of_the_tokens():
    settings = PolicyConfig(loss="grpo")
    _, further = sum_over_tokens(tokens_of(settings), settings, LENGTH)
    found = {name: float(x.total / x.count) for name, x in further.items()}
    assert found == pytest.approx({"clip_share": 0.222222, "kl": 0.017862, "entropy": 5.3 / 9,
                                   "sampler_logprob_difference": 1.2 / 9,
                                   "sampler_kl": 0.080624}, abs=1e-6)  # fmt: skip
    settings = PolicyConfig(loss="grpo", sampler_correction={"method": "truncate"})
    _, further = sum_over_tokens(tokens_of(settings), settings, LENGTH)
    weights = {name: float(x.total / x.count) for name, x in further.items() if name.startswith("importance")}
    assert weights == pytest.approx({"importance": 1.100815, "importance_limited": 1 / 9}, abs=1e-6)


def test_estimators_of_the_divergence():
    """Values at one token, and expected gradients under a softmax: k2 and k3+ have that of KL(p || reference)."""
    logits, reference = jnp.array([0.3, -0.5, 1.0, 0.1]), jax.nn.log_softmax(jnp.array([0.0, 0.4, 0.2, -0.6]))
    p = jax.nn.softmax(logits)

    def expected(name: str, logits: jax.Array) -> jax.Array:
        return jnp.sum(p * KL_ESTIMATORS[name](jax.nn.log_softmax(logits) - reference))

    def divergence(logits: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softmax(logits) * (jax.nn.log_softmax(logits) - reference))

    def run(logits: jax.Array) -> tuple:
        gradients = [jax.grad(expected, 1)(name, logits) for name in ("k2", "k3+")]
        return gradients, [expected(name, logits) for name in ("k3", "k3+")], jax.value_and_grad(divergence)(logits)

    gradients, values, (value, gradient) = run_jitted(run, logits)
    np.testing.assert_allclose(gradients, [gradient] * 2, atol=1e-6)
    np.testing.assert_allclose(values, [value] * 2, rtol=1e-5)


def test_the_first_update_has_the_gradient_of_reinforce():
    def gradient(loss: str) -> jax.Array:
        settings = PolicyConfig(loss=loss, reduce="answers", advantage="group_mean")
        tokens = tokens_of(settings, old=None, reference=None)
        return jax.grad(lambda policy: mean_loss(tokens._replace(policy=policy), settings))(tokens.policy)

    for loss in LOSSES:
        np.testing.assert_allclose(gradient(loss), gradient("reinforce"), atol=1e-7)


@pytest.mark.longer
@pytest.mark.parametrize("loss", ["dr_grpo", "gspo", "cispo"])
def test_packing_and_padding_change_nothing(loss):
    """Answers with 0 shares do not count, however they are laid out in rows."""
    settings = PolicyConfig(loss=loss, kl=0.1, sampler_correction={"method": "mask_answers"})
    alone = tokens_of(settings)
    wide = tokens_of(settings, width=5)
    packed = Tokens(*(None if x is None else x[:4].reshape(2, 10) for x in wide))
    packed = packed._replace(answers=jnp.repeat(jnp.array([[0, 1], [0, 1]]), 5, axis=1))
    filled = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x)]), packed)
    for other in (wide, packed, filled):
        np.testing.assert_allclose(mean_loss(other, settings), mean_loss(alone, settings), rtol=1e-5)


def test_a_group_of_one_answer_has_no_others():
    with pytest.raises(ValueError, match="samples is 1, but advantage group_std compares"):
        PolicyConfig(loss="grpo", samples=1)
    alone = PolicyConfig(loss="reinforce++", samples=1)
    assert alone.baseline == "batch_std" and alone.counts(np.ones((3, 1))).all()


def test_groups_of_equal_rewards_do_not_count():
    rewards = np.array([[1.0, 1.0], [0.0, 1.0]])
    assert PolicyConfig(loss="grpo").counts(rewards).tolist() == [False, True]
    assert PolicyConfig(loss="grpo", drop_equal_groups=False).counts(rewards).all()


def test_distillation_follows_the_divergence_from_the_teacher():
    """The expected gradient is that of KL(model || teacher); overlong answers count, and one sample is enough."""
    settings = PolicyConfig(loss="distill", samples=1)
    assert settings.computes_reference and not settings.masks_overlong
    assert settings.counts(np.zeros((3, 1), np.float32)).all()
    logits = jnp.array([0.3, -0.2, 0.9, 0.0])
    teacher = jax.nn.log_softmax(jnp.array([-0.4, 0.6, 0.1, 0.2]))

    def divergence(logits: jax.Array) -> jax.Array:
        student = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(student) * (student - teacher))

    def expected(logits: jax.Array) -> jax.Array:
        student = jax.nn.log_softmax(logits)[None]
        zeros = jnp.zeros_like(student)
        tokens = Tokens(student, student, zeros, zeros + 1, reference=teacher[None]).with_teacher()
        value = settings.method.objective(tokens, settings).value
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(student)) * value)

    found, wanted = run_jitted(lambda x: (jax.grad(expected)(x), jax.grad(divergence)(x)), logits)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_logits_of_answers_alone_give_the_same_losses_and_gradients():
    config = load_config(None, ["model.preset=tiny", "model.vocab_size=40"]).model
    model = Transformer(config, nnx.Rngs(0), dtype=jnp.float32)
    hidden = jax.random.normal(jax.random.key(0), (4, 9, config.hidden_size))
    labels = np.full((4, 9), IGNORE)
    for row, places in enumerate([slice(0, 3), slice(4, 6), slice(6, 9)]):
        labels[row, places] = row + 1
    weights = jax.random.normal(jax.random.key(1), labels.shape)

    def total(hidden: jax.Array, most: int | None) -> jax.Array:
        return jnp.sum(weights * token_losses(model, hidden, jnp.asarray(labels), most))

    for most in (3, 5):
        np.testing.assert_allclose(
            token_losses(model, hidden, jnp.asarray(labels), most), token_losses(model, hidden, jnp.asarray(labels)),
            rtol=1e-5,
        )  # fmt: skip
        gradients = [jax.jit(jax.grad(total), static_argnums=1)(hidden, width) for width in (most, None)]
        np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)
