"""What the processes of one run have to agree on while they save and restore.

One process needs nothing of it.
"""

import asyncio

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
    """Whether this process writes the manifest, deletes and reports."""
    return jax.process_index() == 0


def share() -> tuple[int, int]:
    """This process's part of work that is divided evenly: (index, count)."""
    return jax.process_index(), jax.process_count()


def all_true(value: bool) -> bool:
    """Whether `value` holds on every process. Called on all of them, from the main thread."""
    if jax.process_count() == 1:
        return value
    return bool(np.all(multihost_utils.process_allgather(np.asarray(value))))


def first_says(value: int) -> int:
    """The value of the first process, on all. Called on all of them, from the main thread."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.asarray(value, np.int32)))


def wait_for_all(name: str, timeout_seconds: int) -> None:
    """A barrier that uses no device, so that a background thread may wait in it. `name` is used once."""
    if jax.process_count() == 1:
        return
    from orbax.checkpoint import v1 as ocp

    asyncio.run(ocp.multihost.sync_global_processes(name, operation_id=name, timeout=timeout_seconds))
