"""`rotate_into_cache`: rotary positions of new tokens' queries and keys, and the write to the KV cache, in one call."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend, select
from pallas_kernels.kv_cache_update import triton, xla
from pallas_kernels.kv_cache_update.request import make_request

BACKENDS = (
    Backend(
        "triton",
        "is one kernel, which writes to the cache in place; XLA launches three",
        triton.unsupported_reason,
        triton.update,
        opaque=True,
    ),
    Backend("xla", "a rotation and a scatter, on every device", xla.unsupported_reason, xla.update),
)


def rotate_into_cache(
    joined: Float[Array, "B T heads H"],
    cos: Float[Array, "#B T half"],
    sin: Float[Array, "#B T half"],
    keys: Float[Array, "B s1 s2 H"],
    values: Float[Array, "B s1 s2 H"],
    slots: Int[Array, "B T"],
    *,
    num_heads: int,
    slot_axis: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B s1 s2 H"], Float[Array, "B s1 s2 H"]]:
    """Rotate the queries and keys of new tokens by their positions, and write keys and values to the KV cache.

    A decoding step computes this for a few tokens, so that launching a kernel takes longer than the kernel itself. That
    is why it is one kernel, which reads the output of the joined projection as it is.

    Args:
        joined: heads of queries, keys and values, N + 2 K of them in this order.
        cos, sin: float32 cosines and sines [B, T, H / 2], or [1, T, H / 2] for all rows, by which the pairs (x[i],
            x[i + H / 2]) of a head are rotated.
        keys, values: the cache, [B, K, S, H] or [B, S, K, H]; float8_e4m3fn saturates at 448. It is updated in place if
            the caller does not use it afterwards; inside `jax.jit` that needs the cache to be donated.
        slots: each token's slot from 0 on; a token whose slot is S or more is not written.
        num_heads: N.
        slot_axis: the dim of the S slots in the cache, 2 or 1.
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call.

    Returns:
        The rotated queries [B, T, N, H] in the dtype of `joined`, and the cache's keys and values with the new tokens.
        Rotations are computed in float32.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    request = make_request(joined, cos, sin, keys, values, slots, num_heads=num_heads, slot_axis=slot_axis)
    return select("rotate_into_cache", BACKENDS, implementation, request).call(request)
