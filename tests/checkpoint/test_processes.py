"""Two real processes that save and restore together through jax.distributed."""

import os
import socket
import subprocess
import sys

import pytest

from tests.checkpoint.conftest import REPOSITORY

TOGETHER = """
import sys
import jax
rank, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address = f"127.0.0.1:{port}"
jax.distributed.initialize(address, 2, rank, coordinator_bind_address=address)
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxstack.checkpoint import manifest
from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.leaves import abstract_state
from jaxstack.checkpoint.manager import CheckpointManager

mesh = jax.make_mesh((4,), ("d",))
split, whole = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())

def make(step):
    return {
        "split": jax.jit(lambda: jnp.arange(1024.0).reshape(32, 32) + step, out_shardings=split)(),
        "whole": jax.jit(lambda: jnp.full(5, float(step)), out_shardings=whole)(),
        "step": step,
    }

told = []
manager = CheckpointManager(directory, CheckpointConfig(keep=2), report=told.append)
assert manager.latest_step() is None
for step in (1, 2, 3):
    manager.save(step, make(step), {"step": step})
assert manager.latest_step() == 3

hash_files = manifest.hash_files
def refuse(*arguments, **options):
    raise OSError("the disk of rank 1 broke")
if rank == 1:
    manifest.hash_files = refuse
manager.save(4, make(4))
try:
    manager.wait()
except Exception as error:
    assert "step 4 was not saved" in str(error), error
else:
    raise AssertionError("the failure of one rank passed unseen")
manifest.hash_files = hash_files
manager.save(5, make(5), {"step": 5})
step = manager.latest_step()
found, extra = manager.restore(step, abstract_state(make(0)))
expected = make(5)
for name in ("split", "whole"):
    for one, other in zip(found[name].addressable_shards, expected[name].addressable_shards, strict=True):
        assert (one.data == other.data).all()
count = len(told)
multihost_utils.sync_global_devices("read")
victim = sorted(manifest.read_index(manager._path(5))["files"])[1]  # in the share of rank 1, and told by rank 0
if rank == 0:
    path = manager._path(5) / victim
    path.write_bytes(path.read_bytes()[:-1] + b"?")
multihost_utils.sync_global_devices("harmed")
assert manager.latest_step() == 3
assert rank or f"passed over: {victim}: " in told[-1], told
manager.close()
print(rank, step, extra, count)
"""


@pytest.mark.exhaustive
def test_two_processes_save_fail_and_restore_together(tmp_path, open_manager):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    directory = tmp_path / "checkpoints"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(rank), str(port), str(directory)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY,
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0].splitlines()[-1] == "0 5 {'step': 5} 1"
    assert outputs[1].splitlines()[-1] == "1 5 {'step': 5} 0"
    assert open_manager().all_steps() == [3, 5]
    assert len(list((directory / "5" / "arrays" / "state").glob("ocdbt.process_*"))) == 2
