"""Preference training: a model learns to prefer the chosen answer of each pair to the rejected one.

A loss is one row of `LOSSES`: a function of the log-probabilities of a pair's two answers, under the trained model and
mostly also under a frozen reference model. All of it is computed in float32.

Dimensions: P pairs of answers; column 0 of [P, 2] is the chosen answer and column 1 the rejected one.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from pydantic import Field, model_validator

from jaxstack.config.base import Component, NameIn
from jaxstack.config.features import MODEL_DIRECTORY, Excludes, Feature, Remark
from jaxstack.loss import IGNORE, Batch, LossSum, add_layer_losses, token_losses
from jaxstack.models import Transformer
from jaxstack.models.adapters import without_adapters
from jaxstack.models.layer_sums import LayerSums
from jaxstack.parallel.shard_map_layers import context_axis, sum_over_sequence
from jaxstack.parallel.sharding_context import sum_over_batch


class Pairs(NamedTuple):
    """Log-probabilities of the answers of P pairs, summed over their tokens, and the numbers of these tokens."""

    policy: Float[Array, "P 2"]
    """Sums under the trained model; of a reward model its rewards."""
    reference: Float[Array, "P 2"]
    """Sums under the reference model; zeros if the loss needs none."""
    lengths: Float[Array, "P 2"]
    """Numbers of tokens, at least 1."""
    margins: Float[Array, " P"] | float = 0.0
    """Difference of quality between the two answers, as the data give it."""
    drift: Float[Array, ""] | float = 0.0
    """Estimate, at least 0, of the divergence of the trained model from the reference; without a gradient."""

    @property
    def means(self) -> Float[Array, "P 2"]:
        """Mean log-probability of a token under the trained model."""
        return self.policy / self.lengths


class Judged(NamedTuple):
    """Loss of each of P pairs, or of each of their answers, and the rewards that it implies for the answers."""

    loss: Float[Array, "P ..."]
    rewards: Float[Array, "P 2"]

    @property
    def margins(self) -> Float[Array, " P"]:
        """Reward of the chosen answer minus that of the rejected one."""
        return _difference(self.rewards)


def _difference(x: Float[Array, "P 2"]) -> Float[Array, " P"]:
    return x[:, 0] - x[:, 1]


def _dpo(pairs: Pairs, settings: "PreferenceConfig") -> Judged:
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290), conservative with label smoothing."""
    rewards = settings.strength * (pairs.policy - pairs.reference)
    margins = _difference(rewards)
    wrong = settings.label_smoothing
    loss = -(1 - wrong) * jax.nn.log_sigmoid(margins) - wrong * jax.nn.log_sigmoid(-margins)
    return Judged(loss, rewards)


def _robust(pairs: Pairs, settings: "PreferenceConfig") -> Judged:
    """DPO's loss, unbiased where labels are wrong at a known rate (Chowdhury et al. 2024, arXiv:2403.00409)."""
    rewards = settings.strength * (pairs.policy - pairs.reference)
    margins = _difference(rewards)
    wrong = settings.label_smoothing
    loss = -(1 - wrong) * jax.nn.log_sigmoid(margins) + wrong * jax.nn.log_sigmoid(-margins)
    return Judged(loss / (1 - 2 * wrong), rewards)


def _ipo(pairs: Pairs, settings: "PreferenceConfig") -> Judged:
    """Identity preference optimization (Azar et al. 2023, arXiv:2310.12036), on means over tokens as in TRL."""
    gains = (pairs.policy - pairs.reference) / pairs.lengths
    loss = jnp.square(_difference(gains) - 1 / (2 * settings.strength))
    return Judged(loss, settings.strength * gains)


def _hinge(pairs: Pairs, settings: "PreferenceConfig") -> Judged:
    """Hinge loss on DPO's rewards (SLiC, Zhao et al. 2023, arXiv:2305.10425)."""
    rewards = settings.strength * (pairs.policy - pairs.reference)
    return Judged(jax.nn.relu(1 - _difference(rewards)), rewards)


def _simpo(pairs: Pairs, settings: "PreferenceConfig") -> Judged:
    """SimPO (Meng et al. 2024, arXiv:2405.14734): means over tokens in place of a reference, and a target margin."""
    rewards = settings.strength * pairs.means
    return Judged(-jax.nn.log_sigmoid(_difference(rewards) - settings.simpo_gamma), rewards)


def _orpo(pairs: Pairs, settings: "PreferenceConfig") -> Judged:
    """ORPO (Hong et al. 2024, arXiv:2403.07691): likelihood of the chosen answer, and odds of chosen to rejected."""
    odds = -jax.nn.log_sigmoid(_difference(_log_odds(pairs.means)))
    return Judged(settings.strength * odds - pairs.means[:, 0], settings.strength * pairs.means)


def _kto(pairs: Pairs, settings: "PreferenceConfig") -> Judged:
    """KTO (Ethayarajh et al. 2024, arXiv:2402.01306): each answer is good or bad by itself, compared with the drift."""
    gains = pairs.policy - pairs.reference
    above = settings.strength * (gains - pairs.drift)
    good = settings.desirable_weight * jax.nn.sigmoid(-above[:, 0])
    bad = settings.undesirable_weight * jax.nn.sigmoid(above[:, 1])
    return Judged(jnp.stack([good, bad], axis=1), settings.strength * gains)


def _reward_model(pairs: Pairs, settings: "PreferenceConfig") -> Judged:
    """Likelihood of the preferences under Bradley and Terry's model, with margins (Touvron et al. 2023, 2307.09288).

    Rewards are defined up to a constant, which `center_rewards` holds near 0 (Eisenstein et al. 2023, 2312.09244).
    """
    loss = -jax.nn.log_sigmoid(_difference(pairs.policy) - pairs.margins)
    return Judged(loss + settings.center_rewards * jnp.square(jnp.sum(pairs.policy, axis=-1)), pairs.policy)


def _log_odds(log_probability: jax.Array) -> jax.Array:
    """Return log(p / (1 - p)), finite and with finite gradients also where p rounds to 1."""
    a = jnp.minimum(log_probability, -1e-6)
    return a - jnp.where(a > -math.log(2), jnp.log(-jnp.expm1(a)), jnp.log1p(-jnp.exp(a)))


@dataclasses.dataclass(frozen=True)
class PreferenceLoss:
    """A row of `LOSSES`: how the loss of a pair is computed, and what it needs.

    Attributes:
      function: takes the pairs and the settings.
      needs_reference: it compares the trained model with a frozen reference.
      beta: default of `preference.beta`.
      smooths: it uses `preference.label_smoothing`.
      mismatched: it estimates the drift from the reference on prompts with the answers of other pairs, a third row.
      has_head: rewards come from a head of the model, which becomes a reward model, in place of log-probabilities.
    """

    function: Callable[[Pairs, "PreferenceConfig"], Judged]
    needs_reference: bool = True
    beta: float = 0.1
    smooths: bool = False
    mismatched: bool = False
    has_head: bool = False

    @property
    def rows(self) -> int:
        """Sequences of a pair in a batch."""
        return 3 if self.mismatched else 2


LOSSES: Mapping[str, PreferenceLoss] = {
    "dpo": PreferenceLoss(_dpo, smooths=True),
    "ipo": PreferenceLoss(_ipo),
    "robust": PreferenceLoss(_robust, smooths=True),
    "hinge": PreferenceLoss(_hinge),
    "simpo": PreferenceLoss(_simpo, needs_reference=False, beta=2.0),
    "orpo": PreferenceLoss(_orpo, needs_reference=False),
    "kto": PreferenceLoss(_kto, mismatched=True),
    "reward_model": PreferenceLoss(_reward_model, needs_reference=False, has_head=True),
}
"""Name -> loss."""


class PreferenceConfig(Component):
    """Configuration of training on preferences: the loss of a pair of answers, and the reference model."""

    loss: Annotated[str, NameIn(LOSSES)] | None = None
    """Loss of a pair of answers: dpo, ipo, robust, hinge, simpo, orpo, kto; or reward_model, which trains a head that
    gives rewards. null: the data are not preferences."""
    beta: float | None = Field(default=None, gt=0)
    """Scale of the rewards, for orpo weight of the odds; null: 0.1, for simpo 2.0."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of the pairs whose preference is taken to be wrong, for dpo and robust."""
    simpo_gamma: float = Field(default=1.0, ge=0)
    """Margin by which simpo wants the rewards to differ."""
    center_rewards: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of a pair's rewards in the loss of reward_model, which holds their mean near 0."""
    reference: str = "init_from"
    """Frozen model of dpo, ipo, robust, hinge and kto: init_from, the model of `run.init_from` (with adapters, the
    model without them); or the directory of a run or Hugging Face checkpoint with the same tokenizer."""
    cache_reference: bool = False
    """Compute the reference's log-probabilities of all pairs once before the training, in place of each step, and keep
    them in `data.cache_dir`."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of good answers in the loss of kto."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of bad answers in the loss of kto."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the chosen answer's cross-entropy, a mean over its tokens, which is added to the loss."""

    @model_validator(mode="after")
    def _keys_suit_the_loss(self) -> "PreferenceConfig":
        without_head = [name for name, row in LOSSES.items() if not row.has_head]
        others = {
            "beta": without_head,
            "sft_weight": without_head,
            "label_smoothing": [name for name, row in LOSSES.items() if row.smooths],
            "simpo_gamma": ["simpo"],
            "desirable_weight": [name for name, row in LOSSES.items() if row.mismatched],
            "undesirable_weight": [name for name, row in LOSSES.items() if row.mismatched],
            "center_rewards": [name for name, row in LOSSES.items() if row.has_head],
            "reference": [name for name, row in LOSSES.items() if row.needs_reference],
            "cache_reference": [name for name, row in LOSSES.items() if row.needs_reference],
        }
        for key, names in others.items():
            value = getattr(self, key)
            if self.loss is not None and self.loss not in names and value != type(self).model_fields[key].default:
                raise ValueError(f"{key} ({value}) is for loss {', '.join(names)}, not {self.loss}; remove it.")
        return self

    @property
    def method(self) -> PreferenceLoss:
        """Row of the loss in `LOSSES`."""
        return LOSSES[self.loss or "dpo"]

    @property
    def computes_reference(self) -> bool:
        """True if each step computes the reference: the loss needs one, and its values are not cached."""
        return self.loss is not None and self.method.needs_reference and not self.cache_reference

    @property
    def strength(self) -> float:
        """Value of `beta`, or else the default of the loss."""
        return self.method.beta if self.beta is None else self.beta


def sum_over_pairs(
    pairs: Pairs, counted: Bool[Array, "P ..."], settings: PreferenceConfig
) -> tuple[LossSum, dict[str, LossSum]]:
    """Return the loss summed over the pairs that count, and the sums of further values for the metrics.

    Args:
      pairs: log-probabilities of the answers.
      counted: False for pairs that only fill a batch; or [P, 2], False for answers that are missing.
      settings: which loss, and its scales.

    Returns:
      The loss; and `accuracy` (share of pairs with a positive margin), `margin`, `chosen_reward`, `rejected_reward`,
      `chosen_probability` (geometric mean over the tokens of the chosen answer; not of reward models), `drift` of kto.
    """
    judged = settings.method.function(pairs, settings)
    answers = jnp.broadcast_to(counted.reshape(len(counted), -1), pairs.policy.shape)
    both = answers.all(axis=1)
    has_chosen = answers[:, 0]
    present = {"chosen_reward": has_chosen, "rejected_reward": answers[:, 1], "chosen_probability": has_chosen}
    loss = judged.loss
    values = {
        "accuracy": judged.margins > 0,
        "margin": judged.margins,
        "chosen_reward": judged.rewards[:, 0],
        "rejected_reward": judged.rewards[:, 1],
    }
    if not settings.method.has_head:
        likelihood = settings.sft_weight * pairs.means[:, 0]
        # The mean over answers of twice the term of a chosen one is the mean over pairs of the term.
        loss = loss - likelihood if loss.ndim == 1 else loss.at[:, 0].add(-2 * likelihood)
        values["chosen_probability"] = jnp.exp(pairs.means[:, 0])
    if settings.method.mismatched:
        values["drift"] = jnp.broadcast_to(jnp.asarray(pairs.drift), both.shape)
        present["drift"] = answers.any(axis=1)

    def total(x: jax.Array, among: jax.Array) -> LossSum:
        total = jnp.sum(jnp.where(among, x, 0), dtype=jnp.float32)
        return LossSum(total, jnp.sum(among, dtype=jnp.float32))

    found = {name: total(x, present.get(name, both)) for name, x in values.items()}
    return total(loss, both if loss.ndim == 1 else answers), found


def preference_loss(
    model: Transformer, batch: Batch, *, train: bool = False, settings: PreferenceConfig | None = None
) -> tuple[LossSum, dict[str, LossSum]]:
    """Return the loss summed over pairs of answers, and further values for the metrics, see `sum_over_pairs`.

    Args:
      model: the trained model. If the loss needs a reference, that is its companion `reference`, or without one the
        model without its adapters.
      batch: `tokens`, `labels` int32 [P, 2, T] of the chosen and the rejected answer of each pair. Tokens with the
        label -100 do not count, nor do pairs of which an answer has no label; for kto each answer counts by itself, and
        only the metrics of pairs leave such a pair out. Optionally `margin` [P] float32. With
        `cache_reference` the answers' log-probabilities under the reference are `reference` [P, 2] float32. A
        reward model reads the reward at the token after the last one with a label, the answer's stop token. For kto
        rows are [P, 3, T], see `jaxstack.data.token_rows.PairRows`.
      train: True adds the layers' own losses, such as those of routers.
      settings: the loss; default: `PreferenceConfig()`, which is DPO.
    """
    settings = settings or PreferenceConfig()
    labels = batch["labels"]
    policy, sums = (_rewards if settings.method.has_head else _answer_sums)(model, batch, with_losses=train)
    reference = jnp.zeros_like(policy)
    drift: jax.Array | float = 0.0
    if settings.cache_reference:
        reference = batch["reference"]
    elif settings.method.needs_reference:
        with jax.named_scope("reference"):
            reference, _ = _answer_sums(model.reference or without_adapters(model), batch)
    reference = jax.lax.stop_gradient(reference)
    lengths = sum_over_sequence(jnp.sum(labels[:, :2] != IGNORE, axis=-1, dtype=jnp.float32))
    counted = (lengths > 0).all(axis=-1)
    if settings.method.mismatched:
        counted = lengths > 0
        drift = _drift(policy[:, 2] - reference[:, 2], counted.any(axis=-1))
    pairs = Pairs(policy[:, :2], reference[:, :2], jnp.maximum(lengths, 1), batch.get("margin", 0.0), drift)
    loss, values = jax.tree.map(lambda x: x * _share(), sum_over_pairs(pairs, counted, settings))
    if train:
        loss = add_layer_losses(loss, sums, loss.count / batch["tokens"].size)
    return loss, values


def reference_sums(model: Transformer, batch: Batch, *, pairs: int) -> tuple[LossSum, dict[str, LossSum]]:
    """Return log-probabilities of answers as the further value `sums` of a loss, [pairs, rows] on every device.

    Args:
      model: the reference.
      batch: `tokens`, `labels` int32 [P, rows, T], and `index` int32 [P], the place of each pair in the global batch.
      pairs: number of pairs of the global batch.
    """
    sums, _ = _answer_sums(model, batch)
    placed = jnp.zeros((pairs, sums.shape[1])).at[batch["index"]].add(sums * _share())
    return LossSum(jnp.zeros(()), jnp.zeros(())), {"sums": LossSum(placed, jnp.zeros(()))}


def _answer_sums(model: Transformer, batch: Batch, with_losses: bool = False) -> tuple[jax.Array, LayerSums]:
    """Return the answers' log-probabilities, summed over their tokens, [P, rows] float32, and the layers' sums."""
    tokens, labels, positions = _sequences(batch)
    hidden, sums = model.hidden_and_sums(tokens, positions=positions, with_losses=with_losses)
    with jax.named_scope("loss"):
        losses = token_losses(model, hidden, labels)
    return -sum_over_sequence(jnp.sum(losses, axis=-1)).reshape(batch["labels"].shape[:2]), sums


def _share() -> jax.Array:
    """Return the share of a pair that a device counts: devices with parts of one sequence all have its whole sums."""
    return 1 / sum_over_sequence(jnp.ones(()))


def _drift(gains: jax.Array, counted: jax.Array) -> jax.Array:
    """Return the mean gain of mismatched answers, at least 0, over all devices that share a microbatch; no gradient."""
    gains = jax.lax.stop_gradient(gains)
    sums = jnp.stack([jnp.sum(jnp.where(counted, gains, 0)), jnp.sum(counted, dtype=jnp.float32)])
    total, count = sum_over_batch(sums)
    return jnp.maximum(total / jnp.maximum(count, 1), 0)


def _rewards(model: Transformer, batch: Batch, with_losses: bool = False) -> tuple[jax.Array, LayerSums]:
    """Return the rewards of the answers of each pair, [P, 2] float32, and the layers' sums."""
    tokens, labels, positions = _sequences(batch)
    places = jnp.arange(tokens.shape[-1]) if positions is None else positions
    after_labels = 1 + jnp.max(jnp.where(labels != IGNORE, places, -1), axis=-1)
    length = tokens.shape[-1]
    if (axis := context_axis()) is not None:
        after_labels = jax.lax.pmax(after_labels, axis)
        length = length * jax.lax.axis_size(axis)
    last = jnp.minimum(after_labels, length - 1)
    rewards, sums = model.rewards(tokens, last, positions=positions, with_losses=with_losses)
    return rewards.reshape(-1, 2), sums


def _sequences(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return tokens, labels and positions of all answers, int32 [P rows, T]; positions are None if they count up."""
    length = batch["tokens"].shape[-1]
    positions = batch["positions"].reshape(-1, length) if "positions" in batch else None
    return batch["tokens"].reshape(-1, length), batch["labels"].reshape(-1, length), positions


_EXCLUDED = (
    ("dropout", "rewards are differences to a model without dropout", "model.dropout"),
    ("batch ramp", "it counts the tokens of single sequences", "train.batch_ramp"),
    ("distillation", "both are losses of the whole run", "distill.teacher"),
    ("Sophia", "labels cannot be sampled for a pair of answers", "optimizer.name={optimizer.name}"),
)
_FP8 = tuple(f"FP8 ({name})" for name in ("current", "delayed", "blockwise"))
FEATURES = (
    Feature(
        "preferences",
        "preference",
        lambda preference: preference.loss is not None,
        excludes=tuple(
            Excludes(other, reason, f"preference.loss does not support {key}: {reason}; remove one of them.")
            for other, reason, key in _EXCLUDED
        ),
    ),
    Feature(
        "preferences without reference",
        "preference",
        lambda preference: preference.loss is not None and not preference.computes_reference,
        ("preference.loss=simpo",),
        also=("preferences",),
    ),
    Feature(
        "preferences with reference",
        "preference",
        lambda preference: preference.computes_reference,
        ("preference.loss=dpo", f"preference.reference={MODEL_DIRECTORY}"),
        excludes=(
            Excludes(
                "pipeline",
                "a step would need a second pass through the stages, for the reference",
                "preference.loss={preference.loss} computes its reference in each step, which parallel.pipeline="
                "{parallel.pipeline} does not support; set preference.cache_reference=true, or parallel.pipeline=1.",
            ),
        ),
        remarks=tuple(
            Remark(
                name,
                "a separate reference model computes without FP8, so that rewards do not begin at 0",
                slower=False,
            )
            for name in _FP8
        ),
        also=("preferences",),
    ),
)
"""Features of preference training, see `jaxstack.config.features`."""
