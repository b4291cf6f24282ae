"""The tiled product of the collective kernels: one chunk of rows for each device of the axis."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import scheduler
from pallas_kernels.hopper.matmul import ProductTiling, TiledProduct
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu


@dataclass(frozen=True)
class CollectiveTiling(ProductTiling):
    """Block sizes of a collective product.

    Attributes:
        sum_in_kernel: True if the reduce-scatter kernel adds the partial sums that arrive, False if XLA adds them after
            it.
    """

    sum_in_kernel: bool = True


@dataclass(frozen=True)
class CollectiveProduct(TiledProduct):
    """A product whose left operand or result is spread over the devices of an axis, one chunk of rows each.

    Attributes:
        axis_name: Name of the axis; unused on one device.
    """

    tiling: CollectiveTiling = CollectiveTiling()
    axis_name: str | None = None

    @property
    def devices(self) -> int:
        """Number of devices of the axis."""
        return self.chunks

    def device(self) -> jax.Array:
        """Return this device's index along the axis."""
        return lax.axis_index(self.axis_name) if self.devices > 1 else jnp.int32(0)

    def peer(self, place: Index) -> dict[str | None, Index]:
        """Return the Pallas device id of the device at index `place` along the axis."""
        return {self.axis_name: place}

    def claim_scratch(self) -> scheduler.ClaimedTiles | None:
        """Return the scratch types for claiming tiles at run time; None on one device (static assignment)."""
        return scheduler.claim_scratch(self.tiling.stages) if self.devices > 1 else None

    def claim_counters(self) -> tuple[Ref, Ref] | tuple[None, None]:
        """Return this device's semaphores that count claimed tiles and sent blocks; None on one device."""
        if self.devices == 1:
            return None, None
        counters = pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))
        return counters.at[0], counters.at[1]
