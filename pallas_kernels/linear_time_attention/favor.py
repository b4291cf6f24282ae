"""FAVOR+: positive random features whose products estimate the softmax kernel (Choromanski et al., arXiv:2009.14794).

exp(q . k) is the mean over w ~ N(0, 1) of exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2).
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear_time_attention.features import Features


def random_projection(features: int, head_dim: int, *, seed: int = 0, orthogonal: bool = True) -> np.ndarray:
    """Normal directions, float32 [features, head_dim].

    Args:
        orthogonal: each run of `head_dim` directions is orthogonal, which lowers the estimate's variance; every
            direction alone is distributed as without.
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
    """Features of exp(scale q . k), each scaled so that its largest is 1; their logarithms carry the rest.

    The scale of a key is its own: a maximum over several keys would let later ones touch earlier outputs.

    Args:
        projection: [F, H].
        scale: greater than 0.
    """

    def __init__(self, projection: jax.Array | np.ndarray, scale: float):
        self.projection, self.scale = jnp.asarray(projection), scale

    def query(self, x: jax.Array) -> Features:
        return self._features(x)

    def key(self, x: jax.Array) -> Features:
        return self._features(x)

    def _features(self, x: jax.Array) -> Features:
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        # Products of two bfloat16 numbers are exact in float32: the projection in the input's dtype costs nothing.
        precision = "highest" if x.dtype == dtype else None
        projected = jnp.einsum(
            "...d,fd->...f", x, self.projection.astype(x.dtype), preferred_element_type=dtype, precision=precision
        )
        wide = x.astype(dtype)
        exponents = projected * self.scale**0.5 - 0.5 * self.scale * jnp.sum(wide * wide, axis=-1, keepdims=True)
        largest = jax.lax.stop_gradient(exponents.max(axis=-1))
        return Features(jnp.exp(exponents - largest[..., None]).astype(x.dtype), largest)
