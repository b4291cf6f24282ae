"""Checks the arguments of `host_gather`, and holds them for its backends."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import AnyArray
from pallas_kernels.host_table.table import HostTable
from pallas_kernels.target import Target, current_target


@dataclass(frozen=True)
class HostGatherRequest:
    """Checked arguments of a gather of rows from a table in host memory, as its backends receive them.

    Attributes:
        table: the table.
        ids: int32 [N].
        target: the device that the call is lowered for.
    """

    table: HostTable
    ids: jax.Array
    target: Target

    def __str__(self) -> str:
        return f"{self.ids.shape[0]} rows of {self.table} on {self.target}"


def make_request(table: HostTable, ids: AnyArray) -> HostGatherRequest:
    """Check the arguments of `host_gather`, and return them for its backends, with the ids flattened.

    Raises:
        ValueError: the ids are no integers.
    """
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"ids must be integers, got {ids.dtype}")
    return HostGatherRequest(table, ids.astype(jnp.int32).ravel(), current_target())
