"""Stores any pytree as a flat dict {"params/layers/kernel": leaf}, readable without the pytree's Python classes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxstack.errors import ConfigError, JaxstackError

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


_SHOWN = 10


def compare(wanted: dict[str, LeafSpec], stored: dict[str, LeafSpec], subset: bool = False) -> list[str]:
    """Return one line of text for each leaf in which a wanted pytree and a checkpoint differ.

    The lines are in the order of `wanted`.

    Args:
      wanted: leaves of this run.
      stored: leaves of the checkpoint.
      subset: accept that the checkpoint has more leaves.
    """
    lines = []
    for name, want in wanted.items():
        have = stored.get(name)
        if have is None:
            lines.append(f"{name}: {want} wanted, not in the checkpoint")
        elif have.dtype != want.dtype:
            lines.append(f"{name}: dtype {have.dtype} in the checkpoint, {want.dtype} wanted")
        elif have.shape != want.shape:
            lines.append(f"{name}: shape {list(have.shape)} in the checkpoint, {list(want.shape)} wanted")
        elif not have.is_known:
            lines.append(f"{name}: {have.dtype} of {have.key_impl!r}, which is no such random generator of this jax")
    if not subset:
        surplus = [name for name in stored if name not in wanted]
        lines += [f"{name}: {stored[name]} in the checkpoint, not wanted" for name in surplus]
    return lines


def check_layout(source: str, wanted: dict[str, LeafSpec], stored: dict[str, LeafSpec], subset: bool = False) -> None:
    """Check that a checkpoint has the wanted leaves, with the same shapes and dtypes.

    Raises:
      ConfigError: it does not. The message names the first ten differences and counts the others.
    """
    lines = compare(wanted, stored, subset)
    if not lines:
        return
    shown = lines[:_SHOWN]
    if len(lines) > _SHOWN:
        shown.append(f"... and {len(lines) - _SHOWN} more")
    raise ConfigError(
        f"the checkpoint {source} does not fit this run ({len(lines)} differences, the run has {len(wanted)} leaves):"
        + "".join(f"\n  {line}" for line in shown)
        + "\nuse the model, optimizer and number of workers that it was saved with, or start a run with another "
        "name (run.init_from takes the parameters along)"
    )


def initialize_missing_leaves(
    wanted: dict[str, Any], stored: dict[str, LeafSpec], later: Mapping[str, Callable[[], PyTree]]
) -> dict[str, Any]:
    """Create initial values, in the wanted shardings, for fields that were added after a checkpoint was written.

    Args:
      wanted: leaves of this run.
      stored: leaves of the checkpoint.
      later: field -> function of its initial value, for fields that older checkpoints do not have.
    """
    found = {}
    for field, make in later.items():
        if any(name.partition("/")[0] == field for name in stored):
            continue
        places = {name: leaf.sharding for name, leaf in wanted.items() if name.partition("/")[0] == field}
        if places:
            create = jax.jit(lambda make=make, field=field: name_leaves({field: make()})[0], out_shardings=places)
            found |= create()
    return found


def abstract_state(tree: PyTree, shardings: PyTree = None) -> PyTree:
    """Return the pytree with each array replaced by its shape, dtype and sharding, for `CheckpointManager.restore`.

    Args:
      tree: arrays become jax.ShapeDtypeStruct; numpy arrays and plain Python values stay as they are.
      shardings: one sharding for all arrays, or a tree of them shaped like `tree`. Default: each array's own.
    """
    leaves, structure = jax.tree.flatten(tree)
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        places = [shardings] * len(leaves)
    else:
        places = structure.flatten_up_to(shardings)

    def abstract(leaf: object, place: jax.sharding.Sharding | None) -> object:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        place = place if place is not None else getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return structure.unflatten([abstract(leaf, place) for leaf, place in zip(leaves, places, strict=True)])


def orbax_target(wanted: jax.Array | jax.ShapeDtypeStruct | np.ndarray, stored: LeafSpec) -> Any:
    """Return the target that makes Orbax load a leaf: a numpy array, or an abstract array with the wanted sharding.

    Each device then reads only its own shard from the files; nothing is gathered on one host. The default sharding is
    one device.
    """
    if isinstance(wanted, np.ndarray | np.generic):
        return np.empty(stored.shape, stored.dtype)
    sharding = getattr(wanted, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if stored.key_impl is None:
        return jax.ShapeDtypeStruct(stored.shape, jnp.dtype(stored.dtype), sharding=sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(stored.shape, wanted.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=_for_key_data(sharding))


def restored_leaf(name: str, loaded: Any, wanted: Any, stored: LeafSpec) -> Any:
    """Convert an array loaded from a checkpoint to the kind that was asked for: jax or numpy array, or random key.

    Args:
      name: path of the leaf, for messages.
      loaded: the array; None if none is stored for this leaf.
      wanted: leaf of the tree that the caller asked for.
      stored: the leaf of the checkpoint.

    Raises:
      JaxstackError: jax cut 64-bit numbers to 32 bits, which would change their values silently.
    """
    if stored.is_python_value:
        return stored.value
    if loaded is None:
        loaded = orbax_target(wanted, stored)
        if isinstance(loaded, jax.ShapeDtypeStruct):
            loaded = jax.device_put(jnp.empty(loaded.shape, loaded.dtype), loaded.sharding)
    if stored.key_impl is not None:
        return jax.random.wrap_key_data(loaded, impl=stored.key_impl)
    if str(loaded.dtype) != stored.dtype:
        raise JaxstackError(
            f"{name} is {stored.dtype} in the checkpoint and would be cut to {loaded.dtype}: "
            "set jax_enable_x64, or ask for a numpy array"
        )
    return loaded[()] if isinstance(wanted, np.generic) else loaded


def _for_key_data(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    # Key data has one dim more than its keys. A named sharding does not shard trailing dims that it does not name.
    if isinstance(sharding, jax.sharding.NamedSharding | jax.sharding.SingleDeviceSharding):
        return sharding
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
