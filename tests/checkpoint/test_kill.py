"""A process that saves all the time is killed at random times: nothing is torn, nothing committed is lost.

JAXSTACK_TEST_KILLS=100 runs it a hundred times instead of three.
"""

import os
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from tests.checkpoint.conftest import REPOSITORY

SAVE_ALL_THE_TIME = """
import sys
import jax, jax.numpy as jnp
from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.manager import CheckpointManager

manager = CheckpointManager(sys.argv[1], CheckpointConfig(keep=2), report=lambda line: None)
step = manager.latest_step() or 0
print("ready", flush=True)
fill = jax.jit(lambda tree, value: jax.tree.map(lambda x: x * 0 + value, tree), donate_argnums=0)
state = {f"w{i}": jnp.zeros((64, 512)) for i in range(12)}
while True:
    step += 1
    state = fill(state, float(step))
    manager.save(step, {"tree": state, "step": step})
    committed = manager.last_save.step if manager.last_save else 0
    print(committed, flush=True)
"""


def run_and_kill(directory, chance: random.Random, after_a_commit: bool) -> int:
    """Starts the process, kills it at a random time, and returns the last step that it had seen committed."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVE_ALL_THE_TIME, str(directory)],
        stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, start_new_session=True,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    while after_a_commit and process.stdout.readline() == "0\n":
        pass
    time.sleep(chance.uniform(0, 0.5))
    os.killpg(process.pid, signal.SIGKILL)
    seen = [int(line) for line in process.stdout.read().split("\n")[:-1]]
    process.wait()
    return max(seen, default=0)


def check_all_whole(open_manager, seen: int) -> int:
    """Loads the newest checkpoint: not older than what was seen committed, and of one step throughout."""
    manager = open_manager()
    newest = manager.latest_step() or 0
    assert newest >= seen
    if newest:
        wanted = {f"w{i}": jax.ShapeDtypeStruct((64, 512), jnp.float32) for i in range(12)}
        found, _ = manager.restore(newest, {"tree": wanted, "step": 0})
        assert found["step"] == newest
        assert all((leaf == newest).all() for leaf in found["tree"].values())
    manager.close()
    return newest


def test_killed_at_random_times(open_manager, warnings, tmp_path):
    chance = random.Random()
    steps = [0]
    for kill in range(int(os.environ.get("JAXSTACK_TEST_KILLS", "3"))):
        seen = run_and_kill(tmp_path / "checkpoints", chance, after_a_commit=kill % 2 == 0)
        steps.append(check_all_whole(open_manager, max(seen, steps[-1])))
    assert steps == sorted(steps) and steps[-1] > 0
    assert not any("damaged" in line for line in warnings)
    cut_off = sum("cut off" in line for line in warnings)
    print(f"{len(steps) - 1} kills, at least {cut_off} of them in the middle of a save, {steps[-1]} steps")
