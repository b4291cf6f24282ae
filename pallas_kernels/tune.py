"""Tunes the block sizes of the attention kernels for this machine's GPU and writes them into a table.

    python -m pallas_kernels.tune --shape 4,4096,32,8,128                 # causal, the default
    python -m pallas_kernels.tune --shape 1,16384,32,8,128 --window 1024
    python -m pallas_kernels.tune --shape 1,16384,32,8,128 --documents 8  # packed
    python -m pallas_kernels.tune --shape 4,4096,32,8,128 --dry-run       # lists what would be tried

The table is the file that JAXSTACK_TILINGS names, else jaxstack/tilings.json in the user's cache directory; its rows
stand before those that the package ships.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.tiling_tables import load, merge, save, user_table
from pallas_kernels.attention.tilings import Tiling, blocks_of, choose_tiling, kernels
from pallas_kernels.attention.tuning import Measure, Stopwatch, Work, candidates, kernel_order, tune
from pallas_kernels.target import device_kind


def main(arguments: Sequence[str] | None = None, stopwatch: Callable[[Work], Measure] = Stopwatch) -> int:
    """Returns the exit status: 0, 2 where the machine or an argument is wrong, 1 where no candidate ran."""
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
    parser.add_argument("--table", type=Path, help="another file to write")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates and end")
    options = parser.parse_args(arguments)
    mask_options = {"mask": Mask(not options.full, options.window), "documents": options.documents}
    works = [Work(*shape, **mask_options) for shape in options.shape]
    names = options.kernel or kernel_order()
    if options.dry_run:
        _list_candidates(names)
        return 0
    for work in works:
        # A stand-in for the stopwatch needs no GPU.
        reason = work.refusal() if stopwatch is Stopwatch else None
        if reason is not None:
            print(f"the kernels cannot be tuned for {work} here: Mosaic {reason}", file=sys.stderr)
            return 2
    try:
        return _tune(works, names, options.table, stopwatch)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _tune(works: list[Work], names: list[str], table: Path | None, stopwatch: Callable[[Work], Measure]) -> int:
    path, device = table or user_table(), device_kind().removeprefix("NVIDIA ")
    old = load(path) if path.exists() else []
    save(path, old)  # a place that cannot be written to is found out before minutes of measuring
    status = 0
    for work in works:
        start = choose_tiling(work.head_dim, work.kind, work.length)
        found = tune(work, device, start, stopwatch(work), names, report=_print)
        old = merge(old, found)
        save(path, old)
        print(f"{len(found)} rows for {device} written to {path}")
        status = status if len(found) == len(names) else 1
    return status


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
