"""Time from the start of a run's process to the end of its first step, with an empty and with a filled cache.

    python benchmarks/training/startup.py "llama3-8b fsdp4 bf16" --set model.scan_layers=false

The first start has an empty compilation cache, the second the one that the first filled. Each is a process of its own
that does what `python -m jaxstack.train` does up to its first step, on synthetic tokens. Seconds are wall-clock time
since the process was started; `lowering` is tracing in Python, during which the weights and moments are created,
`compilation` is XLA's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table
from benchmarks.steps import open_trainer, run_as_command, tiny
from benchmarks.training.train_step import WORKS

PARTS = ("imports", "devices and model", "lowering", "compilation", "report", "data", "first step")
COLUMNS = ("work", "variant", "device", "devices", "seconds", *PARTS)
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Marks:
    """Seconds of each part, one after the other from `began` (of `time.time`) on."""

    def __init__(self, began: float):
        self._last = began
        self.seconds: dict[str, float] = {}

    def done(self, part: str) -> None:
        """This part ends now."""
        now = time.time()
        self.seconds[part], self._last = now - self._last, now

    def move(self, seconds: float, part: str, to: str) -> None:
        """Move time from one part to another one."""
        self.seconds[part] -= seconds
        self.seconds[to] = seconds


def start_up(began: float, overrides: Sequence[str]) -> dict[str, Any]:
    """A row: everything from the start of the process to the end of the first step."""
    import jax

    import jaxstack.run.build  # noqa: F401 - what a run imports

    marks = Marks(began)
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compilations.append(seconds) if event == _COMPILED else None
    )
    marks.done("imports")
    _, trainer = open_trainer(overrides)
    marks.done("devices and model")
    abstract = trainer.peek_batch()
    compilations.clear()
    trainer.compile(abstract, create_state=True)
    marks.done("lowering")
    marks.move(compilations[-1], "lowering", "compilation")
    trainer.describe()
    marks.done("report")
    batches = trainer.batches(0)
    batch, _ = next(batches)
    marks.done("data")
    loss = float(trainer.train_step(batch)["loss"])
    marks.done("first step")
    batches.close()
    ended = {"seconds": sum(marks.seconds.values()), **marks.seconds, "loss": loss, "overrides": list(overrides)}
    return {"device": jax.devices()[0].device_kind, "devices": jax.device_count(), **ended}


def run_process(overrides: Sequence[str], cache: str, timeout: float) -> dict[str, Any]:
    """`start_up` in a process of its own, with this directory of compiled programs."""
    variables = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
    command = [sys.executable, __file__, *overrides, "--began", repr(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=variables)
    if done.returncode:
        raise SystemExit(f"the start failed: {done.stderr[-2000:].strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Starts each work twice with one cache; keeps both rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", help=f"of: {', '.join(WORKS)}; default: llama3-8b fsdp4 bf16")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="for every start")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on simulated CPU devices; rows go to tiny/")
    parser.add_argument("--timeout", type=positive(float), default=400, help="seconds a start may take")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.began is not None:
        run_as_command("startup.py", lambda: print(json.dumps(start_up(args.began, args.works))))
    unknown = [work for work in args.works if work not in WORKS]
    if unknown:
        parser.error(f"unknown works: {', '.join(unknown)}; known: {', '.join(WORKS)}")
    for work in args.works or ["llama3-8b fsdp4 bf16"]:
        overrides = [*(tiny(WORKS[work]) if args.tiny else WORKS[work]), *args.set]
        rows = []
        with tempfile.TemporaryDirectory() as cache:
            for start in ("first start", "second start"):
                row = run_process(overrides, cache, args.timeout)
                rows.append(
                    {"work": work, "implementation": "jaxstack", "variant": ", ".join([start, *args.set]), **row}
                )
        append_rows("tiny/startup" if args.tiny else "startup", rows)
        print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
