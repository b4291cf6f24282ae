"""Tune the block sizes of the attention kernels for this machine's GPU and write them into a table.

    python -m pallas_kernels.tune --shape 4,4096,32,8,128                 # causal, the default
    python -m pallas_kernels.tune --shape 1,16384,32,8,128 --window 1024
    python -m pallas_kernels.tune --shape 1,16384,32,8,128 --documents 8  # packed
    python -m pallas_kernels.tune --shape 4,4096,32,8,128 --minutes 2     # the limit is 10 otherwise
    python -m pallas_kernels.tune --shape 4,4096,32,8,128 --dry-run       # lists what would be tried

The table is the file that JAXSTACK_TILINGS names, else jaxstack/tilings.json in the user's cache directory; its rows
take precedence over those that the package ships. It is written whenever something faster is found, so that tuning may
be stopped at any time. A candidate that takes longer than a minute stops it.
"""

import argparse
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.tiling_tables import Row, load, merge, save, user_table_path
from pallas_kernels.attention.tilings import Tiling, blocks_of, choose_tiling, kernels
from pallas_kernels.attention.tuning import Limit, Measure, Stopwatch, Work, candidates, kernels_in_tuning_order, tune
from pallas_kernels.target import device_kind

_LONGEST_CANDIDATE = 60.0
"""Seconds; a candidate takes about three."""


def main(arguments: Sequence[str] | None = None, stopwatch: Callable[[Work], Measure] = Stopwatch) -> int:
    """Run the tuning command; return its exit status: 2 if the machine or an argument is wrong, 1 if no candidate ran.

    It is 0 otherwise.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shape", action="append", required=True, type=_shape, metavar="B,T,N,K,H", help="may be given several times"
    )
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", help="keys after the query are hidden (the default)")
    mask.add_argument("--full", action="store_true", help="no mask")
    parser.add_argument("--window", type=_positive, help="keys that a query sees, itself included")
    parser.add_argument("--documents", type=_positive, help="documents packed into each sequence")
    parser.add_argument("--kernel", action="append", choices=list(kernels()), help="only this one")
    parser.add_argument(
        "--minutes", type=_minutes, default=10.0, help="for all shapes and kernels together (default: %(default)g)"
    )
    parser.add_argument("--table", type=Path, help="another file to write")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates and end")
    options = parser.parse_args(arguments)
    mask_options = {"mask": Mask(not options.full, options.window), "documents": options.documents}
    works = [Work(*shape, **mask_options) for shape in options.shape]
    names = options.kernel or kernels_in_tuning_order()
    if options.dry_run:
        _list_candidates(names)
        return 0
    for work in works:
        # A stand-in for the stopwatch needs no GPU.
        reason = work.unsupported_reason() if stopwatch is Stopwatch else None
        if reason is not None:
            print(f"the kernels cannot be tuned for {work} here: Mosaic {reason}", file=sys.stderr)
            return 2
    try:
        return _tune(works, names, options.table or user_table_path(), options.minutes, stopwatch)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _tune(works: list[Work], names: list[str], path: Path, minutes: float, stopwatch: Callable[[Work], Measure]) -> int:
    device = device_kind().removeprefix("NVIDIA ")
    rows = load(path) if path.exists() else []
    save(path, rows)  # A path that cannot be written to is found out before minutes of measuring.
    limit = Limit(minutes, len(works) * len(names))
    status = 0
    for work in works:

        def save_row(kernel: str, blocks: dict[str, int | bool], measured: str, work: Work = work) -> None:
            nonlocal rows
            rows = merge(rows, [Row(device, kernel, work.head_dim, blocks, work.kind, work.length, measured)])
            save(path, rows)

        start = choose_tiling(work.head_dim, work.kind, work.length)
        tuned = tune(work, start, _watched(stopwatch(work)), names, limit, save_row, report=_print)
        print(f"{tuned} rows for {device} written to {path}")
        status = status if tuned == len(names) else 1
    return status


def _watched(measure: Measure) -> Measure:
    """Return `measure`, which times a kernel, with a time limit: a kernel that hangs ends the process."""

    def watched(kernel: str, tiling: Tiling) -> float:
        timer = threading.Timer(_LONGEST_CANDIDATE, _give_up, [f"{kernel} {blocks_of(tiling, kernel)}"])
        timer.daemon = True
        timer.start()
        try:
            return measure(kernel, tiling)
        finally:
            timer.cancel()

    return watched


def _give_up(candidate: str) -> None:
    message = f"{candidate} takes longer than {_LONGEST_CANDIDATE:g} seconds: the table holds what was found before it"
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def _list_candidates(names: list[str]) -> None:
    for kernel in names:
        found = candidates(kernel, Tiling())
        print(f"{kernel}: {len(found)} candidates")
        for tiling in found:
            print("  " + " ".join(f"{name} {value}" for name, value in blocks_of(tiling, kernel).items()))


def _print(line: str) -> None:
    print(line, flush=True)


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of minutes above 0, got {text!r}")
    return minutes


def _shape(text: str) -> tuple[int, int, int, int, int]:
    sizes = [_positive(size) for size in text.split(",")]
    if len(sizes) != 5 or sizes[2] % sizes[3]:
        raise argparse.ArgumentTypeError(
            f"must be batch,length,heads,kv_heads,head_dim with heads a multiple of kv_heads, got {text!r}"
        )
    batch, length, heads, kv_heads, head_dim = sizes
    return batch, length, heads, kv_heads, head_dim


if __name__ == "__main__":
    raise SystemExit(main())
