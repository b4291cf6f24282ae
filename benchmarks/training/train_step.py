"""Sustained training speed, ours and the peers in turn in one job: tokens/s, TFLOP/s, clock, power, memory.

    python benchmarks/training/train_step.py "gpt2-124m bf16" "llama3-1b bf16"
    python benchmarks/training/train_step.py "llama3-1b bf16" --variants unrolled --peers torch torchtitan maxtext
    python benchmarks/training/train_step.py "llama3-8b fsdp2 bf16" --variants "unrolled, gathered once" --together
    python benchmarks/training/train_step.py "llama3-8b lora bf16" --variants unrolled "unrolled, base in nf4"
    python benchmarks/training/train_step.py "gpt2-124m bf16" --tiny  # a tiny model on simulated CPU devices

Every measurement runs in a process of its own, so that no framework holds memory while another runs, and lasts
`--seconds` (30) after compilation. GPUs lower their clock under load, so `tokens_per_second_per_device`, `sm_mhz`,
`watts` and `joules_per_step` are those of the second half; `start_tokens_per_second_per_device` is that of the first
four seconds. With `--together` all compile at the same time and are measured one by one (benchmarks/turns.py).
Tokens are random, weights float32 with bfloat16 compute, AdamW, clipping by the global norm. Peers are measured where
they are installed: a compiled PyTorch GPT or Llama of benchmarks/peers on one device in bfloat16, torchtitan (0.2.2,
with torchao 0.16 for FP8) and MaxText. A message names those that are not installed. A base for adapters is random,
float32 or packed by a recipe; TFLOP/s leave out the gradients of its weights, which are not computed.
"""

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table, require_commit
from benchmarks.steps import COLUMNS, run_worker, tiny
from benchmarks.sustained import SECONDS
from benchmarks.turns import place, run_together, turns


def tensor_work(devices: int) -> tuple[str, list[str]]:
    """Return name and configuration of llama3-8b with tensor and sequence parallelism, 4096 tokens a device."""
    return f"llama3-8b tensor{devices} bf16", [
        "model.preset=llama3-8b", f"parallel.tensor={devices}", "parallel.sequence=true", "model.remat=none",
        f"train.global_batch_size={max(1, devices // 2)}", "train.sequence_length=8192",
    ]  # fmt: skip


def context_work(devices: int, tokens: int = 16384, layers: int | None = None) -> tuple[str, list[str]]:
    """Return name and configuration of llama3-8b, or its first `layers`, on one sequence of `tokens` a device."""
    cut = [] if layers is None else [f"model.num_layers={layers}"]
    return f"llama3-8b{f' of {layers} layers' * bool(cut)} context{devices} {tokens * devices} bf16", [
        "model.preset=llama3-8b", f"parallel.context={devices}", "train.global_batch_size=1",
        f"train.sequence_length={tokens * devices}", f"model.max_position_embeddings={tokens * devices}", *cut,
    ]  # fmt: skip


def fsdp_work(devices: int, *settings: str, rows: int = 1) -> list[str]:
    """Return the configuration of llama3-8b with FSDP, `rows` sequences of 8192 tokens a device."""
    return [
        "model.preset=llama3-8b", f"parallel.fsdp={devices}", f"train.global_batch_size={rows * devices}",
        "train.sequence_length=8192", *settings,
    ]  # fmt: skip


WORKS = dict([tensor_work(4), context_work(4), context_work(2, 32768)]) | {
    "gpt2-124m bf16": ["model.preset=gpt2-124m", "train.global_batch_size=64", "train.sequence_length=1024"],
    "gpt2-350m bf16": ["model.preset=gpt2-350m", "train.global_batch_size=32", "train.sequence_length=1024"],
    "llama3-1b bf16": ["model.preset=llama3-1b", "train.global_batch_size=4", "train.sequence_length=8192"],
    "llama3-1b fp8": [
        "model.preset=llama3-1b", "train.global_batch_size=4", "train.sequence_length=8192", "precision.fp8=current",
    ],
    "llama3-8b fsdp4 bf16": fsdp_work(4),
    "llama3-8b fsdp4 fp8": fsdp_work(4, "precision.fp8=current", rows=2),
    "llama3-8b fsdp2 bf16": fsdp_work(2),
    "llama3-8b fsdp2 fp8": fsdp_work(2, "precision.fp8=current"),
    "llama3-8b lora bf16": fsdp_work(1, "adapters.rules=[{path: attention|mlp, rank: 16, alpha: 32}]"),
    "qwen3-30b-a3b of 6 layers bf16": [
        "model.preset=qwen3-30b-a3b", "model.num_layers=6", "train.global_batch_size=4", "train.sequence_length=4096",
    ],
    "qwen3-30b-a3b of 4 layers bf16": [
        "model.preset=qwen3-30b-a3b", "model.num_layers=4", "train.global_batch_size=4", "train.sequence_length=4096",
    ],
    "qwen3-30b-a3b of 4 layers fp8": [
        "model.preset=qwen3-30b-a3b", "model.num_layers=4", "train.global_batch_size=4", "train.sequence_length=4096",
        "precision.fp8=current",
    ],
    "qwen3-30b-a3b of 6 layers expert2 bf16": [
        "model.preset=qwen3-30b-a3b", "model.num_layers=6", "parallel.expert=2", "train.global_batch_size=8",
        "train.sequence_length=4096",
    ],
    "qwen3-30b-a3b of 6 layers fp8": [
        "model.preset=qwen3-30b-a3b", "model.num_layers=6", "train.global_batch_size=4", "train.sequence_length=4096",
        "precision.fp8=current",
    ],
    "gpt-oss-20b of 4 layers bf16": [
        "model.preset=gpt-oss-20b", "model.num_layers=4", "train.global_batch_size=4", "train.sequence_length=4096",
    ],
    "gpt-oss-20b of 2 layers bf16": [
        "model.preset=gpt-oss-20b", "model.num_layers=2", "train.global_batch_size=4", "train.sequence_length=4096",
    ],
    "gpt-oss-20b of 2 layers fp8": [
        "model.preset=gpt-oss-20b", "model.num_layers=2", "train.global_batch_size=4", "train.sequence_length=4096",
        "precision.fp8=current",
    ],
    "deepseek-v2-lite of 4 layers bf16": [
        "model.preset=deepseek-v2-lite", "model.num_layers=4", "train.global_batch_size=4",
        "train.sequence_length=4096",
    ],
    "gpt-oss-20b of 4 layers fp8": [
        "model.preset=gpt-oss-20b", "model.num_layers=4", "train.global_batch_size=4", "train.sequence_length=4096",
        "precision.fp8=current",
    ],
    "deepseek-v2-lite of 4 layers fp8": [
        "model.preset=deepseek-v2-lite", "model.num_layers=4", "train.global_batch_size=4",
        "train.sequence_length=4096", "precision.fp8=current",
    ],
    "qwen3-next-80b-a3b of 4 layers, 128 experts bf16": [
        "model.preset=qwen3-next-80b-a3b", "model.num_layers=4", "model.moe.num_experts=128",
        "train.global_batch_size=4", "train.sequence_length=4096",
    ],
    "qwen3-30b-a3b of 24 layers expert4 bf16": [
        "model.preset=qwen3-30b-a3b", "model.num_layers=24", "parallel.expert=4", "train.global_batch_size=16",
        "train.sequence_length=4096",
    ],
}  # fmt: skip
UNROLLED = "model.scan_layers=false"
SCANNED = "model.scan_layers=true"
BFLOAT16_SUMS = ("precision.reduce=bfloat16", "parallel.copy_engines=never")
"""Reduction by NCCL in bfloat16. The copy engines reduce in float32 at the same cost."""
ALL_LAYERS = "precision.fp8_rules=[{path: _proj, fp8: true}]"
WHOLE = ("parallel.fsdp=1", "parallel.data=-1", "parallel.zero=2")
"""In place of `fsdp`: each device all-gathers the weights once a step and keeps a bfloat16 copy until its end."""
VARIANTS = {
    "unrolled": [UNROLLED],
    "scanned": [SCANNED],
    "unrolled, no overlap": [UNROLLED, "parallel.overlap=never"],
    "scanned, no overlap": [SCANNED, "parallel.overlap=never"],
    "scanned, full remat": [SCANNED, "model.remat=full"],
    "scanned, save_attention": [SCANNED, "model.remat=save_attention"],
    "unrolled, save_attention": [UNROLLED, "model.remat=save_attention"],
    "unrolled, sums in bfloat16": [UNROLLED, *BFLOAT16_SUMS],
    "scanned, sums in bfloat16": [SCANNED, *BFLOAT16_SUMS],
    "prefetched, sums in bfloat16": [SCANNED, "parallel.prefetch=true", *BFLOAT16_SUMS],
    "unrolled, all layers in FP8": [UNROLLED, ALL_LAYERS],
    "unrolled, all layers in FP8, delayed scales": [UNROLLED, ALL_LAYERS, "precision.fp8=delayed"],
    "unrolled, in bfloat16": [UNROLLED, "precision.fp8=none"],
    "unrolled, all layers in FP8, sums in bfloat16": [UNROLLED, ALL_LAYERS, *BFLOAT16_SUMS],
    "unrolled, gathered once": [UNROLLED, *WHOLE],
    "unrolled, gathered once, all layers in FP8": [UNROLLED, *WHOLE, ALL_LAYERS],
    "unrolled, gathered once, sums in bfloat16": [UNROLLED, *WHOLE, *BFLOAT16_SUMS],
    "unrolled, base in nf4": [UNROLLED, "packed_base=nf4"],
    "unrolled, base in int8": [UNROLLED, "packed_base=int8"],
    "scanned, clustered": [SCANNED, "compression.rules=[{path: attention|mlp, method: cluster}]"],
    "unrolled, full remat": [UNROLLED, "model.remat=full"],
    "unrolled, full remat, base in nf4": [UNROLLED, "model.remat=full", "packed_base=nf4"],
}
"""Ways to run the same work; documentation shows the fastest one."""


PEERS = {
    "torch": ("torch", lambda work: work in ("gpt2-124m bf16", "gpt2-350m bf16", "llama3-1b bf16")),
    "torchtitan": (
        "torchtitan",
        lambda work: work.startswith(("llama3-", "qwen3-30b-", "deepseek-", "gpt-oss-")) and "lora" not in work,
    ),
    "maxtext": ("maxtext", lambda work: work.startswith(("llama3-1b", "llama3-8b fsdp4"))),
}
"""Peer -> the package that it needs, and a predicate of the works that it covers."""


def peers_of(work: str, wanted: list[str]) -> list[str]:
    """Return the wanted peers that cover the work and are installed; print which are not installed."""
    covering = {name: PEERS[name][0] for name in wanted if PEERS[name][1](work)}
    found = [name for name, package in covering.items() if importlib.util.find_spec(package)]
    missing = [package for name, package in covering.items() if name not in found]
    if missing:
        print(f"{work}: no rows of {', '.join(missing)}, which are not installed", flush=True)
    return found


def parse_works(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; an unknown work ends the program."""
    args = parser.parse_args()
    unknown = [work for work in args.works if work not in WORKS]
    if unknown:
        parser.error(f"unknown works: {', '.join(unknown)}; known: {', '.join(WORKS)}")
    return args


def measure(
    args: argparse.Namespace, work: str, implementation: str, variant: str | None, environment: Mapping[str, str] | None
) -> dict[str, Any] | None:
    """Return the row of one measurement, or None if it fails."""
    ours = [*VARIANTS[variant], *args.set] if variant else []
    extra = [*args.set, *filter(None, [os.environ.get("XLA_FLAGS")])]
    named = ", ".join([variant, *extra]) if variant else None
    title = f"{work}, {named or implementation}"
    overrides = [*(tiny(WORKS[work]) if args.tiny else WORKS[work]), *ours]
    row = run_worker(title, implementation, overrides, args.timeout, environment, args.seconds)
    return row and {"work": work, "variant": named, **row}


def measure_all(args: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Yield the row of each work, implementation and variant, or None if its measurement fails."""
    calls = []
    for work in args.works or list(WORKS):
        ways: list[tuple[str, str | None]] = [("jaxstack", variant) for variant in args.variants]
        ways += [(peer, None) for peer in peers_of(work, args.peers)]
        calls += [functools.partial(measure, args, work, *way) for way in ways * args.rounds]
    if not args.together:
        yield from (call(None) for call in calls)
        return
    with turns() as environment:
        numbered = [functools.partial(call, environment | place(number)) for number, call in enumerate(calls)]
        yield from (row for _, row in run_together(numbered))


def main() -> None:
    """Measure each work by each implementation in turn; a row is appended as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", help=f"works to measure (default: all): {', '.join(WORKS)}")
    parser.add_argument("--rounds", type=positive(int), default=1, help="number of turns of each implementation")
    parser.add_argument("--variants", nargs="+", default=["unrolled", "scanned"], choices=VARIANTS, metavar="VARIANT",
        help=f"ways to run ours: {'; '.join(VARIANTS)}")  # fmt: skip
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value",
        help="overrides for ours: configuration (section.key=value) or XLA option (xla_...=value)")  # fmt: skip
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="peers measured in the same run")
    parser.add_argument("--seconds", type=positive(float), default=SECONDS, help="length after compilation")
    parser.add_argument("--timeout", type=positive(float), default=400, help="time limit of a measurement, in seconds")
    parser.add_argument("--together", action="store_true", help="compile all at the same time, then measure one by one")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on simulated CPU devices; rows go to tiny/")
    args = parse_works(parser)
    script = "tiny/train_step" if args.tiny else "train_step"
    require_commit(script)
    rows = []
    for row in filter(None, measure_all(args)):
        rows.append(row)
        append_rows(script, [row])
    if not rows:
        raise SystemExit(1)
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
