"""Time and memory of each rematerialisation policy, the two that offload to host memory included.

    python benchmarks/training/remat.py                        # llama3-1b on one GPU, about ten minutes
    python benchmarks/training/remat.py --policies none offload --set train.sequence_length=16384
    python benchmarks/training/remat.py --tiny                 # tiny sizes on a simulated CPU device

All train llama3-1b with scanned layers on the same random tokens. `slowdown` is the time of a step by that of `none`,
where both are of one run. Each policy runs in a process of its own; its row is appended to
benchmarks/results/remat.jsonl when it ends.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table, require_commit
from benchmarks.steps import COLUMNS, run_worker, tiny
from benchmarks.sustained import SECONDS
from benchmarks.training.train_step import SCANNED, WORKS

WORK = "llama3-1b bf16"
POLICIES = ("none", "save_dots", "save_attention", "full", "save_attention_offload", "offload")


def main() -> None:
    """Measure each policy in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES, help="values of model.remat")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="for every policy")
    parser.add_argument("--seconds", type=positive(float), default=SECONDS, help="length after compilation")
    parser.add_argument("--timeout", type=positive(float), default=400, help="time limit of a measurement, in seconds")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a simulated CPU device; rows go to tiny/")
    args = parser.parse_args()
    script = "tiny/remat" if args.tiny else "remat"
    require_commit(script)
    work = tiny(WORKS[WORK]) if args.tiny else WORKS[WORK]
    rows: list[dict[str, Any]] = []
    plain: float | None = None
    for policy in args.policies:
        overrides = [*work, SCANNED, f"model.remat={policy}", *args.set]
        row = run_worker(f"{WORK}, {policy}", "jaxstack", overrides, args.timeout, None, args.seconds)
        if not row:
            continue
        plain = row["milliseconds"] if policy == "none" else plain
        if plain:
            row["slowdown"] = row["milliseconds"] / plain
        rows.append({"work": WORK, "variant": ", ".join([policy, *args.set]), **row})
        append_rows(script, rows[-1:])
    if not rows:
        raise SystemExit(1)
    print_table(rows, [*COLUMNS, "slowdown"])


if __name__ == "__main__":
    main()
