"""Cost of comparing the replicas of a train state (`resilience.checksum_every_steps`), and a test of its detection.

    python benchmarks/reliability/replica_check.py --config configs/gpt2-124m.yaml parallel.data=-1  # on all devices
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 \\
        python benchmarks/reliability/replica_check.py model.preset=tiny parallel.data=-1

One bit of one device's replica of each of `--flips` leaves is flipped in turn; the check must name leaf and device.
Further arguments are the run's; its data is synthetic.
"""

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from benchmarks.rows import append_rows, print_table
from benchmarks.timing import median_seconds
from jaxstack.checkpoint.leaves import name_leaves
from jaxstack.data.loader import open_data
from jaxstack.resilience.replica_check import ReplicaCheck
from jaxstack.run.build import make_trainer, resolve_model
from jaxstack.run.setting import with_training_layout
from jaxstack.run_config import load_config
from jaxstack.trainer import Trainer
from tests.resilience.bits import flip_copy

COLUMNS = ("work", "devices", "leaves", "bytes_per_device", "milliseconds", "gigabytes_per_second", "flips_named")


def open_trainer(path: str, overrides: list[str]) -> Trainer:
    """Return a run's trainer on synthetic data."""
    config = load_config(path, [*overrides, "data.sources=[{path: synthetic}]"])
    config = with_training_layout(config, jax.device_count())
    data = open_data(config.data, sequence_length=config.train.sequence_length, seed=0)
    model = resolve_model(config.model, data.tokenizer.vocab_size)
    return make_trainer(config.model_copy(update={"model": model}), data)


def count_named(check: ReplicaCheck, leaves: dict[str, jax.Array], flips: int) -> int:
    """Count how many of `flips` single bit flips are reported with the right leaf and device only."""
    chance = random.Random(0)
    named = 0
    weights = [name for name in check.names if leaves[name].ndim and leaves[name].dtype == jax.numpy.float32]
    for name in chance.sample(weights, min(flips, len(weights))):
        device = chance.choice(jax.local_devices()).id
        bits = 8 * leaves[name].addressable_shards[0].data.nbytes
        found = check.find({**leaves, name: flip_copy(leaves[name], device, chance.randrange(bits))})
        named += len(found) == 1 and found[0].startswith(f"{name} differs") and f"device {device} " in found[0]
    return named


def main() -> None:
    """Measures, prints a table and appends the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/gpt2-124m.yaml", help="of the run")
    parser.add_argument("--flips", type=int, default=8, help="bits to change, each in a leaf of its own")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the run")
    args = parser.parse_intermixed_args()
    trainer = open_trainer(args.config, args.overrides)
    leaves = name_leaves(trainer.state)[0]
    began = time.perf_counter()
    check = ReplicaCheck(leaves)
    assert check.find(leaves) == []
    first = time.perf_counter() - began
    seconds = median_seconds(lambda: check.find(leaves), lambda found: found)
    size = sum(leaves[name].addressable_shards[0].data.nbytes for name in check.names)
    flips = min(args.flips, len(check.names))
    row = {
        "work": f"replica check {Path(args.config).stem} {' '.join(args.overrides)}".strip(),
        "implementation": "jaxstack",
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "leaves": len(check.names),
        "bytes_per_device": size,
        "milliseconds": 1e3 * seconds,
        "gigabytes_per_second": size / seconds / 1e9,
        "first_call_seconds": first,
        "flips_named": f"{count_named(check, leaves, flips)} of {flips}",
    }
    print_table([row], COLUMNS)
    append_rows("replica_check", [row])


if __name__ == "__main__":
    main()
