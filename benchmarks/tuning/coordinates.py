"""The coordinate check of muP: mean magnitudes of activations over the width of a model, after five steps.

    python benchmarks/tuning/coordinates.py
    python benchmarks/tuning/coordinates.py --optimizer soap --widths 64,128,256

The check is `python -m jaxstack.tune coordinates` on the bytes of the quickstart's text, with the model of
benchmarks/tuning/transfer.py. A row has the magnitudes of one parametrization. `python -m scripts.pages`
shows the rows in docs/optimizers.md.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit

MODEL = "model={hidden_size: 64, num_layers: 2, num_heads: 2, intermediate_size: 192, initialization: fan_in}"
RUN = (MODEL, "data.tokenizer.name=byte", "train.global_batch_size=4", "train.sequence_length=32")


def measure(name: str, rate: float, widths: list[int], steps: int) -> list[dict[str, Any]]:
    """Return the row of each parametrization."""
    import jax

    from jaxstack.run_config import load_config
    from jaxstack.tune.coordinate_check import PARAMETRIZATIONS, QUANTITIES, check_coordinates

    chosen = (f"optimizer.name={name}", f"optimizer.learning_rate={rate}", "parallel.simulate_devices=1")
    began = time.process_time()
    found = check_coordinates(load_config(None, [*RUN, *chosen]), widths, steps)
    common = {
        "work": f"coordinate check, {name}",
        "implementation": "jaxstack",
        "device": jax.devices()[0].device_kind,
        "devices": 1,
        "optimizer": name,
        "rate": rate,
        "steps": steps,
        "widths": list(found.widths),
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    return [
        {**common, "variant": kind, "parametrization": kind, **{q: list(found.values[kind, q]) for q in QUANTITIES}}
        for kind in PARAMETRIZATIONS
    ]


def main() -> None:
    """Measure, print and store the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="64,128,256,512", help="hidden sizes, multiples of 64 (64,128,256,512)")
    parser.add_argument("--steps", type=positive(int), default=5, help="steps before the measurement (5)")
    parser.add_argument("--optimizer", default="adamw", help="optimizer.name (adamw)")
    parser.add_argument("--rate", type=positive(float), default=2.0**-8, help="learning rate (2^-8)")
    parser.add_argument("--tiny", action="store_true", help="one step at widths 64 and 128, rows in tiny/")
    args = parser.parse_args()
    script = f"{SCRATCH}coordinates" if args.tiny else "coordinates"
    require_commit(script)
    widths = [64, 128] if args.tiny else [int(width) for width in args.widths.split(",")]
    rows = measure(args.optimizer, args.rate, widths, 1 if args.tiny else args.steps)
    append_rows(script, rows)
    print_table(rows, ["parametrization", "embedding", "residual", "logits", "cpu_seconds"])


if __name__ == "__main__":
    main()
