"""Chooses how the gradients of a global batch are computed."""

from jaxstack.functional.module import FunctionalModule
from jaxstack.gradients.gspmd import GlobalGradients
from jaxstack.gradients.microbatches import Gradients, LossFunction, Microbatches, takes_key
from jaxstack.gradients.shard_map import LocalGradients, as_given
from jaxstack.parallel.context import ShardingContext


def make_gradients(
    module: FunctionalModule, loss: LossFunction, context: ShardingContext, accumulation: int = 1
) -> "Gradients":
    """The way that suits the module and the layout.

    Args:
      loss: `loss(module, batch)` or `loss(module, batch, key)`; returns a scalar mean or a `LossSum`.
      accumulation: number of microbatches that a batch is cut into.
    """
    keyed = loss if takes_key(loss) else lambda model, batch, key: loss(model, batch)
    whole = GlobalGradients(Microbatches(module, keyed, accumulation), context)
    if not module.gathers_weights or not context.rules.batch_axes:
        return whole
    return LocalGradients(Microbatches(module, keyed, accumulation, as_sum=as_given), context, whole)
