"""FAVOR+: positive random features whose products estimate the softmax kernel (Choromanski et al., arXiv:2009.14794).

exp(q . k) is the mean over w ~ N(0, 1) of exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from pallas_kernels.linear_time_attention.features import Features


def random_projection(
    features: int, head_dim: int, *, seed: int = 0, orthogonal: bool = True
) -> Float32[np.ndarray, "{features} {head_dim}"]:
    """Draw random directions for FAVOR+ features, normally distributed, float32 [features, head_dim].

    Args:
        features: number of directions.
        head_dim: their dimension.
        seed: seed of the draw.
        orthogonal: True to make each run of `head_dim` directions orthogonal, which lowers the variance of the
            estimate; every single direction has the same distribution as without.

    Raises:
        ValueError: `features` or `head_dim` is less than 1.
    """
    if features < 1 or head_dim < 1:
        raise ValueError(f"features and head_dim must be at least 1; got {features} and {head_dim}")
    generator = np.random.default_rng(seed)
    directions = generator.normal(size=(features, head_dim))
    if orthogonal:
        lengths = np.linalg.norm(directions, axis=1, keepdims=True)
        squares = generator.normal(size=(-(-features // head_dim), head_dim, head_dim))
        bases, triangles = np.linalg.qr(squares)
        # Without the signs of the triangles' diagonals the bases would not be uniformly distributed.
        bases = bases * np.sign(np.diagonal(triangles, axis1=1, axis2=2))[:, None, :]
        directions = lengths * bases.swapaxes(1, 2).reshape(-1, head_dim)[:features]
    return directions.astype(np.float32)


class Favor:
    """FAVOR+ feature map: random features of q and k whose products estimate exp(scale q . k).

    The features have the maximum 1, and come with the logarithm of their scale.

    Each key has its own scale: with a maximum over several keys, later ones would change earlier outputs.

    Args:
        projection: [F, H].
        scale: greater than 0.
    """

    def __init__(self, projection: Float[Array | np.ndarray, "F H"], scale: float):
        self.projection = jnp.asarray(projection)
        self.scale = scale

    def query(self, x: Float[Array, "*tokens H"]) -> Features:
        """Return the random features of queries [..., H]."""
        return self._features(x)

    def key(self, x: Float[Array, "*tokens H"]) -> Features:
        """Return the random features of keys [..., H]."""
        return self._features(x)

    def _features(self, x: Float[Array, "*tokens H"]) -> Features:
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        # Products of two bfloat16 numbers are exact in float32, so they need no higher precision.
        precision = "highest" if x.dtype == dtype else None
        projected = jnp.einsum(
            "...d,fd->...f", x, self.projection.astype(x.dtype), preferred_element_type=dtype, precision=precision
        )
        wide = x.astype(dtype)
        exponents = projected * self.scale**0.5 - 0.5 * self.scale * jnp.sum(wide * wide, axis=-1, keepdims=True)
        largest = jax.lax.stop_gradient(exponents.max(axis=-1))
        return Features(jnp.exp(exponents - largest[..., None]).astype(x.dtype), largest)
