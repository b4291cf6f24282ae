"""Stores any pytree as a flat dict {"params/layers/kernel": leaf}, readable without the pytree's Python classes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxstack.errors import JaxstackError

STORABLE_DTYPES = frozenset(
    ["bool", "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn"]
    + ["int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    + ["float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz"]
    + ["float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
_PLAIN_TYPES = (bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """Description of a pytree leaf in a checkpoint: shape and dtype, a Python value, or a random key's generator.

    The dtype of plain Python values is e.g. "python int".
    """

    shape: tuple[int, ...]
    dtype: str
    value: Any = None
    key_impl: str | None = None

    @property
    def is_python_value(self) -> bool:
        """True for a plain Python value, which is stored in checkpoint.json instead of as an array."""
        return self.dtype.startswith("python ")

    @property
    def is_known(self) -> bool:
        """False for random keys of a generator that this version of jax lacks; True for everything else."""
        if self.key_impl is None:
            return not self.dtype.startswith("key<")
        try:
            return str(jax.eval_shape(lambda: jax.random.key(0, impl=self.key_impl)).dtype) == self.dtype
        except ValueError:
            return False

    @property
    def has_array(self) -> bool:
        """True if an array is stored for the leaf; False for Python values and for arrays without elements."""
        return not self.is_python_value and 0 not in self.shape

    def __str__(self) -> str:
        return self.dtype if self.is_python_value else f"{self.dtype}{list(self.shape)}"

    def to_json(self) -> dict[str, Any]:
        """Return the description of the leaf as plain JSON, which `from_json` reads."""
        fields: dict[str, Any] = {"shape": list(self.shape), "dtype": self.dtype}
        if self.is_python_value:
            fields["value"] = self.value
        if self.key_impl is not None:
            fields["key_impl"] = self.key_impl
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "LeafSpec":
        """Return the description of a leaf from the plain JSON that `to_json` wrote."""
        return cls(tuple(fields["shape"]), fields["dtype"], fields.get("value"), fields.get("key_impl"))


def name_leaves(tree: PyTree) -> tuple[dict[str, Any], Any]:
    """Flatten a pytree into a dict from path ("optimizer/0/mu/kernel") to leaf; return it and the tree structure.

    Raises:
      JaxstackError: two leaves have the same path.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves: dict[str, Any] = {}
    for path, leaf in pairs:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "value"
        if name in leaves:
            raise JaxstackError(f"two leaves of the state have the path {name!r}: rename one of them")
        leaves[name] = leaf
    return leaves, structure


def describe(name: str, leaf: object) -> LeafSpec:
    """Return the description of a pytree leaf for a checkpoint: array, random key, Python value, or abstract array.

    Raises:
      JaxstackError: it cannot be stored.
    """
    if type(leaf) in _PLAIN_TYPES:
        return LeafSpec((), f"python {type(leaf).__name__}", value=leaf)
    dtype = getattr(leaf, "dtype", None)
    shape = tuple(getattr(leaf, "shape", ()))
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(leaf)) if isinstance(leaf, jax.Array) else None
        return LeafSpec(shape, str(dtype), key_impl=impl)
    if dtype is None or str(dtype) not in STORABLE_DTYPES:
        kind = type(leaf).__name__ if dtype is None else f"array of dtype {dtype}"
        raise JaxstackError(
            f"{name} is a {kind}, which a checkpoint cannot hold: "
            "give arrays of a number type, random keys, int, float, bool or str"
        )
    return LeafSpec(shape, str(dtype))


def to_stored(leaf: jax.Array | np.ndarray | np.generic, spec: LeafSpec) -> jax.Array | np.ndarray:
    """Return the array that is written for a leaf: the bits of a random key, or a numpy scalar as an array."""
    if spec.key_impl is not None and isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
