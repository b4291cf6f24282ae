"""Copies of a state in host memory, beside steps on a GPU."""

import shutil
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.checkpoint import manifest, memory_folder, shard_files

GIBIBYTES = 4
SLOWEST_SECONDS = 0.25
"""A step of the test takes milliseconds; behind the copy of an array of 1 GiB to pageable memory it took half a second
and more."""


@pytest.fixture
def folder():
    made = memory_folder.make_folder()
    assert made is not None
    yield made
    shutil.rmtree(made)


def make_state() -> dict[str, jax.Array]:
    """Return arrays of 1 GiB, each of its own values."""
    return {f"w{number}": jnp.arange(2**28, dtype=jnp.float32) + number for number in range(GIBIBYTES)}


def write(root: Path, shards: shard_files.Shards) -> None:
    shard_files.write(root, shards, {"format": manifest.FORMAT, "step": 1, "saved_at": "", "leaves": {}}, {})


def test_numpy_reads_pinned_memory_in_place():
    pinned = shard_files._to_host(jnp.arange(1000.0))
    assert np.asarray(pinned).ctypes.data == pinned.unsafe_buffer_pointer()


def test_steps_go_on_while_a_copy_comes_to_the_host(folder):
    step = jax.jit(lambda x: (jnp.tanh(x @ x), x[0, 0]))
    x, loss = step(jnp.ones((2048, 2048)))
    state = make_state()
    slowest = []
    roots = [folder / "0", folder / "1"]
    for root in roots:  # the first copy compiles, and its memory is new
        root.mkdir()
        shards = shard_files.start_copy(state, on_device=True)
        jax.block_until_ready(shards)
        thread = threading.Thread(target=write, args=(root, shards))
        thread.start()
        times = []
        while thread.is_alive():
            began = time.perf_counter()
            x, loss = step(x)
            float(loss)
            times.append(time.perf_counter() - began)
        thread.join()
        slowest.append(max(times))
        assert len(times) > 20
    print(f"slowest step beside a copy of {GIBIBYTES} GiB: {slowest} s")
    assert slowest[1] < SLOWEST_SECONDS
    root = roots[1]
    index = manifest.check(root, 1)
    targets = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in state.items()}
    files, missing = shard_files.find_files([index], targets)
    assert missing is None
    found = shard_files.read([shard_files.Folder(root, index, files[0])], targets)
    assert all((found[name] == state[name]).all() for name in state)
