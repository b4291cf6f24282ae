"""Configurations trained as they are shipped, by the command that a user types: held-out loss and seconds.

    python benchmarks/training/shipped.py                      # those for two CPU cores: about a quarter of an hour
    python benchmarks/training/shipped.py configs/tiny-moe.yaml

Runs go to a temporary folder; nothing else of a configuration is changed. `seconds` are those of the whole command,
with compilation, evaluation and report, beside whatever else the machine does. Rows are appended to
benchmarks/results/shipped.jsonl.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.rows import append_rows, print_table, require_commit
from benchmarks.trained import train_run

SCRIPT = "shipped"
CONFIGS = ("configs/tiny-moe.yaml", "configs/stdlib-10min.yaml")
COLUMNS = ("work", "steps", "tokens", "eval_loss", "eval_bits_per_byte", "seconds")


def train(config: str, folder: Path) -> dict:
    """Train a configuration; return its row."""
    began = time.perf_counter()
    run = train_run(config, folder)
    seconds = time.perf_counter() - began
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict = {}
    for line in lines:
        found |= json.loads(line)
    return {
        "work": config, "implementation": "jaxstack", "device": "cpu", "cores": os.cpu_count(), "steps": found["step"],
        "tokens": found["tokens"], "eval_loss": found["eval_loss"],
        "eval_bits_per_byte": found["eval_bits_per_byte"], "seconds": seconds,
    }  # fmt: skip


def main() -> None:
    """Trains each configuration, and keeps its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", default=list(CONFIGS), metavar="FILE", help="configurations for a CPU")
    args = parser.parse_args()
    require_commit(SCRIPT)
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows = []
    for config in args.configs:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(train(config, Path(folder)))
        append_rows(SCRIPT, [rows[-1]])
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
