"""Training speed of two processes on one machine whose connection is limited, with and without workers.

    python benchmarks/distributed/slow_link.py         # data parallelism, local SGD, DiLoCo; minutes
    python benchmarks/distributed/slow_link.py --megabytes 0.5 --methods data_parallel,diloco_int8
    python benchmarks/distributed/slow_link.py --tiny  # tiny sizes, to try the script

Each process trains on one simulated CPU device; Gloo carries the collectives between them over TCP on the loopback
interface. The kernel limits how fast each process sends on each of its connections (the socket option
SO_MAX_PACING_RATE, Linux 4.13 or newer). Compilation and the steps before the first exchange, in which Gloo connects,
are neither limited nor timed. `link_megabytes` is the rate at which an all-reduce of 4 MB was measured to send then.
Rows are appended to benchmarks/results/slow_link.jsonl.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.distributed.islands import BASE, METHODS, WORKS, bytes_per_step
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from benchmarks.steps import SYNTHETIC, open_run

PROCESSES = 2
PACING_RATE = 47
"""SO_MAX_PACING_RATE of Linux, which Python's socket module does not name."""
MEASURED_FLOATS = 2**20
EVERY = 20
"""Steps that data parallelism takes in place of those from one exchange to the next."""
COLUMNS = ("method", "link_megabytes", "bytes_per_step", "milliseconds", "tokens_per_second", "relative_speed")


def limit_connections(bytes_per_second: int) -> int:
    """Limit the rate at which this process sends on each of its TCP connections; return their number."""
    limited = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                connection.getpeername()  # raises OSError if it only listens
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.setsockopt(socket.SOL_SOCKET, PACING_RATE, bytes_per_second)
                    limited += 1
    return limited


class MeasuredSum:
    """An all-reduce of 4 MB between the processes, timed."""

    def __init__(self):
        import jax

        mesh = jax.make_mesh((PROCESSES,), ("all",))
        split = jax.NamedSharding(mesh, jax.P("all"))
        whole = jax.NamedSharding(mesh, jax.P())
        ones = jax.jit(lambda: jax.numpy.ones((PROCESSES, MEASURED_FLOATS)), out_shardings=split)
        self._sum = jax.jit(lambda x: x.sum(0), out_shardings=whole)
        self._values = ones()

    def megabytes_per_second(self) -> float:
        """Return the rate at which each process sends in a ring all-reduce."""
        began = time.perf_counter()
        self._sum(self._values).block_until_ready()
        return 2 * (PROCESSES - 1) / PROCESSES * 4 * MEASURED_FLOATS / (time.perf_counter() - began) / 1e6


def train(overrides: list[str], megabytes: float, exchanges: int) -> dict[str, Any]:
    """Train in this process, together with the other one; return what a row holds."""
    from jaxstack.distributed.cluster import find_place
    from jaxstack.distributed.coordination import connect
    from jaxstack.run.build import make_trainer

    place = find_place()
    assert place is not None
    connect(place)
    config, data = open_run([*SYNTHETIC, *overrides])
    trainer = make_trainer(config, data)
    trainer.compile(trainer.peek_batch())
    batches = trainer.batches(0)

    def step() -> float:
        return trainer.read(trainer.train_step(next(batches)[0]))["loss"]

    every = config.local_sgd.every if config.parallel.workers > 1 else EVERY
    for _ in range(every):
        step()
    measured = MeasuredSum()
    measured.megabytes_per_second()
    limited = limit_connections(int(megabytes * 1e6))
    rate = measured.megabytes_per_second()
    count = exchanges * every
    began = time.perf_counter()
    loss = float("nan")
    for _ in range(count):
        loss = step()
    seconds = time.perf_counter() - began
    batches.close()
    tokens = count * config.train.global_batch_size * config.train.sequence_length
    return {
        "steps": count,
        "link_megabytes": rate,
        "limited_connections": limited,
        "bytes_per_step": bytes_per_step(trainer),
        "milliseconds": 1e3 * seconds / count,
        "tokens_per_second": tokens / seconds,
        "train_loss": loss,
    }


def measure(overrides: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return what the first of two processes measured.

    Raises:
        SystemExit: One of them failed.
    """
    from jaxstack.launch.supervisor import free_port

    common = {
        **os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_PROCESSES": str(PROCESSES),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
    }  # fmt: skip
    options = [f"--megabytes={args.megabytes}", f"--exchanges={args.exchanges}"]
    command = [sys.executable, __file__, "--worker", *options, *overrides]
    workers = [
        subprocess.Popen(command, env={**common, "JAX_PROCESS_ID": str(index)}, stdout=subprocess.PIPE, text=True)
        for index in range(PROCESSES)
    ]
    try:
        said = [worker.communicate(timeout=args.timeout)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"slow_link.py: a process failed: {overrides}")
    return json.loads(said[0].splitlines()[-1])


def main() -> None:
    """Measure, print and store the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=positive(float), default=2.0, help="limit of a connection, MB/s (2)")
    parser.add_argument(
        "--exchanges", type=positive(int), default=2, help="length of the measurement, in exchanges (2)"
    )
    parser.add_argument("--methods", default="local_sgd,diloco", help="names of benchmarks/distributed/islands.py")
    parser.add_argument("--timeout", type=positive(float), default=600.0, help="limit of a method in seconds (600)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args, given = parser.parse_known_args()
    names = [BASE, *args.methods.split(",")]
    if wrong := [word for word in given if "=" not in word] or [name for name in names if name not in METHODS]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}; methods: {', '.join(METHODS)}")
    if args.worker:
        print(json.dumps(train(given, args.megabytes, args.exchanges)), flush=True)
        return
    script, work = (f"{SCRATCH}slow_link", "tiny") if args.tiny else ("slow_link", "bytes")
    require_commit(script)
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(names):
        axis = "data" if name == BASE else "workers"
        layout = [f"parallel.{axis}={PROCESSES}", f"parallel.simulate_devices={PROCESSES}"]
        row = measure([*WORKS[work], *layout, *METHODS[name], *given], args)
        speed = row["tokens_per_second"] / (rows[0] if rows else row)["tokens_per_second"]
        common = {"work": work, "implementation": "jaxstack", "device": "cpu", "devices": PROCESSES}
        rows.append({**common, "method": name, "limit_megabytes": args.megabytes, **row, "relative_speed": speed})
        append_rows(script, rows[-1:])
        print(f"{name}: {row['milliseconds']:.0f} ms a step", flush=True)
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
