"""Policy gradients: losses of sampled answers by their rewards, as rows of one table (`LOSSES`).

Each loss is a sum over the tokens of the answers, sum(w f(l)) / N: l is the log-probability of a token under the
trained model, f the objective of a row, w the weight of a token, and N the number of tokens or answers of the whole
batch. So it does not depend on how a batch is split over microbatches and devices. It is computed in float32.

Dimensions: B rows, T tokens of a row, P prompts, G answers to each of them (a group).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field, model_validator

from jaxstack.config.base import Component, NameIn
from jaxstack.config.features import Excludes, Feature
from jaxstack.loss import IGNORE, Batch, LossSum, add_layer_losses, token_losses
from jaxstack.models import Transformer
from jaxstack.models.adapters import without_adapters
from jaxstack.models.layer_sums import LayerSums
from pallas_kernels.batch_invariant.mode import batch_invariant, is_batch_invariant

_STD_OFFSET = 1e-4
"""Added to the standard deviation that rewards are divided by, as in TRL."""
_LARGEST_LOG = 20.0
"""Limit of the logarithm of a ratio of probabilities, so that its exponential stays finite."""
_LARGEST_KL = 10.0
"""Limit of the divergence of a token."""


class Tokens(NamedTuple):
    """The tokens of sampled answers: their log-probabilities under several models, and their advantages. All [B, T]."""

    policy: Float[Array, "B T"]
    """Log-probabilities under the trained model."""
    sampler: Float[Array, "B T"]
    """Log-probabilities with which the tokens were sampled."""
    advantages: Float[Array, "B T"]
    shares: Float[Array, "B T"]
    """1 / the number of tokens of the answer; 0 for tokens that do not count."""
    old: Float[Array, "B T"] | None = None
    """Log-probabilities under the trained model before the first update with these answers; None: this is the first."""
    reference: Float[Array, "B T"] | None = None
    """Log-probabilities under the reference model; None: there is none."""
    answers: Int[Array, "B T"] | None = None
    """Number of the answer in its row, below T; None: a row has one answer."""

    @property
    def before(self) -> Float[Array, "B T"]:
        """Log-probabilities before the first update, without a gradient."""
        return jax.lax.stop_gradient(self.policy if self.old is None else self.old)

    @property
    def log_ratio(self) -> Float[Array, "B T"]:
        """Logarithm of the trained model's probability over that before the first update, 0 for other tokens."""
        return self.bounded(self.policy - self.before)

    def with_teacher(self) -> "Tokens":
        """Return the tokens with the advantages that distillation from the reference gives them.

        The advantage of a token is the logarithm of the reference's probability over the model's before the first
        update. Its mean over sampled answers is -KL(model || reference).
        """
        assert self.reference is not None
        return self._replace(advantages=jax.lax.stop_gradient(self.bounded(self.reference - self.before)))

    def bounded(self, x: Float[Array, "B T"]) -> Float[Array, "B T"]:
        """Return the logarithm of a ratio within the limits of `exp`, and 0 at tokens that do not count."""
        return jnp.where(self.shares > 0, jnp.clip(x, -_LARGEST_LOG, _LARGEST_LOG), 0.0)

    def sum_of_answer(self, x: Float[Array, "B T"]) -> Float[Array, "B T"]:
        """Return at each token the sum of `x` over the tokens of its answer."""
        if self.answers is None:
            return jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True), x.shape)

        def of_row(x: jax.Array, answers: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(x, answers, num_segments=x.shape[0])[answers]

        return jax.vmap(of_row)(x, self.answers)


class Objective(NamedTuple):
    """Objective of each token, to be minimized, and whether a limit of its ratio cuts it."""

    value: Float[Array, "B T"]
    clipped: Bool[Array, "B T"]


def _clip(ratio: Float[Array, "B T"], tokens: Tokens, settings: "PolicyConfig") -> Objective:
    low, high = settings.bounds
    free = ratio * tokens.advantages
    clipped = jnp.clip(ratio, 1 - low, 1 + high) * tokens.advantages
    gain = jnp.minimum(free, clipped)
    largest = settings.method.dual_clip
    if largest is not None:  # of Ye et al. 2020, arXiv:1912.09729
        gain = jnp.where(tokens.advantages < 0, jnp.maximum(gain, largest * tokens.advantages), gain)
    return Objective(-gain, clipped < free)


def _clipped_tokens(tokens: Tokens, settings: "PolicyConfig") -> Objective:
    """Clipped objective of PPO (Schulman et al. 2017, arXiv:1707.06347)."""
    return _clip(jnp.exp(tokens.log_ratio), tokens, settings)


def _clipped_answers(tokens: Tokens, settings: "PolicyConfig") -> Objective:
    """Objective of GSPO (Zheng et al. 2025, arXiv:2507.18071): clips the geometric mean of an answer's ratios."""
    return _clip(jnp.exp(tokens.sum_of_answer(tokens.shares * tokens.log_ratio)), tokens, settings)


def _capped_weights(tokens: Tokens, settings: "PolicyConfig") -> Objective:
    """Objective of CISPO (MiniMax 2025, arXiv:2506.13585): limits the ratio, not which tokens count."""
    low, high = settings.bounds
    ratio = jax.lax.stop_gradient(jnp.exp(tokens.log_ratio))
    weight = jnp.clip(ratio, 1 - low, 1 + high)
    return Objective(-weight * tokens.advantages * tokens.policy, weight != ratio)


def _log_probability(tokens: Tokens, settings: "PolicyConfig") -> Objective:
    """Objective of REINFORCE (Williams 1992)."""
    del settings
    return Objective(-tokens.advantages * tokens.policy, jnp.zeros(tokens.policy.shape, bool))


def _weighted_tokens(tokens: Tokens, settings: "PolicyConfig") -> Objective:
    """Objective of REINFORCE for tokens of an older model: the ratio weighs the gradient, without a limit."""
    del settings
    ratio = jnp.exp(tokens.log_ratio)
    return Objective(-ratio * tokens.advantages, jnp.zeros(tokens.policy.shape, bool))


def _group_std(rewards: np.ndarray) -> np.ndarray:
    return _group_mean(rewards) / (rewards.std(1, ddof=1, keepdims=True) + _STD_OFFSET)


def _group_mean(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.mean(1, keepdims=True)


def _leave_one_out(rewards: np.ndarray) -> np.ndarray:
    count = rewards.shape[1]
    return _group_mean(rewards) * count / (count - 1)


def _batch_std(rewards: np.ndarray) -> np.ndarray:
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + _STD_OFFSET)


def _from_teacher(rewards: np.ndarray) -> np.ndarray:
    """Return zeros: the advantage of each token follows from the reference, see `Tokens.with_teacher`."""
    return np.zeros_like(rewards)


TEACHER = "teacher"
ADVANTAGES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "group_std": _group_std,
    "group_mean": _group_mean,
    "leave_one_out": _leave_one_out,
    "batch_std": _batch_std,
    TEACHER: _from_teacher,
}
"""Name -> advantages [P, G] from rewards [P, G]: how much better an answer is than others."""


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """A row of `LOSSES`: the objective of a token, and what the method does unless the configuration says otherwise.

    Attributes:
      objective: takes the tokens and the settings.
      advantage: default of `policy.advantage`.
      reduce: default of `policy.reduce`.
      clip: default of `policy.clip`; None: it has no limits.
      dual_clip: limit of a loss, as a multiple of a negative advantage; None: there is none.
    """

    objective: Callable[[Tokens, "PolicyConfig"], Objective]
    advantage: str = "group_std"
    reduce: str = "tokens"
    clip: tuple[float, float] | None = (0.2, 0.2)
    dual_clip: float | None = None


LOSSES: Mapping[str, PolicyLoss] = {
    # Shao et al. 2024, arXiv:2402.03300
    "grpo": PolicyLoss(_clipped_tokens, reduce="answers"),
    # Liu et al. 2025, arXiv:2503.20783
    "dr_grpo": PolicyLoss(_clipped_tokens, advantage="group_mean", reduce="constant"),
    # Yu et al. 2025, arXiv:2503.14476
    "dapo": PolicyLoss(_clipped_tokens, clip=(0.2, 0.28)),
    "gspo": PolicyLoss(_clipped_answers, reduce="answers", clip=(3e-4, 4e-4)),
    # Limit of Khatri et al. 2025, arXiv:2510.13786, from above only
    "cispo": PolicyLoss(_capped_weights, clip=(1.0, 4.0)),
    # Ahmadian et al. 2024, arXiv:2402.14740
    "rloo": PolicyLoss(_clipped_tokens, advantage="leave_one_out"),
    # Hu et al. 2025, arXiv:2501.03262
    "reinforce++": PolicyLoss(_clipped_tokens, advantage="batch_std"),
    "reinforce": PolicyLoss(_log_probability, advantage="group_mean", clip=None),
    "ppo": PolicyLoss(_clipped_tokens, advantage="batch_std", dual_clip=3.0),
    # On-policy distillation, Agarwal et al. 2023, arXiv:2306.13649
    "distill": PolicyLoss(_weighted_tokens, advantage=TEACHER, clip=None),
}
"""Name -> loss."""


def _importance(tokens: Tokens) -> Float[Array, "B T"]:
    return jnp.exp(tokens.bounded(tokens.before - tokens.sampler))


def _importance_of_answer(tokens: Tokens) -> Float[Array, "B T"]:
    return jnp.exp(tokens.bounded(tokens.sum_of_answer(tokens.bounded(tokens.before - tokens.sampler))))


def _truncate(weight: jax.Array, smallest: float, largest: float) -> jax.Array:
    return jnp.clip(weight, smallest, largest)


def _mask(weight: jax.Array, smallest: float, largest: float) -> jax.Array:
    return jnp.where((weight >= smallest) & (weight <= largest), weight, 0.0)


class _Correction(NamedTuple):
    """A row of `CORRECTIONS`: a weight, what happens beyond its limits, and their defaults."""

    weight: Callable[[Tokens], jax.Array]
    limit: Callable[[jax.Array, float, float], jax.Array]
    smallest: float
    largest: float


CORRECTIONS: Mapping[str, _Correction | None] = {
    "none": None,
    # Truncated importance sampling, Yao et al. 2025, fengyao.notion.site/off-policy-rl
    "truncate": _Correction(_importance, _truncate, 0.0, 2.0),
    # IcePop of Ling 2.0, arXiv:2510.18855
    "mask": _Correction(_importance, _mask, 0.5, 5.0),
    "truncate_answers": _Correction(_importance_of_answer, _truncate, 0.0, 2.0),
    "mask_answers": _Correction(_importance_of_answer, _mask, 0.0, 2.0),
}
"""Name -> weight of a token: its probability under the trained model over that with which it was sampled."""


class SamplerCorrection(Component):
    """Configuration of the weights of tokens that were sampled with other probabilities than the trained model has."""

    method: Annotated[str, NameIn(CORRECTIONS)] = "none"
    """none; truncate: the ratio of a token's probabilities, brought into the limits; mask: the same, 0 outside of the
    limits; truncate_answers and mask_answers: the same with the product over an answer. With `rollout.stale_steps`
    or `carried_prompts` the default is truncate."""
    smallest: float | None = Field(default=None, ge=0)
    """Smallest weight; null: 0, for mask 0.5."""
    largest: float | None = Field(default=None, gt=0)
    """Largest weight; null: 2, for mask 5."""

    def weights(self, tokens: Tokens) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]] | None:
        """Return the weight of each token, without a gradient, and whether a limit changes it; None: no correction."""
        row = CORRECTIONS[self.method]
        if row is None:
            return None
        smallest = row.smallest if self.smallest is None else self.smallest
        largest = row.largest if self.largest is None else self.largest
        ratio = jax.lax.stop_gradient(row.weight(tokens))
        weights = row.limit(ratio, smallest, largest)
        return weights, weights != ratio


def _k2(log_ratio: jax.Array) -> jax.Array:
    return jnp.square(log_ratio) / 2


def _k3(log_ratio: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.exp(-log_ratio) - 1 + log_ratio, _LARGEST_KL)


def _k3_with_gradient_of_k2(log_ratio: jax.Array) -> jax.Array:
    value = jax.lax.stop_gradient(_k3(log_ratio) - _k2(log_ratio))
    return value + _k2(log_ratio)


KL_ESTIMATORS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "k2": _k2,
    "k3": _k3,
    "k3+": _k3_with_gradient_of_k2,
}
"""Name -> divergence from log(p / reference) at sampled tokens (Schulman 2020, joschu.net/blog/kl-approx). The expected
gradient of k2 is that of KL(p || reference), that of k3 is that of KL(reference || p); k1, the logarithm, has none."""


class PolicyConfig(Component):
    """Configuration of reinforcement learning: the loss of sampled answers, their advantages, the reference model."""

    loss: Annotated[str, NameIn(LOSSES)] | None = None
    """Loss of the answers: grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce, reinforce++ or ppo (without a critic);
    distill: on-policy distillation, the reference model is a teacher who judges each token. null: no reinforcement
    learning."""
    samples: int = Field(default=8, ge=1)
    """Number of answers that are sampled for each prompt, a group."""
    clip: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0)]] | None = None
    """Limits of the ratio of probabilities, 1 - the first and 1 + the second number; null: those of the loss."""
    advantage: Annotated[str, NameIn(ADVANTAGES)] | None = None
    """Advantage of an answer: group_mean, its reward minus the mean of its group; group_std, this divided by the
    standard deviation in the group; leave_one_out, the reward minus the mean of the others; batch_std, as group_std
    with all answers of a step as the group; teacher, of each token, the logarithm of the reference's probability over
    the model's; null: that of the loss."""
    reduce: Literal["tokens", "answers", "constant"] | None = None
    """Mean over tokens; over answers, of the means over their tokens; constant: sum over tokens, divided by the number
    of answers and by `rollout.max_tokens`; null: that of the loss."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the reference model, which is added to the loss; 0: there is no such model."""
    kl_estimator: Annotated[str, NameIn(KL_ESTIMATORS)] = "k3+"
    """Estimator of the divergence: k2; k3; k3+, which has the value of k3 and the gradient of k2, the right one."""
    reference: str = "init_from"
    """Reference model: init_from, the model of `run.init_from` (with adapters, the model without them); or the
    directory of a run or Hugging Face checkpoint with the same tokenizer."""
    updates: int = Field(default=1, ge=1)
    """Number of train steps with the answers of one rollout."""
    drop_equal_groups: bool = True
    """Leave groups whose rewards are all equal, which have no gradient, out of the mean; only with
    advantages that compare within groups."""
    overlong: Literal["mask", "keep"] | None = None
    """Answers that reach `rollout.max_tokens`: mask leaves them out of the loss, keep trains on them. null: keep with
    the advantage teacher, which judges each token for itself, else mask."""
    router_replay: bool = False
    """Send each token to the experts that the sampler sent it to, so that routers do not choose others in training than
    while sampling (Ma et al. 2025, arXiv:2510.11370). Only for mixtures of experts."""
    sampler_correction: SamplerCorrection = SamplerCorrection()
    """Weights for the difference between the sampler and the trained model."""

    @model_validator(mode="after")
    def _groups_have_others(self) -> "PolicyConfig":
        if self.samples == 1 and self.loss is not None and self.compares_within_groups:
            raise ValueError(
                f"samples is 1, but advantage {self.baseline} compares the answers to a prompt with each other; set "
                "samples to 2 or more, or advantage to batch_std."
            )
        if self.clip is not None and self.loss is not None and self.method.clip is None:
            raise ValueError(f"clip ({self.clip}) is not for loss {self.loss}, which has no limits; remove it.")
        return self

    @property
    def method(self) -> PolicyLoss:
        """Row of the loss in `LOSSES`."""
        return LOSSES[self.loss or "grpo"]

    @property
    def baseline(self) -> str:
        """Value of `advantage`, or else that of the loss."""
        return self.advantage or self.method.advantage

    @property
    def compares_within_groups(self) -> bool:
        """True if an advantage compares an answer with the others to its prompt."""
        return self.baseline not in ("batch_std", TEACHER)

    @property
    def drops_groups(self) -> bool:
        """True if groups of equal rewards do not count."""
        return self.drop_equal_groups and self.compares_within_groups

    @property
    def computes_reference(self) -> bool:
        """True if the loss needs the reference model."""
        return self.loss is not None and (self.kl > 0 or self.baseline == TEACHER)

    @property
    def masks_overlong(self) -> bool:
        """True if answers that reach the limit of tokens are left out of the loss."""
        return (self.overlong or ("keep" if self.baseline == TEACHER else "mask")) == "mask"

    @property
    def bounds(self) -> tuple[float, float]:
        """Value of `clip`, or else that of the loss."""
        return self.clip or self.method.clip or (0.0, 0.0)

    def counts(self, rewards: Float[np.ndarray, "P G"]) -> Bool[np.ndarray, " P"]:
        """Return which groups count: not those of equal rewards, if advantages compare within groups."""
        return (np.ptp(rewards, axis=1) > 0) | (not self.drops_groups)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the float32 arrays [B, T] of a batch."""
        return ("sampler_logprobs", "advantages", "shares", *(("old_logprobs",) if self.updates > 1 else ()))

    def advantages(self, rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
        """Return the advantages of the answers to each prompt."""
        return ADVANTAGES[self.baseline](rewards)


def sum_over_tokens(
    tokens: Tokens, settings: PolicyConfig, length: int, sampled: Bool[Array, "B T"] | None = None
) -> tuple[LossSum, dict[str, LossSum]]:
    """Return the loss summed over the tokens that count, and the sums of further values for the metrics.

    Args:
      tokens: the sampled tokens.
      settings: which loss, and its settings.
      length: number of tokens that `reduce: constant` divides by.
      sampled: True at all sampled tokens, also those that do not count for the loss; None: those that count.

    Returns:
      The loss; and `clip_share`, the share of tokens whose ratio is limited; `kl`, the divergence from the reference,
      or without one from the model before the first update; `entropy`, the mean -log-probability of sampled tokens,
      which estimates it; `sampler_logprob_difference`, the mean absolute difference of sampler and trained model;
      `sampler_kl`, the divergence KL(sampler || trained model); with a correction `importance`, the mean weight, and
      `importance_limited`, the share of tokens whose weight is limited.
    """
    if settings.baseline == TEACHER:
        tokens = tokens.with_teacher()
    counted = tokens.shares > 0
    sampled = counted if sampled is None else sampled
    objective = settings.method.objective(tokens, settings)
    value = objective.value
    correction = settings.sampler_correction.weights(tokens)
    if correction is not None:
        value = value * correction[0]
    compared = tokens.before if tokens.reference is None else tokens.reference
    log_ratio = tokens.bounded(tokens.policy - jax.lax.stop_gradient(compared))
    if tokens.reference is not None and settings.kl:
        divergence = KL_ESTIMATORS[settings.kl_estimator](log_ratio)
        if settings.kl_estimator != "k3":  # tokens of an older model: the expectation needs the ratio
            divergence = jax.lax.stop_gradient(jnp.exp(tokens.log_ratio)) * divergence
        value = value + settings.kl * divergence
    number = jnp.sum(counted, dtype=jnp.float32)
    answers = jnp.sum(tokens.shares, dtype=jnp.float32)
    reduce = settings.reduce or settings.method.reduce
    weights = tokens.shares if reduce == "answers" else counted.astype(jnp.float32)
    count = {"tokens": number, "answers": answers, "constant": length * answers}[reduce]
    total = jnp.sum(jnp.where(counted, weights * value, 0.0), dtype=jnp.float32)

    def mean(x: jax.Array, among: jax.Array) -> LossSum:
        return LossSum(jnp.sum(jnp.where(among, x, 0), dtype=jnp.float32), jnp.sum(among, dtype=jnp.float32))

    found = {
        "clip_share": mean(objective.clipped, counted),
        "kl": mean(_k3(log_ratio), counted),
        "entropy": mean(-tokens.policy, sampled),
        "sampler_logprob_difference": mean(jnp.abs(tokens.before - tokens.sampler), sampled),
        "sampler_kl": mean(_k3(tokens.bounded(tokens.sampler - tokens.before)), counted),
    }
    if correction is not None:
        found |= {"importance": mean(correction[0], counted), "importance_limited": mean(correction[1], counted)}
    return LossSum(total, count), found


def policy_loss(
    model: Transformer,
    batch: Batch,
    *,
    train: bool = False,
    settings: PolicyConfig,
    temperature: float = 1.0,
    length: int | None = None,
    exact: bool = False,
) -> tuple[LossSum, dict[str, LossSum]]:
    """Return the loss of a batch of sampled answers, summed over their tokens, and further values for the metrics.

    Args:
      model: the trained model. With `settings.computes_reference` the reference is its companion `reference`, or
        without one the model without its adapters.
      batch: `tokens`, `labels` int32 [B, T], where labels are -100 except at the tokens before sampled ones; float32
        [B, T] of each sampled token `advantages`, `shares` and `sampler_logprobs`, see `Tokens`, and `old_logprobs` if
        this may not be the first update with the answers; with `settings.router_replay` also `experts`, int [B, T,
        layers, k]. Packed rows, of several answers, also have `segment_ids` and `positions`.
      train: True adds the layers' own losses, such as those of routers.
      settings: the loss.
      temperature: divisor of the logits with which the answers were sampled.
      length: largest number of tokens of an answer, those between its turns included, see `sum_over_tokens`; None: T.
      exact: compute log-probabilities with the bits of an exact sampler, see `jaxstack.reinforce.exact`.
    """
    length = length or batch["labels"].shape[1]
    policy, sums = token_log_probabilities(model, batch, temperature, length, with_losses=train, exact=exact)
    reference = None
    if settings.computes_reference:
        with jax.named_scope("reference"):
            own = {name: x for name, x in batch.items() if name != "experts"}  # its routers choose for themselves
            other = model.reference or without_adapters(model)
            reference, _ = token_log_probabilities(other, own, temperature, length, exact=exact)
    tokens = Tokens(
        policy,
        batch["sampler_logprobs"],
        batch["advantages"],
        batch["shares"],
        batch.get("old_logprobs"),
        None if reference is None else jax.lax.stop_gradient(reference),
        batch.get("segment_ids"),
    )
    loss, further = sum_over_tokens(tokens, settings, length, batch["labels"] != IGNORE)
    if train:
        loss = add_layer_losses(loss, sums, loss.count / batch["tokens"].size)
    return loss, further


def token_log_probabilities(
    model: Transformer,
    batch: Batch,
    temperature: float = 1.0,
    length: int | None = None,
    *,
    with_losses: bool = False,
    exact: bool = False,
) -> tuple[Float[Array, "B T"], LayerSums]:
    """Return the log-probability of each label, 0 where it is -100, and the layers' sums.

    Args:
      model: the model.
      batch: `tokens`, `labels` int32 [B, T]; of packed rows `segment_ids` and `positions`; `experts` if they are given.
      temperature: divisor of the logits.
      length: the labels of a row that is not packed, other than -100, are among this number of consecutive ones, so
        that the other tokens, those of the prompt, need no logits; None: they may be anywhere.
      with_losses: see `Transformer.hidden_and_sums`.
      exact: compute them with the bits of an exact sampler, see `jaxstack.reinforce.exact`.
    """
    segments = batch.get("segment_ids")
    with batch_invariant(exact or is_batch_invariant()):
        hidden, sums = model.hidden_and_sums(
            batch["tokens"],
            positions=batch.get("positions"),
            segment_ids=segments,
            experts=batch.get("experts"),
            with_losses=with_losses,
        )
        with jax.named_scope("loss"):
            most = length if segments is None else None
            return -token_losses(model, hidden, batch["labels"], most, temperature), sums


_EXCLUDED = (
    ("pipeline", "answers are sampled by whole models", "parallel.pipeline"),
    ("context parallelism", "answers are sampled by whole models", "parallel.context"),
    ("expert parallelism", "answers are sampled with all experts on each device", "parallel.expert"),
    ("separate runs", "answers are sampled by one copy of the model", "local_sgd"),
    ("workers", "answers are sampled by one copy of the model", "parallel.workers"),
    ("dropout", "the sampler has none", "model.dropout"),
    ("batch ramp", "all answers of a rollout are one batch", "train.batch_ramp"),
    ("compressed weights", "answers are sampled with plain weights", "compression.rules"),
    ("distillation", "both are losses of the whole run", "distill.teacher"),
    ("preferences", "both are losses of the whole run", "preference.loss"),
    ("FP8 (current)", "answers are sampled without FP8", "precision.fp8"),
    ("FP8 (delayed)", "answers are sampled without FP8", "precision.fp8"),
    ("FP8 (blockwise)", "answers are sampled without FP8", "precision.fp8"),
    ("Sophia", "labels cannot be sampled for the answers", "optimizer.name={optimizer.name}"),
)
FEATURES = (
    Feature(
        "reinforcement",
        "policy",
        lambda policy: policy.loss is not None,
        ("policy.loss=grpo", "rollout.prompts=2"),
        excludes=tuple(
            Excludes(other, reason, f"policy.loss does not support {key}: {reason}; remove one of them.")
            for other, reason, key in _EXCLUDED
        ),
    ),
)
"""Features of reinforcement learning, see `jaxstack.config.features`."""
