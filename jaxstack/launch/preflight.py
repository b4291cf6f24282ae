"""`python -m jaxstack.launch --preflight`: compares the nodes of a run, and tests and times an all-reduce."""

import os
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from jaxstack.cli import run_command
from jaxstack.distributed import coordination
from jaxstack.distributed.cluster import find_place
from jaxstack.resilience.exit_on_signal import ExitOnSignal
from jaxstack.resilience.preflight import check_program, check_same_devices
from jaxstack.resilience.progress_file import ProgressFile

_MEGABYTES = 64
_SECONDS = 120


def check() -> None:
    """Check that package versions, commit and devices match on all processes, time an all-reduce, print the results.

    Raises:
      JaxstackError: the processes differ, or one of them does not answer in two minutes.
    """
    signs = ProgressFile.of_this_process()
    place = find_place()
    warnings = []
    if place is not None:
        coordination.connect(place, connect_seconds=_SECONDS)
        warnings = check_program("", _SECONDS)
    signs.note()
    if place is not None:
        check_same_devices(_SECONDS)
    devices = jax.local_devices()
    seen = f"{socket.gethostname()}: {len(devices)} x {devices[0].device_kind}"
    lines = [f"process {index} on {text}" for index, text in enumerate(coordination.all_gather("seen", seen, _SECONDS))]
    lines += [f"warning: {line}" for line in warnings]
    local = int(os.environ.get("JAX_LOCAL_DEVICE_IDS", "0").split(",")[0])
    reports = coordination.all_gather("gpus", describe_gpus() if local == 0 else "", _SECONDS)
    lines += [text for text in dict.fromkeys(reports) if text]
    signs.note()
    lines.append(measure_sum())
    if coordination.process_position()[0] == 0:
        print("\n".join(lines), flush=True)
    signs.note("end")


def measure_sum() -> str:
    """Time an all-reduce over all devices; return a line with its bandwidth, or one that reports a wrong result."""
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("all",))
    split = jax.NamedSharding(mesh, jax.P("all"))
    whole = jax.NamedSharding(mesh, jax.P())
    size = _MEGABYTES * 2**20 // 4 if jax.default_backend() == "gpu" else 2**16
    values = jax.jit(lambda: jnp.ones((count, size)), out_shardings=split)()
    add = jax.jit(lambda x: x.sum(0), out_shardings=whole)
    if float(jax.device_get(add(values))[0]) != count:
        return f"the sum over {count} devices is WRONG: a link or a device is broken"
    times = []
    for _ in range(5):
        began = time.perf_counter()
        add(values).block_until_ready()
        times.append(time.perf_counter() - began)
    best = min(times)
    sent = 2 * (count - 1) / count * size * 4
    pace = f"{1e3 * best:.2f} ms, {sent / best / 1e9:.3g} GB/s"
    return f"a sum over {count} devices, {size * 4 / 2**20:.3g} MiB each: {pace}"


def describe_gpus() -> str:
    """Return clocks, temperatures and links of this node's GPUs, from nvidia-smi; empty if that fails."""
    fields = "index,name,clocks.sm,clocks.max.sm,temperature.gpu,ecc.errors.uncorrected.volatile.total"
    parts = []
    for words in (("--format=csv", f"--query-gpu={fields}"), ("topo", "-m")):
        try:
            done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        parts.append(done.stdout.strip())
    return "\n".join([f"{socket.gethostname()}:", *parts]) if parts else ""


def main() -> int:
    """Check before a run that all processes agree and that their devices can communicate; return the exit code."""

    def body() -> None:
        with ExitOnSignal("jaxstack launch --preflight"):
            check()

    return coordination.exit_at_once_on_failure(run_command("jaxstack launch --preflight", body))


if __name__ == "__main__":
    sys.exit(main())
