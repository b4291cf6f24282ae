"""Distillation: a student learns from the text and from a teacher's predictions (Hinton et al. 2015, arXiv:1503.02531).

The loss is (1 - alpha) CE + alpha T^2 KL(teacher || student), with both softmaxes at temperature T in the divergence.
The teacher is a part of the student's module, as `teacher`, so that it is sharded and gathered like any weight; its
parameters are frozen, and no checkpoint holds them.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field

from jaxstack.compressed_training.teacher_divergence import DivergenceOptions, divergence_sum
from jaxstack.config.base import Component
from jaxstack.config.features import MODEL_DIRECTORY, Excludes, Feature
from jaxstack.errors import ConfigError
from jaxstack.loss import (
    IGNORE,
    Batch,
    LossSum,
    language_model_loss,
    sampled_label_loss,
    samples_labels,
    vocabulary_loss,
)
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.dropout import TOKEN_KEYS

Model = TypeVar("Model", bound=Transformer)


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
    model.teacher = teacher
    model.companions = ("teacher",)
    return model


def check_vocabulary(model: ModelConfig, teacher: ModelConfig, name: str) -> None:
    """Check that a student and its teacher have vocabularies of equal size.

    Raises:
      ConfigError: they have not.
    """
    if model.vocab_size != teacher.vocab_size:
        raise ConfigError(
            f"distill.teacher: {name} has a vocabulary of {teacher.vocab_size} ids and the student one of "
            f"{model.vocab_size}, so that their predictions cannot be compared; give the student the teacher's "
            f"tokenizer (data.tokenizer) and model.vocab_size={teacher.vocab_size}."
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
) -> LossSum:
    """Return a student's distillation loss, or in evaluation its cross-entropy, summed over labels other than -100.

    Args:
      model: the student, from `with_teacher`.
      batch, key, train, z_loss: as of `language_model_loss`.
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
    inputs = {"positions": batch.get("positions"), "segment_ids": batch.get("segment_ids")}
    dropout_key = None if key is None else batch.get(TOKEN_KEYS, key)
    hidden, router_loss = model.hidden_and_router_loss(batch["tokens"], dropout_key=dropout_key, **inputs)
    with jax.named_scope("teacher"):
        target = jax.lax.stop_gradient(teacher.hidden(batch["tokens"], **inputs))
    counts = batch["labels"] != IGNORE
    with jax.named_scope("loss"):
        total = settings.alpha * settings.temperature**2 * _divergence(model, hidden, teacher, target, counts, settings)
        if settings.alpha < 1:
            total += (1 - settings.alpha) * vocabulary_loss(model, hidden, batch["labels"], z_loss)
    if router_loss is not None:
        total += router_loss
    return LossSum(total, jnp.sum(counts, dtype=jnp.float32))


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
