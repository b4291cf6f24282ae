"""Rows in groups, each times its group's matrix: the matmul of a mixture of experts."""

import jax

from pallas_kernels.dispatch import Backend, select
from pallas_kernels.grouped_gemm import mosaic, reference, xla
from pallas_kernels.grouped_gemm.request import GroupedMatmulRequest, make_request


def _by_name_only(request: GroupedMatmulRequest) -> str:
    del request
    return "runs only when asked for by name"


BACKENDS = (
    Backend(
        "mosaic",
        "Hopper's tensor cores, one launch for all groups",
        mosaic.unsupported_reason,
        mosaic.multiply,
        opaque=True,
    ),
    Backend("xla", "a loop over tiles of rows, anywhere", xla.unsupported_reason, xla.multiply),
    Backend(
        "reference", "the contract, G times the work", reference.unsupported_reason, reference.multiply, _by_name_only
    ),
)


def grouped_matmul(
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    alignment: int = 1,
    implementation: str | None = None,
) -> jax.Array:
    """Row r of group g gives x[r] @ weights[g], with float32 accumulation; differentiable in x and weights.

    The groups lie in x one after the other, in the order of the matrices. Their sizes are data: they may be of any
    kind, also 0, as long as they fit into the rows of x.

    Args:
        x: [R, D].
        weights: [G, D, F], of the dtype of x.
        group_sizes: integers [G], rows of each group.
        alignment: every group begins at a multiple of it, and the rows between the end of one and the begin of the next
            are 0. `grouped_matmul_alignment` tells which one needs no copy.
        implementation: a name of `BACKENDS`; None takes the first that fits. A named one never falls back.

    Returns:
        [R, F] in the dtype of x; rows that belong to no group are 0.

    Raises:
        ValueError: an argument breaks a rule; `NotSupported` (a ValueError) for an unknown implementation.
    """
    request = make_request(x, weights, group_sizes, alignment)
    return select("grouped_matmul", BACKENDS, implementation, request).call(request)


def grouped_matmul_alignment(rows: int, groups: int, *, implementation: str | None = None) -> int:
    """The alignment that `grouped_matmul` works with itself, here, for so many rows in so many groups."""
    if implementation == "mosaic" or (implementation is None and mosaic.unsupported_target() is None):
        return mosaic.TILE_ROWS
    return xla.preferred_tile(rows, groups)
