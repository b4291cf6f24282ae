"""Longest sequences in equal memory: tensor parallelism against context parallelism, by the compiler's memory.

    python benchmarks/distributed/sequence_length.py
    python benchmarks/distributed/sequence_length.py --budget-tokens 32768 --only "tensor" "context, ring"
    python benchmarks/distributed/sequence_length.py --tiny        # two layers, short sequences

Needs no GPU: the train step of a model of 32 layers, 1024 wide, with `model.remat: full` and one sequence per batch, is
compiled for eight H200s. The budget is what tensor parallelism needs for `--budget-tokens`. Each layout is compiled at
two lengths; the step's bytes, which are linear in the length, give the longest length within the budget, and that
length is compiled to confirm it. `length_ratio` is relative to tensor parallelism (Li et al. 2021, arXiv:2105.13120,
report about 3 for a ring, and more with Linformer's projection). Rows are appended to
benchmarks/results/sequence_length.jsonl.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table, require_commit

DEVICES = 8
STEP = 4096
"""Lengths are multiples of this: two chunks per device, each of whole blocks of 256."""
MODEL = (
    "model.hidden_size=1024", "model.num_heads=16", "model.intermediate_size=2752", "model.vocab_size=8192",
    "model.remat=full", "train.global_batch_size=1", "data.packing=false", "precision.compute=bfloat16",
)  # fmt: skip
BASE = "tensor"
LAYOUTS = {
    BASE: (f"parallel.tensor={DEVICES}",),
    "tensor, sequence": (f"parallel.tensor={DEVICES}", "parallel.sequence=true"),
    "context, ring": (f"parallel.context={DEVICES}", "parallel.context_method=ring"),
    "context, projected": (f"parallel.context={DEVICES}", "model.attention={name: projected}"),
}
COLUMNS = ("work", "variant", "longest_tokens", "length_ratio", "bytes_per_token", "peak_memory_bytes")


def step_bytes(variant: str, layers: int, length: int) -> int:
    """Return the bytes of a device for everything in a step on one sequence of this length."""
    from jaxstack.plan.rehearsal import rehearse
    from jaxstack.run_config import load_config

    sizes = [f"model.num_layers={layers}", f"train.sequence_length={length}", f"model.max_position_embeddings={length}"]
    return rehearse(load_config(None, [*MODEL, *LAYOUTS[variant], *sizes]), DEVICES)["predicted_bytes"]


def longest(bytes_at: Callable[[int], int], budget: int, known: Mapping[int, int]) -> tuple[int, int, float]:
    """Return the longest length within the budget, its bytes, and the bytes of a further token.

    Args:
        bytes_at: length -> bytes; linear but for what the compiler rounds.
        budget: bytes.
        known: two lengths and their bytes.
    """
    (short, low), (long, high) = sorted(known.items())
    per_token = (high - low) / (long - short)
    length = int(long + (budget - high) / per_token) // STEP * STEP
    found = known[length] if length in known else bytes_at(length)
    while found > budget and length > STEP:
        length -= STEP
        found = bytes_at(length)
    return length, found, per_token


def main() -> None:
    """Compile every layout, and compare the lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-tokens", type=positive(int), default=65536,
        help="the budget is what tensor parallelism needs for a sequence of so many tokens")  # fmt: skip
    parser.add_argument("--layers", type=positive(int), default=32, help="layers of the model")
    parser.add_argument("--only", nargs="+", default=list(LAYOUTS), choices=LAYOUTS, metavar="LAYOUT",
        help=f"layouts to compile: {'; '.join(LAYOUTS)}")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="two layers, 8192 tokens; rows go to tiny/")
    args = parser.parse_args()
    script = "tiny/sequence_length" if args.tiny else "sequence_length"
    require_commit(script)
    layers, tokens = (2, 2 * STEP) if args.tiny else (args.layers, args.budget_tokens // STEP * STEP)
    budget = step_bytes(BASE, layers, tokens)
    print(f"budget: {budget / 2**30:.2f} GiB a device, tensor parallelism at {tokens} tokens", flush=True)
    rows: list[dict[str, Any]] = []
    for variant in args.only:
        if variant == BASE:
            half = tokens // 2
            length = tokens
            used = budget
            per_token = (budget - step_bytes(BASE, layers, half)) / (tokens - half)
        else:
            known = {length: step_bytes(variant, layers, length) for length in (tokens, 3 * tokens)}
            length, used, per_token = longest(lambda n, v=variant: step_bytes(v, layers, n), budget, known)
        rows.append({
            "work": f"longest sequence, {layers} layers of 1024", "implementation": "jaxstack", "variant": variant,
            "device": "NVIDIA H200 (compiled for)", "devices": DEVICES, "longest_tokens": length,
            "length_ratio": length / tokens, "bytes_per_token": per_token, "peak_memory_bytes": used,
            "budget_bytes": budget,
        })  # fmt: skip
        append_rows(script, rows[-1:])
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
