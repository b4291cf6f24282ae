"""One process with all GPUs of a machine beside one process for each GPU, in turn: seconds of a training step.

    python benchmarks/distributed/processes.py --devices 2 model.num_layers=8
    JAX_PLATFORMS=cpu python benchmarks/distributed/processes.py --devices 2 --steps 8 --warm-up 2 \\
        model.preset=tiny model.remat=none parallel.simulate_devices=2 train.sequence_length=64 \\
        observe.fail_on_fallback=false

`python -m jaxstack.launch --processes 1` and `--processes N` run the same training with random data: FSDP over all
devices. `permutes` is how XLA compiled permutes, such as those of copy engines: COLLECTIVES_SYMMETRIC_MEMORY between
processes that have found out that they share a host, with NCCL 2.29. A run that hangs ends with the stacks of its
processes. `relative_speed` is the step of the one process, divided by that of several, of the same turn. Rows are
appended to benchmarks/results/processes.jsonl. Further arguments are the run's.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.launched import run_steps
from benchmarks.rows import append_rows, print_table, require_commit
from jaxstack.distributed.xla_options import nccl_version

COLUMNS = ("work", "variant", "processes", "permutes", "step_seconds", "median_step_seconds", "relative_speed")
NCCL = "several, NCCL's kernels"
VARIANTS = {"one": (), "several": (), NCCL: ("parallel.copy_engines=never",)}


def train(args: argparse.Namespace, folder: Path, variant: str) -> dict:
    """Return a row of `args.steps` steps."""
    processes = 1 if variant == "one" else args.devices
    settings = ["parallel.data=1", "parallel.fsdp=-1", f"train.global_batch_size={4 * args.devices}"]
    name = variant.replace(" ", "-").replace(",", "").replace("'", "")
    row = run_steps(
        args.config, folder, name, [*settings, *VARIANTS[variant], *args.overrides],
        processes=processes, steps=args.steps, warm_up=args.warm_up,
    )  # fmt: skip
    del row["metrics"]
    options = json.loads((folder / name / "environment.json").read_text())["ran"]["compiler_options"]
    row["permutes"] = options.get("xla_gpu_collective_permute_mode")
    row["nccl"] = ".".join(map(str, nccl_version()))
    return {**row, "work": " ".join([Path(args.config).stem, *args.overrides]), "variant": variant}


def main() -> None:
    """Measures the turns, keeps each row as it comes, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=positive(int), default=2, help="of the machine, each of a process")
    parser.add_argument("--config", default="configs/llama3-1b.yaml", help="of the run")
    parser.add_argument("--steps", type=positive(int), default=60, help="of each run")
    parser.add_argument("--warm-up", type=positive(int), default=10, help="steps that are not counted")
    parser.add_argument("--turns", type=positive(int), default=1, help="runs of each kind")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the run")
    args = parser.parse_intermixed_args()
    require_commit("processes")
    rows = []
    for _ in range(args.turns):
        one = None
        with tempfile.TemporaryDirectory() as folder:
            for variant in args.variants:
                row = train(args, Path(folder), variant)
                one = row["step_seconds"] if variant == "one" else one
                row["relative_speed"] = one / row["step_seconds"] if one else None
                rows.append(row)
                append_rows("processes", [{"implementation": "jaxstack", **row}])
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
