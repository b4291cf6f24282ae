"""`grouped_matmul`: multiply rows in groups, each group with its own matrix, as in a mixture of experts."""

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.array_types import AnyArray
from pallas_kernels.batch_invariant import product
from pallas_kernels.batch_invariant.mode import is_batch_invariant
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.fp8.blockwise import BLOCK
from pallas_kernels.grouped_gemm import mosaic, reference, triton, xla
from pallas_kernels.grouped_gemm.fp8 import FP8_BACKENDS, Fp8GroupedRequest
from pallas_kernels.grouped_gemm.request import GroupedMatmulRequest, make_request
from pallas_kernels.weight_only.packed import PackedWeight, is_packed


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
    Backend(
        "triton",
        "reads packed matrices as stored",
        triton.unsupported_reason,
        triton.multiply,
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
    weights: Float[AnyArray, "G D F"] | PackedWeight,
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
        weights: one matrix per group, [G, D, F], in the dtype of x; or packed in few bits, with `stack` (G,).
        group_sizes: number of rows of each group, integers [G].
        alignment: every group starts at a multiple of this row number, and the padding rows between the groups are 0.
            `grouped_matmul_alignment` returns the alignment that avoids a copy.
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call. A named backend
            never falls back.

    Returns:
        [R, F] in the dtype of x; rows outside of every group are 0. In the context `batch_invariant` no row's result
        depends on another row.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """

    def multiply(x: AnyArray, weights: AnyArray | PackedWeight, group_sizes: AnyArray) -> jax.Array:
        request = make_request(x, weights, group_sizes, alignment)
        return select("grouped_matmul", BACKENDS, implementation, request).call(request)

    if is_batch_invariant() and not is_packed(weights):
        request = make_request(x, weights, group_sizes, alignment)
        return product.grouped_matmul(request, multiply)
    return multiply(x, weights, group_sizes)


def fp8_grouped_matmul(
    x: Float[AnyArray, "R D"],
    weights: Sequence[Float[AnyArray, "G D _"]],
    group_sizes: Int[AnyArray, " G"],
    *,
    alignment: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "R _"], ...]:
    """Multiply each row with its group's matrix of each weight in FP8 (E4M3), differentiably, quantizing x once.

    Rows have a scale per 128 values, matrices one per 128 x 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3); sums and
    their scaling are in float32. The gradients of x and of the weights are FP8 products too. D and F that are no
    multiples of 128 are padded with zeros.

    Args:
        x: rows [R, D], bfloat16 or float32; those in no group must be 0.
        weights: each one matrix per group, [G, D, F], in the dtype of x or in float32, in which they are quantized
            without a copy.
        group_sizes: number of rows of each group, integers [G].
        alignment: every group starts at a multiple of this row number; it must be 128.
        implementation: name of a backend in `FP8_BACKENDS`; None takes the first that supports the call.

    Returns:
        One result [R, F] per weight, in the dtype of x; rows outside of every group are 0.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    requests = [make_request(x, weight, group_sizes, alignment, quantized=True) for weight in weights]
    if alignment != BLOCK:
        raise ValueError(
            f"FP8 scales blocks of {BLOCK} rows, and no block may have rows of two groups: alignment must be {BLOCK}, "
            f"got {alignment}; take grouped_matmul_alignment(rows, groups, fp8=True)"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"the FP8 grouped matmul takes x in bfloat16 or float32, got {x.dtype}; cast it")
    x = jnp.pad(requests[0].x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    plain = [cast(jax.Array, r.weights) for r in requests]
    padded = tuple(jnp.pad(w, ((0, 0), *((0, -n % BLOCK) for n in w.shape[1:]))) for w in plain)
    request = Fp8GroupedRequest(x, padded, requests[0].group_sizes)
    found = select("fp8_grouped_matmul", FP8_BACKENDS, implementation, request).call(request)
    return tuple(y[:, : weight.shape[2]] for y, weight in zip(found, weights, strict=True))


def grouped_matmul_alignment(
    rows: int, groups: int, *, fp8: bool = False, packed: bool = False, implementation: str | None = None
) -> int:
    """Return the alignment in rows at which groups should start, so that `grouped_matmul` need not copy them.

    Args:
        rows: total number of rows.
        groups: number of groups.
        fp8: True if `fp8_grouped_matmul` multiplies the rows too.
        packed: True if the matrices are packed in few bits.
        implementation: name of a backend, or None for the automatic choice.
    """
    if is_batch_invariant():
        return product.GROUP_TILE
    if fp8:
        return BLOCK
    if packed:
        return triton.preferred_tile(rows, groups)
    if implementation == "mosaic" or (implementation is None and mosaic.unsupported_target() is None):
        return mosaic.TILE_ROWS
    return xla.preferred_tile(rows, groups)
