"""Backend of XLA: `jax.lax.psum`, then the residual addition and the norm, on every device and for every shape."""

from dataclasses import dataclass

import jax
from jax import lax

from pallas_kernels.all_reduce.request import AllReduceRequest
from pallas_kernels.normalization.api import rms_norm


@dataclass(frozen=True)
class PlainReducer:
    """All-reduces by XLA.

    Attributes:
        request: The checked arguments.
    """

    request: AllReduceRequest

    def add_up(self, x: jax.Array) -> jax.Array:
        """Return the sum of x over the devices of the axis."""
        return lax.psum(x, self.request.axis_name)

    def add_up_and_normalize(self, x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (RMS norm of residual + sum, residual + sum)."""
        assert self.request.norm is not None
        norm = self.request.norm
        total = residual + self.add_up(x)
        normalized = rms_norm(total, weight, epsilon=norm.epsilon, weight_offset=norm.offset)
        assert isinstance(normalized, jax.Array)
        return normalized, total


def unsupported_reason(request: AllReduceRequest) -> str | None:
    """Return None, as this backend computes every all-reduce."""
    del request
    return None
