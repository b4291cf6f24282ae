"""Choice of how the gradients of a global batch are computed."""

import jax

from jaxstack.gradients.gspmd import GlobalGradients
from jaxstack.gradients.microbatches import Gradients, GradientSums, Microbatches
from jaxstack.gradients.pipeline import PipelinedGradients
from jaxstack.gradients.shard_map import LocalGradients
from jaxstack.loss import Batch, Loss, LossFunction, LossSum, MeanLoss, as_loss
from jaxstack.module_arrays.module import Dict, ModuleArrays
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
    whole = GlobalGradients(microbatches, context)
    if module.gathers_weights and context.rules.batch_axes:
        parts = Microbatches(module, loss, accumulation, parts=True)
        return LocalOrGlobal(LocalGradients(parts, context), whole)
    return whole


class LocalOrGlobal:
    """Gradients of each device's part of a batch if the loss is a sum, and of the whole batch if it is a mean.

    Which of the two it is shows when the loss function is traced.
    """

    def __init__(self, parts: LocalGradients, whole: GlobalGradients):
        self._parts = parts
        self._whole = whole

    def __call__(
        self, params: Dict, non_params: Dict, batch: Batch, key: jax.Array, *, noise: bool = False
    ) -> tuple[GradientSums, Dict]:
        try:
            return self._parts(params, non_params, batch, key, noise=noise)
        except MeanLoss:
            return self._whole(params, non_params, batch, key, noise=noise)

    def loss(self, params: Dict, non_params: Dict, batch: Batch) -> LossSum:
        try:
            return self._parts.loss(params, non_params, batch)
        except MeanLoss:
            return self._whole.loss(params, non_params, batch)
