"""Parallelism settings of a train step besides its sharding rules: ZeRO stage, communication overlap, pipeline."""

import dataclasses
from typing import Literal

from jaxstack.parallel.pipeline.plan import PipelinePlan


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """Parallelism settings of a train step besides its sharding rules: ZeRO stage, communication overlap, pipeline.

    The defaults suit every mesh.
    """

    zero: int = 0
    """ZeRO stage over the `data` axis. 1 shards float32 weights and optimizer state, 2 the gradients too."""
    reduce_dtype: str = "float32"
    """Dtype in which gradients are summed over devices."""
    context_method: Literal["ring", "all_gather", "all_to_all"] | None = None
    """Method by which attention exchanges keys and values over `context`; None: by the shape of each call."""
    overlap: Literal["auto", "always", "never"] = "auto"
    """When tensor-parallel matmuls communicate while they multiply, see `ParallelConfig.overlap`."""
    prefetch: bool = False
    """True gathers the next layer's weights while a scanned layer computes, see `ParallelConfig.prefetch`."""
    peer_copies: bool = False
    """True moves weights and gradients by peer-to-peer copies in place of collectives, see `parallel.collectives`."""
    pipeline: PipelinePlan | None = None
    """Schedule and microbatches of the `pipeline` axis; None: no pipeline, or 1F1B if the mesh has stages."""
