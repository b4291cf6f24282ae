"""Training steps on a CPU at the shape of nanoGPT's CPU example, ours and PyTorch's in turn.

    python benchmarks/training/cpu_nanogpt.py --rounds 5
    python benchmarks/training/cpu_nanogpt.py --cores 1

4 layers, 4 heads, 128 wide, block 64, batch 12, vocabulary 65, float32, no biases, AdamW, clipping at 1. Every
measurement runs in a process of its own, one after the other, so that neither's threads disturb the other. PyTorch runs
eagerly, as that example does; `--compiled` adds torch.compile. The table gives the median over rounds of each round's
median step.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

BATCH = 12
LENGTH = 64
VOCABULARY = 65
WARMUP = 20
STEPS = 100
WORK = "nanogpt cpu float32"
OVERRIDES = [
    "model.preset=gpt2-124m", "model.num_layers=4", "model.num_heads=4", "model.hidden_size=128",
    "model.intermediate_size=512", f"model.vocab_size={VOCABULARY}", f"model.max_position_embeddings={LENGTH}",
    "model.hidden_act=gelu", "model.qkv_bias=false", "model.output_bias=false", "model.mlp_bias=false",
    "model.scan_layers=false", f"train.global_batch_size={BATCH}", f"train.sequence_length={LENGTH}",
    "optimizer.learning_rate=1e-3", "optimizer.b2=0.99", "schedule.name=constant",
]  # fmt: skip


def random_batches():
    """Endless (tokens, labels) int32 [BATCH, LENGTH] of one seed."""
    random = np.random.default_rng(0)
    while True:
        tokens = random.integers(0, VOCABULARY, (BATCH, LENGTH + 1)).astype(np.int32)
        yield tokens[:, :-1], tokens[:, 1:]


def timed(step) -> dict:
    """Seconds of each of STEPS steps after the warm-up; `step` returns the loss as a float."""
    batches = random_batches()
    for _ in range(WARMUP):
        step(*next(batches))
    seconds = []
    for _ in range(STEPS):
        batch = next(batches)
        began = time.perf_counter()
        loss = step(*batch)
        seconds.append(time.perf_counter() - began)
    return {"median": median(seconds), "fastest": min(seconds), "last_loss": loss}


def measure_jaxstack() -> dict:
    """Our step, through `Trainer`."""
    from jaxstack.distributed.device_setup import start_devices
    from jaxstack.loss import language_model_loss
    from jaxstack.models import Transformer
    from jaxstack.run_config import load_config
    from jaxstack.trainer import Trainer

    start_devices()
    config = load_config(None, OVERRIDES)
    trainer = Trainer(
        lambda rngs: Transformer(config.model, rngs), language_model_loss, [],
        optimizer=config.optimizer, schedule=config.schedule, train=config.train,
    )  # fmt: skip

    def step(tokens: np.ndarray, labels: np.ndarray) -> float:
        return float(trainer.train_step(trainer.put({"tokens": tokens, "labels": labels}))["loss"])

    return timed(step)


def measure_torch(compiled: bool) -> dict:
    """The PyTorch step."""
    import torch

    from benchmarks.peers.torch_gpt import GptShape, TorchGpt
    from benchmarks.peers.torch_step import TorchStep

    torch.manual_seed(0)
    train = TorchStep(TorchGpt(GptShape(block_size=LENGTH, vocab_size=VOCABULARY)), compiled=compiled)

    def step(tokens: np.ndarray, labels: np.ndarray) -> float:
        return float(train(torch.from_numpy(tokens).long(), torch.from_numpy(labels.copy()).long()))

    return timed(step)


IMPLEMENTATIONS = {
    "jaxstack": measure_jaxstack,
    "torch": lambda: measure_torch(False),
    "torch-compiled": lambda: measure_torch(True),
}


def run_worker(implementation: str, cores: int | None) -> dict:
    """Measure in a process of its own, on `cores` cores (None: all); return its result."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, __file__, "--worker", implementation, *([f"--cores={cores}"] if cores else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{implementation} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each implementation takes its turn")
    parser.add_argument("--compiled", action="store_true", help="also measure torch.compile")
    parser.add_argument("--worker", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, help="cores that a process may use; default: all")
    args = parser.parse_args()
    if args.worker:
        if args.cores:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
        print(json.dumps(IMPLEMENTATIONS[args.worker]()))
        return
    from benchmarks.rows import append_rows, print_table

    names = ["jaxstack"]
    if importlib.util.find_spec("torch"):
        names += ["torch", *(["torch-compiled"] if args.compiled else [])]
    found: dict[str, list[dict]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            found[name].append(run_worker(name, args.cores))
    rows = []
    for name, results in found.items():
        step = median(result["median"] for result in results)
        rows.append({
            "work": WORK + (f", cores: {args.cores}" if args.cores else ""), "implementation": _title(name),
            "device": "cpu", "devices": 1, "cores": args.cores or os.cpu_count(),
            "tokens_per_second_per_device": BATCH * LENGTH / step, "milliseconds": 1e3 * step,
            "fastest_milliseconds": 1e3 * min(result["fastest"] for result in results), "rounds": args.rounds,
        })  # fmt: skip
    for row in rows:
        row["ratio_to_torch"] = rows[1]["milliseconds"] / row["milliseconds"] if len(rows) > 1 else None
    append_rows("cpu_nanogpt", rows)
    print_table(
        rows, ["work", "implementation", "tokens_per_second_per_device", "milliseconds", "fastest_milliseconds",
               "ratio_to_torch"],
    )  # fmt: skip


def _title(name: str) -> str:
    if name == "jaxstack":
        return name
    import torch

    return f"PyTorch {torch.__version__} GPT, " + ("torch.compile" if name == "torch-compiled" else "eager")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
