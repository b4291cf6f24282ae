"""`grouped_matmul`: multiply rows in groups, each group with its own matrix, as in a mixture of experts."""

from jaxtyping import Array, Float, Int

from pallas_kernels.array_types import AnyArray
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.grouped_gemm import mosaic, reference, xla
from pallas_kernels.grouped_gemm.request import GroupedMatmulRequest, make_request


def _by_name_only(request: GroupedMatmulRequest) -> str:
    del request
    return "runs only if asked for by name"


BACKENDS = (
    Backend(
        "mosaic",
        "our Hopper kernels, one launch for all groups",
        mosaic.unsupported_reason,
        mosaic.multiply,
        opaque=True,
    ),
    Backend("xla", "a loop over tiles of rows, on every device", xla.unsupported_reason, xla.multiply),
    Backend(
        "reference",
        "the definition that backends are tested against, G times the work",
        reference.unsupported_reason,
        reference.multiply,
        _by_name_only,
    ),
)


def grouped_matmul(
    x: Float[AnyArray, "R D"],
    weights: Float[AnyArray, "G D F"],
    group_sizes: Int[AnyArray, " G"],
    *,
    alignment: int = 1,
    implementation: str | None = None,
) -> Float[Array, "R F"]:
    """Multiply each row with its group's matrix, x[r] @ weights[g], differentiably, with float32 accumulation.

    The groups are contiguous in x, in the order of the matrices. Their sizes are data: any sizes, including 0, whose
    sum fits into the rows of x.

    Args:
        x: rows [R, D].
        weights: one matrix per group, [G, D, F], in the dtype of x.
        group_sizes: number of rows of each group, integers [G].
        alignment: every group starts at a multiple of this row number, and the padding rows between the groups are 0.
            `grouped_matmul_alignment` returns the alignment that avoids a copy.
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call. A named backend
            never falls back.

    Returns:
        [R, F] in the dtype of x; rows outside of every group are 0.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    request = make_request(x, weights, group_sizes, alignment)
    return select("grouped_matmul", BACKENDS, implementation, request).call(request)


def grouped_matmul_alignment(rows: int, groups: int, *, implementation: str | None = None) -> int:
    """Return the alignment in rows at which groups should start, so that `grouped_matmul` need not copy them.

    Args:
        rows: total number of rows.
        groups: number of groups.
        implementation: name of a backend, or None for the automatic choice.
    """
    if implementation == "mosaic" or (implementation is None and mosaic.unsupported_target() is None):
        return mosaic.TILE_ROWS
    return xla.preferred_tile(rows, groups)
