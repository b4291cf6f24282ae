"""Rotary position embedding (Su et al., arXiv:2104.09864) in the half-split convention of Llama."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def apply_rotary(
    x: Float[Array, "B T N H"], cos: Float[Array, "... T half"], sin: Float[Array, "... T half"]
) -> Float[Array, "B T N H"]:
    """Rotate each pair (x[i], x[i + R / 2]) of a head's first R elements by its angle; leave other elements unchanged.

    Args:
        x: [B, T, N, H].
        cos, sin: [T, R / 2] or [B, T, R / 2] with R <= H, cosine and sine of the angles position * frequency.

    Returns:
        [B, T, N, H] in the dtype of x, computed in float32.

    Raises:
        ValueError: the shapes do not fit.
    """
    if x.ndim != 4 or cos.shape != sin.shape or cos.ndim not in (2, 3):
        raise ValueError(
            f"x must be [B, T, N, H], cos and sin [T, R / 2] or [B, T, R / 2]; "
            f"got x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
        )
    half = cos.shape[-1]
    if 2 * half > x.shape[-1] or cos.shape[-2] != x.shape[1] or (cos.ndim == 3 and cos.shape[0] not in (1, len(x))):
        raise ValueError(
            f"cos and sin must have the length T of x and at most H / 2 angles; got x {list(x.shape)}, "
            f"cos {list(cos.shape)}"
        )
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = (angle.astype(dtype)[..., :, None, :] for angle in (cos, sin))
    first = x[..., :half].astype(dtype)
    second = x[..., half : 2 * half].astype(dtype)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    rotated = [part.astype(x.dtype) for part in rotated]
    return jnp.concatenate([*rotated, x[..., 2 * half :]], axis=-1)
