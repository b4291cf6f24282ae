"""Gathers rows of a table in host memory on the CPU, in a `jax.pure_callback` of the device's program."""

import jax
import numpy as np

from pallas_kernels.host_table.request import HostGatherRequest


def unsupported_reason(request: HostGatherRequest) -> str | None:
    """Return why this backend cannot compute a gather: always None, as it can compute all."""
    del request
    return None


def gather(request: HostGatherRequest) -> jax.Array:
    """Gather rows of the table on the CPU and copy them to the device, [N, D]."""
    table = request.table.array

    def rows(ids: jax.Array) -> np.ndarray:
        return np.take(table, np.asarray(ids), axis=0, mode="clip")

    shape = jax.ShapeDtypeStruct((request.ids.shape[0], table.shape[1]), table.dtype)
    return jax.pure_callback(rows, shape, request.ids, vmap_method="sequential")
