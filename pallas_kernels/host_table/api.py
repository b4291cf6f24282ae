"""`host_gather`: gathers rows of a table in host memory onto the device."""

from jaxtyping import Array, Int, Shaped

from pallas_kernels.array_types import AnyArray
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.host_table import callback, triton
from pallas_kernels.host_table.request import make_request
from pallas_kernels.host_table.table import HostTable

BACKENDS = (
    Backend(
        "triton",
        "the GPU reads the rows over its bus",
        triton.unsupported_reason,
        triton.gather,
        opaque=True,
    ),
    Backend(
        "callback",
        "the CPU gathers the rows, which are then copied, on every device",
        callback.unsupported_reason,
        callback.gather,
    ),
)


def host_gather(
    table: HostTable, ids: Int[AnyArray, "*N"], *, implementation: str | None = None
) -> Shaped[Array, "*N D"]:
    """Gather rows of a table in host memory, e.g. embeddings, onto the device; also works within `jax.jit`.

    A kernel on the GPU reads only the rows that it needs, straight from pinned memory, in place of a gather by the CPU
    and a copy (PyTorch-Direct, Min et al. 2021, arXiv:2103.03330).

    Args:
        table: the table [rows, D]. A traced function keeps it as a constant.
        ids: row numbers, clipped to those of the table.
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call.

    Returns:
        The rows, in the dtype of the table. There is no gradient with respect to the table.

    Raises:
        ValueError: the ids are no integers.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    request = make_request(table, ids)
    rows = select("host_gather", BACKENDS, implementation, request).call(request)
    return rows.reshape(*ids.shape, table.array.shape[1])
