"""Distillation: a student learns from the text and from a teacher's predictions (Hinton et al. 2015, arXiv:1503.02531).

The loss is (1 - alpha) CE + alpha T^2 KL(teacher || student), with both softmaxes at temperature T in the divergence.
The teacher is a part of the student's module, as `teacher`, so that it is sharded and gathered like any weight; its
parameters are frozen, and no checkpoint holds them.

`divergence_sum` computes the divergence without storing the logits of either model. The vocabulary is cut into chunks:
the forward pass keeps running sums of the softmaxes and of the divergence, and the backward pass computes each chunk's
logits again. Only one chunk of logits exists at a time.
"""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from pydantic import Field

from jaxstack.config.base import Component
from jaxstack.config.features import MODEL_DIRECTORY, Excludes, Feature
from jaxstack.errors import ConfigError
from jaxstack.loss import (
    IGNORE,
    Batch,
    LossSum,
    add_layer_losses,
    add_mtp_loss,
    language_model_loss,
    sampled_label_loss,
    samples_labels,
    vocabulary_loss,
)
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.dropout import TOKEN_KEYS

Model = TypeVar("Model", bound=Transformer)
CHUNK_VALUES = 2**26
"""Number of logits of a chunk: 256 MiB in float32 for the student, and as much for the teacher."""


class DistillConfig(Component):
    """Configuration of distillation: the teacher model, its weight in the loss, and the temperature."""

    teacher: str | None = None
    """Run directory or Hugging Face checkpoint of a model with the same tokenizer; null: no teacher."""
    alpha: float = Field(default=0.5, gt=0, le=1)
    """Weight of the divergence from the teacher's predictions; the cross-entropy of the text has 1 - alpha."""
    temperature: float = Field(default=2.0, gt=0)
    """Both models' logits are divided by it in the divergence, which is multiplied by its square."""


def with_teacher(model: Model, teacher: Transformer) -> Model:
    """Attach the teacher of a distillation to a student model, in place; return the student.

    Raises:
      ConfigError: their vocabularies differ.
    """
    check_vocabulary(model.config, teacher.config, "the teacher")
    model.attach("teacher", teacher, "distillation")
    return model


def check_vocabulary(model: ModelConfig, other: ModelConfig, name: str, key: str = "distill.teacher") -> None:
    """Check that a model and one that it is compared with, such as its teacher, have vocabularies of equal size.

    Args:
      model: the model that is trained.
      other: the teacher or reference.
      name: what messages call it, such as its directory.
      key: the configuration key that names it.

    Raises:
      ConfigError: they have not.
    """
    if model.vocab_size != other.vocab_size:
        raise ConfigError(
            f"{key}: {name} has a vocabulary of {other.vocab_size} ids and the trained model one of "
            f"{model.vocab_size}, so that their predictions cannot be compared; give the trained model the other's "
            f"tokenizer (data.tokenizer) and model.vocab_size={other.vocab_size}."
        )


def empty_model(config: ModelConfig, dtype: jax.typing.DTypeLike) -> Transformer:
    """Return a Transformer whose parameters are zeros, to be filled from a checkpoint."""
    abstract = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dtype=dtype))
    graphdef, state = nnx.split(abstract)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state))


@samples_labels(sampled_label_loss)
def distillation_loss(
    model: Transformer,
    batch: Batch,
    *,
    key: jax.Array | None = None,
    train: bool = False,
    z_loss: float = 0.0,
    settings: DistillConfig | None = None,
    mtp_weight: float = 0.3,
) -> LossSum:
    """Return a student's distillation loss, or in evaluation its cross-entropy, summed over labels other than -100.

    Args:
      model: the student, from `with_teacher`.
      batch, key, train, z_loss, mtp_weight: as in `language_model_loss`.
      settings: alpha and temperature; default: `DistillConfig()`.

    Raises:
      ValueError: the model has no teacher.
    """
    if not train:
        return language_model_loss(model, batch)
    settings = settings or DistillConfig()
    teacher = model.teacher
    if teacher is None:
        raise ValueError("the model has no teacher to learn from; give it one by with_teacher.")
    inputs: dict[str, Any] = {name: batch.get(name) for name in ("positions", "segment_ids")}
    dropout_key = None if key is None else batch.get(TOKEN_KEYS, key)
    hidden, sums = model.hidden_and_sums(
        batch["tokens"], dropout_key=dropout_key, experts=batch.get("experts"), with_losses=True, **inputs
    )
    with jax.named_scope("teacher"):
        target = jax.lax.stop_gradient(teacher.hidden(batch["tokens"], **inputs))
    counts = batch["labels"] != IGNORE
    with jax.named_scope("loss"):
        total = settings.alpha * settings.temperature**2 * _divergence(model, hidden, teacher, target, counts, settings)
        if settings.alpha < 1:
            total += (1 - settings.alpha) * vocabulary_loss(model, hidden, batch["labels"], z_loss)
    loss = add_layer_losses(LossSum(total, jnp.sum(counts, dtype=jnp.float32)), sums)
    return add_mtp_loss(loss, model, hidden, batch, key=key, weight=mtp_weight)


def _divergence(
    model: Transformer,
    hidden: jax.Array,
    teacher: Transformer,
    target: jax.Array,
    counts: jax.Array,
    settings: DistillConfig,
) -> jax.Array:
    """Return the KL divergence of the student from its teacher, summed over the tokens that have a label."""
    caps = model.config.final_logit_softcapping, teacher.config.final_logit_softcapping
    return divergence_sum(
        hidden.reshape(-1, hidden.shape[-1]),
        model.output_weight(),
        target.reshape(-1, target.shape[-1]),
        jax.lax.stop_gradient(teacher.output_weight()),
        counts.reshape(-1).astype(jnp.float32),
        DivergenceOptions(settings.temperature, *caps),
    )


class DivergenceOptions(NamedTuple):
    """Static options of `divergence_sum`: temperature, soft caps of logits, and size of a vocabulary chunk."""

    temperature: float = 1.0
    """Both models' logits are divided by it."""
    student_cap: float | None = None
    """Soft cap of the student's logits."""
    teacher_cap: float | None = None
    """Soft cap of the teacher's logits."""
    chunk: int | None = None
    """Columns of the vocabulary in a chunk; None: as many as make `CHUNK_VALUES` logits."""


class _DivergenceSums(NamedTuple):
    """Running sums of softmaxes and divergence over chunks of the vocabulary, [N] float32 each."""

    student_max: jax.Array
    student_sum: jax.Array
    teacher_max: jax.Array
    teacher_sum: jax.Array
    difference: jax.Array
    """Sum of exp(t - teacher_max) (t - s)."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def divergence_sum(
    hidden: Float[Array, "N D"],
    weight: Float[Array, "D V"],
    teacher_hidden: Float[Array, "N E"],
    teacher_weight: Float[Array, "E V"],
    counts: Float[Array, " N"],
    options: DivergenceOptions,
) -> Float[Array, ""]:
    """Return the sum over tokens of counts * KL(teacher || student), in nats, float32.

    Only `hidden` and `weight` have gradients.

    Args:
      hidden, weight: input of the student's head, and the head.
      teacher_hidden, teacher_weight: the same of the teacher.
      counts: factor of each token, 0 for those that do not count.
      options: temperature, soft caps, chunk.
    """
    return _divergence_forward(hidden, weight, teacher_hidden, teacher_weight, counts, options)[0]


def _divergence_forward(
    hidden: jax.Array,
    weight: jax.Array,
    teacher_hidden: jax.Array,
    teacher_weight: jax.Array,
    counts: jax.Array,
    options: DivergenceOptions,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    columns, number = _chunks(hidden.shape[0], weight.shape[1], options)

    def add(sums: _DivergenceSums, index: jax.Array) -> tuple[_DivergenceSums, None]:
        new = _columns_of(index, columns, weight.shape[1])
        s, _ = _logits(hidden, weight, index, columns, options.temperature, options.student_cap)
        t, _ = _logits(teacher_hidden, teacher_weight, index, columns, options.temperature, options.teacher_cap)
        student_max = jnp.maximum(sums.student_max, jnp.max(jnp.where(new, s, -jnp.inf), axis=-1))
        teacher_max = jnp.maximum(sums.teacher_max, jnp.max(jnp.where(new, t, -jnp.inf), axis=-1))
        of_student = jnp.where(new, jnp.exp(s - student_max[:, None]), 0)
        of_teacher = jnp.where(new, jnp.exp(t - teacher_max[:, None]), 0)
        shrink = jnp.exp(sums.teacher_max - teacher_max)
        return _DivergenceSums(
            student_max,
            sums.student_sum * jnp.exp(sums.student_max - student_max) + jnp.sum(of_student, axis=-1),
            teacher_max,
            sums.teacher_sum * shrink + jnp.sum(of_teacher, axis=-1),
            sums.difference * shrink + jnp.sum(of_teacher * (t - s), axis=-1),
        ), None

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    least = jnp.full(hidden.shape[0], -jnp.inf, jnp.float32)
    sums, _ = jax.lax.scan(add, _DivergenceSums(least, zeros, least, zeros, zeros), jnp.arange(number))
    student_lse = sums.student_max + jnp.log(sums.student_sum)
    teacher_lse = sums.teacher_max + jnp.log(sums.teacher_sum)
    divergence = sums.difference / sums.teacher_sum - teacher_lse + student_lse
    saved = hidden, weight, teacher_hidden, teacher_weight, counts, student_lse, teacher_lse
    return jnp.sum(counts * divergence), saved


def _divergence_backward(
    options: DivergenceOptions, saved: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, ...]:
    hidden, weight, teacher_hidden, teacher_weight, counts, student_lse, teacher_lse = saved
    columns, number = _chunks(hidden.shape[0], weight.shape[1], options)
    factor = (gradient * counts / options.temperature)[:, None]

    def add(carry: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        d_hidden, d_weight = carry
        s, slope = _logits(hidden, weight, index, columns, options.temperature, options.student_cap)
        t, _ = _logits(teacher_hidden, teacher_weight, index, columns, options.temperature, options.teacher_cap)
        d_logits = factor * (jnp.exp(s - student_lse[:, None]) - jnp.exp(t - teacher_lse[:, None])) * slope
        d_logits = jnp.where(_columns_of(index, columns, weight.shape[1]), d_logits, 0).astype(hidden.dtype)
        first = _first_column(index, columns, weight.shape[1])
        part = jax.lax.dynamic_slice_in_dim(weight, first, columns, axis=1)
        d_hidden += jnp.matmul(d_logits, part.T, preferred_element_type=jnp.float32)
        d_part = jnp.matmul(hidden.T, d_logits, preferred_element_type=jnp.float32)
        d_part += jax.lax.dynamic_slice_in_dim(d_weight, first, columns, axis=1)  # columns of a clamped chunk
        return (d_hidden, jax.lax.dynamic_update_slice_in_dim(d_weight, d_part, first, axis=1)), None

    start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(weight.shape, jnp.float32)
    (d_hidden, d_weight), _ = jax.lax.scan(add, start, jnp.arange(number))
    zeros = [jnp.zeros_like(x) for x in (teacher_hidden, teacher_weight, counts)]
    return d_hidden.astype(hidden.dtype), d_weight.astype(weight.dtype), *zeros


divergence_sum.defvjp(_divergence_forward, _divergence_backward)


def _chunks(tokens: int, vocabulary: int, options: DivergenceOptions) -> tuple[int, int]:
    """Return how the vocabulary is cut into chunks: columns per chunk, and number of chunks."""
    most = options.chunk or max(128, CHUNK_VALUES // max(tokens, 1))
    number = -(-vocabulary // most)
    return -(-vocabulary // number), number


def _first_column(index: jax.Array, columns: int, vocabulary: int) -> jax.Array:
    """Return the first vocabulary column of a chunk; the last chunk starts early enough to end with the vocabulary."""
    return jnp.minimum(index * columns, vocabulary - columns)


def _columns_of(index: jax.Array, columns: int, vocabulary: int) -> jax.Array:
    """Return the mask of a vocabulary chunk's columns that no earlier chunk covers."""
    return _first_column(index, columns, vocabulary) + jnp.arange(columns) >= index * columns


def _logits(
    hidden: jax.Array, weight: jax.Array, index: jax.Array, columns: int, temperature: float, cap: float | None
) -> tuple[jax.Array, jax.Array | float]:
    """Return a vocabulary chunk's float32 logits divided by the temperature, and the derivative of their soft cap."""
    part = jax.lax.dynamic_slice_in_dim(weight, _first_column(index, columns, weight.shape[1]), columns, axis=1)
    logits = jnp.matmul(hidden, part, preferred_element_type=jnp.float32)
    if cap is None:
        return logits / temperature, 1.0
    squashed = jnp.tanh(logits / cap)
    return squashed * cap / temperature, 1 - jnp.square(squashed)


FEATURES = (
    Feature(
        "distillation",
        "distill",
        lambda distill: distill.teacher is not None,
        (f"distill.teacher={MODEL_DIRECTORY}",),
        excludes=(
            Excludes(
                "pipeline",
                "the teacher is a second model, which is not cut into stages",
                "distill.teacher does not support a pipeline, and parallel.pipeline is {parallel.pipeline}; set it to "
                "1, or remove distill.teacher.",
            ),
        ),
    ),
)
"""Features of distillation, see `jaxstack.config.features`."""
