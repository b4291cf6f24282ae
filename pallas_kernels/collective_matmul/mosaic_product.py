"""Compile-time description of the matmuls in the collective Hopper kernels: one chunk of rows for each device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import scheduler
from pallas_kernels.hopper.matmul import ProductTiling, TiledProduct
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu


@dataclass(frozen=True)
class CollectiveTiling(ProductTiling):
    """Block sizes of a matmul with all-gather or reduce-scatter on Hopper.

    Attributes:
        sum_in_kernel: True if the reduce-scatter kernel adds the partial sums that arrive, False if XLA adds them after
            it.
    """

    sum_in_kernel: bool = True


@dataclass(frozen=True)
class CollectiveProduct(TiledProduct):
    """A matmul whose left operand or result is spread over the devices of an axis, one chunk of rows on each.

    Attributes:
        axis_name: Name of the axis; unused on one device.
    """

    tiling: CollectiveTiling = CollectiveTiling()
    axis_name: str | None = None

    @property
    def devices(self) -> int:
        """Number of devices along the mesh axis."""
        return self.chunks

    def device(self) -> jax.Array:
        """Return this device's index along the mesh axis."""
        return lax.axis_index(self.axis_name) if self.devices > 1 else jnp.int32(0)

    def peer(self, place: Index) -> dict[str | None, Index]:
        """Return the id by which Pallas addresses the device at index `place` along the mesh axis."""
        return {self.axis_name: place}

    def claim_scratch(self) -> scheduler.ClaimedTiles | None:
        """Return the shared-memory types for taking tiles from a counter at run time; None on one device.

        On one device tiles are dealt out beforehand.
        """
        return scheduler.claim_scratch(self.tiling.stages) if self.devices > 1 else None

    def claim_counters(self) -> tuple[Ref, Ref] | tuple[None, None]:
        """Return this device's global counters of claimed tiles and of sent blocks; (None, None) on one device."""
        if self.devices == 1:
            return None, None
        counters = pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))
        return counters.at[0], counters.at[1]
