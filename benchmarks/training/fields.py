"""Trains the examples of other fields in docs/examples/fields/ and stores what they reach.

    python benchmarks/training/fields.py                        # all; 16 seconds to 7 minutes each on two CPU cores
    python benchmarks/training/fields.py gaunt_products         # one of them
    python benchmarks/training/fields.py --steps 5              # a few steps each; rows go to tiny/

`main(steps=..., seed=...)` of an example returns a dict with the keys of `KEYS`. A row for each example is appended to
benchmarks/results/fields.jsonl, from which `python -m scripts.pages fields` makes the table and the pictures of
docs/fields.md.
"""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table, require_commit

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples" / "fields"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
KEYS: Mapping[str, type | tuple[type, ...]] = {
    "claim": str,  # the paper's claim in one sentence
    "paper": str,  # its arXiv number, such as "arXiv:2210.00000"
    "measure": str,  # the quantity in the three numbers, with its unit and the name of the baseline
    "ours": float,
    "baseline": float,
    "published": (float, type(None)),  # the paper's number; None if it does not give this quantity
    "checks": dict,  # criterion, with its bound, in words -> True if it is met
    "numbers": dict,  # further measured numbers: name -> float
    "picture": list,  # panels of curves: {"title": str, "x_label": str, "curves": {name: [(x, y), ...]}}
}
"""Key of the dict that `main` of every example returns -> its type."""
OPTIONAL: Mapping[str, type] = {"bound": str}  # what bounds the result, in words
"""Key that the dict may have -> its type."""


def load_example(name: str) -> Any:
    """Return the module of an example."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up the module of their class
    spec.loader.exec_module(module)
    return module


def check_result(found: Mapping[str, Any]) -> None:
    """Raise TypeError if the result of an example is not of the common shape."""
    if set(found) - set(OPTIONAL) != set(KEYS):
        raise TypeError(f"the keys are {sorted(found)}, and should be {sorted(KEYS)}")
    for key, kind in {**KEYS, **OPTIONAL}.items():
        if key in found and not isinstance(found[key], kind):
            raise TypeError(f"{key} is {found[key]!r}, and should be of type {kind}")
    if not found["checks"] or not all(isinstance(met, bool) for met in found["checks"].values()):
        raise TypeError(f"checks should map criteria to True or False; found {found['checks']}")
    for panel in found["picture"]:
        if set(panel) != {"title", "x_label", "curves"}:
            raise TypeError(f"a panel has a title, an x_label and curves; found {sorted(panel)}")


def measure(name: str, steps: int | None, seed: int) -> dict[str, Any]:
    """Return the row of one example."""
    import jax

    load = os.getloadavg()[0]
    began = time.perf_counter()
    found = load_example(name).main(seed=seed, **({} if steps is None else {"steps": steps}))
    seconds = time.perf_counter() - began
    check_result(found)
    device = jax.devices()[0].device_kind
    return {"work": name, "implementation": "jaxstack", "device": device, "devices": 1, "cores": os.cpu_count(),
            "load": load, "seed": seed, "seconds": seconds, **found}  # fmt: skip


def main() -> None:
    """Run the examples that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which examples: {', '.join(NAMES)}; default: all")
    parser.add_argument("--steps", type=positive(int), help="training steps, in place of each example's own number")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and weights")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(NAMES)):
        parser.error(f"there is no example {', '.join(unknown)}; there are {', '.join(NAMES)}")
    script = "fields" if args.steps is None else "tiny/fields"
    require_commit(script)
    rows = []
    for name in args.names or NAMES:
        rows.append(measure(name, args.steps, args.seed))
        append_rows(script, rows[-1:])
    print_table(rows, ("work", "ours", "baseline", "published", "seconds"))
    for row in rows:
        for criterion, met in row["checks"].items():
            print(f"{row['work']}: {'met' if met else 'MISSED'}: {criterion}")


if __name__ == "__main__":
    main()
