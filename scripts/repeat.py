"""Repeats the measurements behind docs/claims.md on this machine, and shows their results beside the stored ones.

    python -m scripts.repeat --list                  # the commands of all claims, and the devices that each needs
    python -m scripts.repeat mup "hyperparameter search"     # those of claims whose name has one of these words
    python -m scripts.repeat --stale --minutes 25    # those whose code has changed since they were measured
    python -m scripts.repeat --open                  # those that would show what is not shown yet

A command that several claims have runs once. New rows are appended to copies of the stored ones in `--results`, a new
temporary folder by default. Times and their ratios are only compared on the same kind of device, losses and counts on
any. Benchmarks refuse a tree whose files differ from its commit.
"""

import argparse
import datetime
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.pages.claims import Claim, ClaimError, gather_claims, mark
from scripts.pages.rows import RESULTS, ROOT
from scripts.pages.stale import has_history


@dataclass
class Measurement:
    """A command that one or several claims were shown with, or would be.

    Attributes:
      command: as it is typed in the root of the repository.
      gpus: number of GPUs that it needs.
      stale: the code that it measured has changed since, see `scripts.pages.stale`.
      new: it has not been run for these claims yet.
      techniques: names of the claims.
    """

    command: str
    gpus: int
    stale: bool = False
    new: bool = False
    techniques: list[str] = field(default_factory=list)

    @property
    def by_hand(self) -> bool:
        """True if the command is more than a script of this checkout, such as one of an earlier commit."""
        return not self.command.startswith("python benchmarks/")


def measurements(claims: Iterable[Claim]) -> list[Measurement]:
    """Return what the claims were shown with, and what would show the rest of them, in their order."""
    found: dict[str, Measurement] = {}

    def add(claim: Claim, command: str, gpus: int) -> Measurement:
        one = found.setdefault(command, Measurement(command, gpus))
        if claim.technique not in one.techniques:
            one.techniques.append(claim.technique)
        return one

    for claim in claims:
        for result in claim.results:
            device = str(result.row.get("device", "cpu"))
            on_gpu = device != "cpu" and "compiled for" not in device
            one = add(claim, result.row["command"], result.row.get("devices", 1) if on_gpu else 0)
            one.stale |= has_history() and bool(mark(result))
        for command, gpus in claim.runs.items():
            add(claim, command, gpus).new = True
    return list(found.values())


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs of this machine; a process that asked jax would hold their memory."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def choose(
    known: Iterable[Measurement], words: Sequence[str], gpus: int, *, stale: bool, new: bool
) -> Iterator[Measurement]:
    """Yield the measurements of claims that have one of the words, for which there are enough GPUs.

    Args:
      known: measurements.
      words: parts of claims' names, in any case; all claims if there are none.
      gpus: number of GPUs here.
      stale: only those whose code has changed.
      new: only those that have not been run yet, which are left out otherwise.
    """
    for one in known:
        named = not words or any(word.lower() in name.lower() for word in words for name in one.techniques)
        if named and one.gpus <= gpus and one.new == new and (one.stale or not stale):
            yield one


def run(one: Measurement, seconds: float, results: Path) -> str:
    """Run a command, whose output is shown; return how it ended, in words.

    Args:
      one: what is measured.
      seconds: time after which the command and all its processes are ended.
      results: folder that gets its rows.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *shlex.split(one.command)[1:]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "BENCHMARK_RESULTS": str(results)},
        start_new_session=True,
    )
    try:
        status = process.wait(seconds)
        ended = "done" if status == 0 else f"failed with exit code {status}"
    except subprocess.TimeoutExpired:
        ended = "ended by its time limit"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"{ended} after {time.monotonic() - began:.0f} s"


def compare(before: Iterable[Claim], now: Iterable[Claim], since: str) -> Iterator[str]:
    """Yield a line for each claim with a new result, and one for each stored and new result.

    Args:
      before: claims with the stored results.
      now: the same claims with the new ones, too.
      since: time of the oldest new row.
    """
    for old, new in zip(before, now, strict=True):
        fresh = [result for result in new.results if str(result.row["date"]) >= since]
        if not fresh:
            continue
        yield f"{new.technique}: {new.claim} (stored verdict: {old.verdict})"
        for result in old.results:
            if any(result.row["command"] == one.row["command"] for one in fresh):
                yield f"  stored  {result.shown} ({result.row.get('device', 'cpu')}, {str(result.row['commit'])[:7]})"
        for result in fresh:
            reached = {True: ", reaches the goal", False: ", DOES NOT reach the goal", None: ""}[result.reached]
            yield f"  now     {result.shown} ({result.row.get('device', 'cpu')}){reached}"


def main(arguments: Sequence[str] | None = None) -> int:
    """List the measurements, or run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORDS", help="part of the name of a claim; all claims if none")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    parser.add_argument("--stale", action="store_true", help="only those whose code has changed since (needs git)")
    parser.add_argument("--open", action="store_true", help="those that would show what is not shown yet")
    parser.add_argument("--minutes", type=float, default=60, help="until no further command begins (%(default)g)")
    parser.add_argument("--each-minutes", type=float, default=20, help="limit of one command (%(default)g)")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where new rows go")
    args = parser.parse_args(arguments)
    gpus = sys.maxsize if args.list else count_gpus()
    try:
        before = gather_claims(RESULTS)
    except ClaimError as error:
        parser.error(str(error))
    chosen = list(choose(measurements(before), args.words, gpus, stale=args.stale, new=args.open))
    if args.list:
        print(*map(_line, chosen), sep="\n")
        return 0
    if not chosen:
        parser.error(
            f"this machine has {gpus} GPUs, and no claim has such a measurement for so many. `--list` prints all "
            "measurements and the number of GPUs that each needs."
        )
    results = args.results or Path(tempfile.mkdtemp(prefix="jaxstack-results-"))
    if results.resolve() != RESULTS:
        shutil.copytree(RESULTS, results, dirs_exist_ok=True)
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    failures = _run_all([one for one in chosen if not one.by_hand], results, args.minutes * 60, args.each_minutes * 60)
    print(*compare(before, gather_claims(results), since), f"rows: {results}", sep="\n")
    return min(failures, 1)


def _line(one: Measurement) -> str:
    """Return two lines on a measurement: its claims and what it needs, and its command."""
    needs = f"{one.gpus} GPU{'s' * (one.gpus > 1)}" if one.gpus else "CPU"
    notes = [needs, *["stale"] * one.stale, *["by hand"] * one.by_hand]
    return f"{'; '.join(one.techniques)} ({', '.join(notes)})\n    {one.command}"


def _run_all(chosen: Sequence[Measurement], results: Path, seconds: float, each: float) -> int:
    """Run commands one after the other until the time is over; return how many failed."""
    deadline = time.monotonic() + seconds
    failures = 0
    for place, one in enumerate(chosen):
        left = deadline - time.monotonic()
        if left <= 0:
            print(f"--- no time is left for {len(chosen) - place} of {len(chosen)} commands", flush=True)
            break
        print(f"--- {place + 1} of {len(chosen)}: {one.command}", flush=True)
        ended = run(one, min(each, left), results)
        failures += not ended.startswith("done")
        print(f"--- {ended}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
