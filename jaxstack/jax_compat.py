"""Uses of private or version-dependent parts of JAX, in one place, so that an upgrade of JAX changes only this file."""

import contextlib
import functools
from typing import Protocol, cast

from jax._src import distributed as _distributed
from jax._src import mesh as _mesh
from jax._src import xla_bridge as _xla_bridge
from jax.sharding import Mesh


class CoordinationClient(Protocol):
    """Connection of this process to the coordinator of a distributed run: its key-value store and barriers."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_try_get(self, key: str) -> str: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...

    def key_value_set_bytes(self, key: str, value: bytes) -> None: ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes: ...

    def key_value_delete(self, key: str) -> None: ...

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None: ...


class CoordinationState(Protocol):
    """Index of this process, number of processes, and connection to the run's coordinator; needs no device."""

    process_id: int
    num_processes: int
    client: CoordinationClient | None
    """None in a run of one process."""


def concrete_mesh() -> Mesh:
    """Return the device mesh set by `jax.set_mesh`, empty if none is set; also works while a function is traced.

    `jax.sharding.get_mesh` raises an error while a function is traced.
    """
    return _mesh.get_concrete_mesh()


def coordination_state() -> CoordinationState:
    """Return process index, process count and coordinator connection of `jax.distributed`.

    jax has no public access to the coordinator's store of keys and values.
    """
    return cast(CoordinationState, _distributed.global_state)


def connect_cpu_collectives_at(address: str) -> None:
    """Make Gloo, which connects JAX processes on CPUs, use an address of this host instead of that of the host's name.

    jax has no setting for this. If jax no longer has the function that is replaced, nothing is changed. Call this
    before a device is used.
    """
    with contextlib.suppress(AttributeError):
        backend = _xla_bridge._jax  # pyright: ignore[reportPrivateImportUsage]
        make = backend.make_gloo_tcp_collectives
        if isinstance(make, functools.partial):
            make = make.func
        backend.make_gloo_tcp_collectives = functools.partial(make, hostname=address)
