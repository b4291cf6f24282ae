"""Choice of how the gradients of a global batch are computed."""

from jaxstack.gradients.gspmd import GlobalGradients
from jaxstack.gradients.microbatches import Gradients, Microbatches
from jaxstack.gradients.pipeline import PipelinedGradients
from jaxstack.gradients.shard_map import LocalGradients
from jaxstack.loss import Loss, LossFunction, as_loss
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.module_arrays.pipeline_order import StagedArrays
from jaxstack.parallel.sharding_context import ShardingContext


def make_gradients(
    module: ModuleArrays, loss: LossFunction | Loss, context: ShardingContext, accumulation: int = 1
) -> Gradients:
    """Return the object that computes gradients: through pipeline stages, in a `shard_map`, or partitioned by XLA.

    Args:
      module: a `StagedArrays` runs in the stages of a pipeline.
      loss: see `jaxstack.loss`. A mean is computed on the whole batch, as it does not add up over parts of one.
      context: the rules and the layout of the step.
      accumulation: number of microbatches that a batch is split into; a pipeline has its own.
    """
    loss = as_loss(loss)
    if isinstance(module, StagedArrays):
        return PipelinedGradients(module, loss, context)
    microbatches = Microbatches(module, loss, accumulation)
    if module.gathers_weights and context.rules.batch_axes and loss.returns_sum:
        return LocalGradients(microbatches, context)
    return GlobalGradients(microbatches, context)
