"""Grouped matmul by definition, for tests of every backend: each row times every matrix in float32, then masked."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.grouped_gemm.groups import group_bounds
from pallas_kernels.grouped_gemm.request import GroupedMatmulRequest
from pallas_kernels.weight_only.packed import is_packed


def unsupported_reason(request: GroupedMatmulRequest) -> str | None:
    """Return None, as the reference computes every grouped matmul, with G times the work."""
    del request
    return None


def multiply(request: GroupedMatmulRequest) -> Float[Array, "R F"]:
    """Multiply the rows of each group with its matrix, by the definition: [R, F] in the dtype of x."""
    x = request.x
    weights = request.weights.dense() if is_packed(request.weights) else request.weights
    starts, _ = group_bounds(request.group_sizes, request.alignment)
    row = jnp.arange(x.shape[0])[:, None]
    in_group = (row >= starts) & (row < starts + request.group_sizes)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    products = jnp.einsum("rd,gdf->rgf", x.astype(dtype), weights.astype(dtype), precision="highest")
    return jnp.where(in_group[..., None], products, 0).sum(axis=1).astype(x.dtype)
