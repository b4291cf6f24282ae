"""Keys and values in the form in which devices send them: as they are, or as a smaller array that they come from.

Multi-head latent attention computes the keys and values of all heads from one latent of a token. Devices that send the
latent expand what they receive, before they attend to it. In the backward they receive it again, expand it again, and
pull the gradients of keys and values back to those of the latent, which travel on, and of the expansion's parameters.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.context_layout import LINK_BANDWIDTH
from pallas_kernels.attention.request import pad_values
from pallas_kernels.attention.scores import accumulator_dtype

Expansion = Callable[..., tuple[jax.Array, jax.Array]]
"""Function (parameters, *arrays [B, S, ...]) -> k [B, S, K, H], v [B, S, K, V] of the same tokens."""


@dataclasses.dataclass(frozen=True)
class KeySource:
    """The arrays from which keys and values are computed, and the function that does it, token by token.

    Attributes:
        arrays: this device's shard of the sequence, arrays [B, T, ...] of one shape and dtype, which are sent.
        expand: computes k and v from `parameters` and any tokens of `arrays`. It is traced on its own, so that it must
            not read other traced arrays. None: `arrays` are k and v.
        parameters: tree of arrays of `expand`, the same on all devices and not sent. Each device computes the gradient
            of its own queries' part; `jax.shard_map` sums replicated arguments' gradients over devices.
        bandwidth: bytes per second that a device sends. With it `context_attention` estimates whether `arrays` arrive
            earlier than k and v would.
    """

    arrays: tuple[jax.Array, ...]
    expand: Expansion | None = None
    parameters: Any = ()
    bandwidth: float = LINK_BANDWIDTH

    def keys(self) -> tuple[jax.Array, jax.Array]:
        """Return k and v [B, T, K, H] of this device's tokens, with heads of v padded to the width of those of k."""
        return _expand(self.expand, self.parameters, self.arrays)

    def key_shapes(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Return the shapes of k [B, T, K, H] and v [B, T, K, V] of this device's tokens, without computing them."""
        if self.expand is None:
            k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.arrays)
            return k, v
        return jax.eval_shape(self.expand, self.parameters, *self.arrays)

    def bytes_per_token(self) -> int:
        """Return how many bytes of a token are sent."""
        return sum(x.size * x.dtype.itemsize // (x.shape[0] * x.shape[1]) for x in self.arrays)

    def flops_per_token(self) -> int:
        """Return the FLOPs of expanding a token, if it multiplies and adds each parameter once."""
        return 2 * sum(x.size for x in jax.tree.leaves(self.parameters))

    def varying_like(self, x: jax.Array) -> "KeySource":
        """Return the source with parameters that vary over the mesh axes that x does, for the checks of `shard_map`."""
        return dataclasses.replace(self, parameters=jax.tree.map(lambda p: _vary_like(p, x), self.parameters))


def _vary_like(x: jax.Array, like: jax.Array) -> jax.Array:
    missing = _varying_axes(like) - _varying_axes(x)
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def _varying_axes(x: jax.Array) -> frozenset[str]:
    """Return the mesh axes over which x varies, as far as `jax.shard_map` tracks it."""
    kind: Any = jax.typeof(x)
    return kind.mat.varying if hasattr(kind, "mat") else kind.vma  # before jax 0.11 it is `vma`


def _expand(expand: Expansion | None, parameters: Any, arrays: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    k, v = arrays if expand is None else expand(parameters, *arrays)
    return k, pad_values(k, v)


def expand_keys(
    expand: Expansion | None, parameters: Any, arrays: Sequence[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], Callable[[Sequence[jax.Array]], tuple[Any, Sequence[jax.Array]]]]:
    """Expand received arrays.

    Returns:
        k and v [B, S, K, H], and a function from their gradients to those of the parameters, in float32, and of the
        arrays. Without an expansion the latter are the given ones, in their dtype.
    """
    if expand is None:
        k, v = arrays
        return (k, v), lambda gradients: (parameters, gradients)
    keys, pullback = jax.vjp(lambda *given: _expand(expand, *given), parameters, tuple(arrays))

    def pull_back(gradients: Sequence[jax.Array]) -> tuple[Any, Sequence[jax.Array]]:
        d_k, d_v = (gradient.astype(x.dtype) for gradient, x in zip(gradients, keys, strict=True))
        d_parameters, d_arrays = pullback((d_k, d_v))
        return widen(d_parameters), d_arrays

    return keys, pull_back


def widen(tree: Any) -> Any:
    """Return a tree of arrays in the dtype of their sums, float32 for narrower ones."""
    return jax.tree.map(lambda x: x.astype(accumulator_dtype(x.dtype)), tree)


def add_trees(sums: Any, terms: Any) -> Any:
    """Return the sums of two trees of arrays; `sums` may be None, which is 0."""
    return terms if sums is None else jax.tree.map(jnp.add, sums, terms)


def cast_like(tree: Any, like: Any) -> Any:
    """Return a tree of arrays, cast to the dtypes of those of another one."""
    return jax.tree.map(lambda x, other: x.astype(other.dtype), tree, like)
