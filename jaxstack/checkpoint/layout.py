"""Compares the tree that is wanted with the one that a checkpoint holds, and says where its arrays go."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.checkpoint.leaves import LeafSpec, name_leaves
from jaxstack.errors import ConfigError, JaxstackError

_SHOWN = 10


def compare(wanted: dict[str, LeafSpec], held: dict[str, LeafSpec], subset: bool = False) -> list[str]:
    """One line a difference, the leaves in the order of `wanted`.

    With `subset`, leaves not wanted are no difference.
    """
    lines = []
    for name, want in wanted.items():
        have = held.get(name)
        if have is None:
            lines.append(f"{name}: {want} wanted, not in the checkpoint")
        elif have.dtype != want.dtype:
            lines.append(f"{name}: dtype {have.dtype} in the checkpoint, {want.dtype} wanted")
        elif have.shape != want.shape:
            lines.append(f"{name}: shape {list(have.shape)} in the checkpoint, {list(want.shape)} wanted")
        elif not have.is_known:
            lines.append(f"{name}: {have.dtype} of {have.key_impl!r}, which is no such random generator of this jax")
    if not subset:
        surplus = [name for name in held if name not in wanted]
        lines += [f"{name}: {held[name]} in the checkpoint, not wanted" for name in surplus]
    return lines


def check_layout(source: str, wanted: dict[str, LeafSpec], held: dict[str, LeafSpec], subset: bool = False) -> None:
    """Raise ConfigError that names the first ten differing leaves and counts the rest."""
    lines = compare(wanted, held, subset)
    if not lines:
        return
    shown = lines[:_SHOWN]
    if len(lines) > _SHOWN:
        shown.append(f"... and {len(lines) - _SHOWN} more")
    raise ConfigError(
        f"the checkpoint {source} does not fit this run ({len(lines)} of {len(wanted)} leaves differ):\n  "
        + "\n  ".join(shown)
        + "\nuse the model and optimizer that it was saved with, or start a run with another name (run.init_from takes "
        "the parameters along)"
    )


def initial_leaves(
    wanted: dict[str, Any], held: dict[str, LeafSpec], later: Mapping[str, Callable[[], Any]]
) -> dict[str, Any]:
    """The leaves of those fields of `later` of which the checkpoint holds none, laid out as they are wanted."""
    found = {}
    for field, make in later.items():
        if any(name.partition("/")[0] == field for name in held):
            continue
        places = {name: leaf.sharding for name, leaf in wanted.items() if name.partition("/")[0] == field}
        if places:
            create = jax.jit(lambda make=make, field=field: name_leaves({field: make()})[0], out_shardings=places)
            found |= create()
    return found


def abstract_state(tree: Any, shardings: Any = None) -> Any:
    """The abstract form of `tree` to hand to `CheckpointManager.restore`.

    Arrays become jax.ShapeDtypeStruct with their own sharding, or with that of `shardings`: one sharding for
    all, or a tree of them shaped like `tree`. Numpy arrays and plain Python values stay as they are.
    """
    leaves, structure = jax.tree.flatten(tree)
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        places = [shardings] * len(leaves)
    else:
        places = structure.flatten_up_to(shardings)

    def abstract(leaf: Any, place: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        place = place if place is not None else getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return structure.unflatten([abstract(leaf, place) for leaf, place in zip(leaves, places, strict=True)])


def load_target(wanted: Any, held: LeafSpec) -> Any:
    """What Orbax is to load for a leaf: host memory for numpy, else the wanted sharding (or one device).

    Each device then reads only its own part from the files: nothing is gathered on one host.
    """
    if isinstance(wanted, np.ndarray | np.generic):
        return np.empty(held.shape, held.dtype)
    sharding = getattr(wanted, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if held.key_impl is None:
        return jax.ShapeDtypeStruct(held.shape, jnp.dtype(held.dtype), sharding=sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(held.shape, wanted.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=_for_key_data(sharding))


def finish_leaf(name: str, loaded: Any, wanted: Any, held: LeafSpec) -> Any:
    """The leaf that the caller asked for, from what was loaded for it (None where no array is stored).

    Raises JaxstackError where jax has cut 64-bit numbers to 32 bits: a changed number must not pass unseen.
    """
    if held.is_plain:
        return held.value
    if not held.has_array:
        loaded = load_target(wanted, held)
        if isinstance(loaded, jax.ShapeDtypeStruct):
            loaded = jax.device_put(jnp.empty(loaded.shape, loaded.dtype), loaded.sharding)
    if held.key_impl is not None:
        return jax.random.wrap_key_data(loaded, impl=held.key_impl)
    if str(loaded.dtype) != held.dtype:
        raise JaxstackError(
            f"{name} is {held.dtype} in the checkpoint and would be cut to {loaded.dtype}: "
            "set jax_enable_x64, or ask for a numpy array"
        )
    return loaded[()] if isinstance(wanted, np.generic) else loaded


def _for_key_data(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    # Key data has one dimension more than its keys; a named sharding leaves trailing dimensions whole by
    # itself.
    if isinstance(sharding, jax.sharding.NamedSharding | jax.sharding.SingleDeviceSharding):
        return sharding
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
