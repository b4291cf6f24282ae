"""Losses as sums with weights, so that any split of a batch over devices and microbatches gives one mean."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.models.dropout import TOKEN_KEYS
from jaxstack.models.transformer import Transformer
from jaxstack.parallel import with_local_batch
from pallas_kernels import linear_cross_entropy_sum

IGNORE = -100
"""Label of a position that does not count."""


class LossSum(NamedTuple):
    """A loss as the sum over `weight` items (tokens, examples); the mean is total / weight over the global batch."""

    total: jax.Array
    """[] float32."""
    weight: jax.Array
    """[] float32."""


def language_model_loss(
    model: Transformer, batch: Mapping[str, jax.Array], key: jax.Array | None = None, *, z_loss: float = 0.0
) -> LossSum:
    """Next-token cross-entropy in nats, summed over the tokens whose label is not -100.

    Args:
      batch: `tokens`, `labels` int32 [B, T]; optionally `segment_ids`, `positions` int32 [B, T].
      key: draws dropout masks, unless the batch has `dropout_keys` [B, T], which a train step adds so that masks do
        not depend on the layout; None for evaluation, which leaves out the losses of the routers.
      z_loss: weight of log(Z)^2, which keeps the softmax normaliser near 1 (Chowdhery et al. 2022).
    """
    hidden, router_loss = model.hidden_and_router_loss(
        batch["tokens"],
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
        dropout_key=None if key is None else batch.get(TOKEN_KEYS, key),
    )

    def loss_of_rows(weight: jax.Array, hidden: jax.Array, labels: jax.Array) -> jax.Array:
        cap = model.config.final_logit_softcapping
        total = linear_cross_entropy_sum(hidden, weight, labels, ignore_index=IGNORE, z_loss=z_loss, soft_cap=cap)
        return total[None, None]

    with jax.named_scope("loss"):
        stored, labels = model.stored_output_weight(), batch["labels"]
        losses = with_local_batch(loss_of_rows, stored, model.dtype, hidden, labels, as_stored=True)
    total = jnp.sum(losses)
    if router_loss is not None and key is not None:
        total += router_loss
    return LossSum(total, jnp.sum(labels != IGNORE, dtype=jnp.float32))


def as_loss_sum(value: Any) -> LossSum:
    """A user's loss as a `LossSum`: a scalar is the mean of a batch, which counts as one item.

    Raises:
      TypeError: it is neither a scalar array nor a LossSum.
    """
    if isinstance(value, LossSum):
        return LossSum(jnp.asarray(value.total, jnp.float32), jnp.asarray(value.weight, jnp.float32))
    shape = getattr(value, "shape", () if isinstance(value, int | float) else None)
    if shape != ():
        raise TypeError(
            "a loss function must return a scalar (the mean over its batch) or jaxstack.loss.LossSum(total, weight); "
            f"it returned {type(value).__name__}{f' of shape {shape}' if shape is not None else ''}."
        )
    return LossSum(jnp.asarray(value, jnp.float32), jnp.ones((), jnp.float32))
