"""Whole training steps, ours and a compiled PyTorch GPT in turn in one job: tokens/s, TFLOP/s, memory.

    python benchmarks/train_step.py "gpt2-124m bf16" "llama3-1b bf16"

Every measurement runs in a process of its own, so that no framework holds memory while another runs. Tokens are random,
weights float32 with bfloat16 compute, AdamW, clipping by the global norm. Times are medians over blocks of steps.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

BLOCKS, STEPS = 5, 4
WORKS = {
    "gpt2-124m bf16": ["model.preset=gpt2-124m", "train.global_batch_size=64", "train.sequence_length=1024"],
    "gpt2-350m bf16": ["model.preset=gpt2-350m", "train.global_batch_size=32", "train.sequence_length=1024"],
    "llama3-1b bf16": ["model.preset=llama3-1b", "train.global_batch_size=4", "train.sequence_length=8192"],
    "llama3-1b fp8": [
        "model.preset=llama3-1b", "train.global_batch_size=4", "train.sequence_length=8192", "precision.fp8=current",
    ],
    "llama3-8b fsdp4 bf16": [
        "model.preset=llama3-8b", "parallel.fsdp=4", "train.global_batch_size=4", "train.sequence_length=8192",
    ],
    "llama3-8b tensor4 bf16": [
        "model.preset=llama3-8b", "parallel.tensor=4", "parallel.sequence=true", "model.remat=none",
        "train.global_batch_size=2", "train.sequence_length=8192",
    ],
    "llama3-8b fsdp4 fp8": [
        "model.preset=llama3-8b", "parallel.fsdp=4", "train.global_batch_size=8", "train.sequence_length=8192",
        "precision.fp8=current",
    ],
    "llama3-8b context4 65536 bf16": [
        "model.preset=llama3-8b", "parallel.context=4", "train.global_batch_size=1", "train.sequence_length=65536",
    ],
    "qwen3-30b-a3b of 6 layers bf16": [
        "model.preset=qwen3-30b-a3b", "model.num_layers=6", "train.global_batch_size=4", "train.sequence_length=4096",
    ],
    "qwen3-30b-a3b of 24 layers expert4 bf16": [
        "model.preset=qwen3-30b-a3b", "model.num_layers=24", "parallel.expert=4", "train.global_batch_size=16",
        "train.sequence_length=4096",
    ],
}  # fmt: skip
VARIANTS = {
    "unrolled": ["model.scan_layers=false"],
    "scanned": ["model.scan_layers=true"],
    "unrolled, no overlap": ["model.scan_layers=false", "parallel.overlap=never"],
    "scanned, no overlap": ["model.scan_layers=true", "parallel.overlap=never"],
    "scanned, save_attention": ["model.scan_layers=true", "model.remat=save_attention"],
    "unrolled, save_attention": ["model.scan_layers=false", "model.remat=save_attention"],
}
"""Ways to run the same work; the fastest that fits is the one reported."""


def measure_jaxstack(work: str, overrides: list[str]) -> dict:
    """One row for our step."""
    import jax

    from jaxstack.data import open_data
    from jaxstack.language_run import make_trainer, resolve_model
    from jaxstack.models import model_flops_per_token
    from jaxstack.observe.memory import peak_memory_bytes
    from jaxstack.observe.throughput import throughput
    from jaxstack.run_config import load_config, resolve_layout
    from jaxstack.startup import cache_compilations, start_devices

    config = load_config(None, [*WORKS[work], "data.sources=[{path: synthetic}]", "data.packing=false", *overrides])
    vocabulary = f"data.tokenizer.vocab_size={config.model.vocab_size}"
    config = load_config(
        None, [*WORKS[work], "data.sources=[{path: synthetic}]", "data.packing=false", vocabulary, *overrides]
    )
    config = resolve_layout(config, start_devices(config.parallel.simulate_devices))
    cache_compilations()
    train = config.train
    data = open_data(config.data, sequence_length=train.sequence_length, seed=0)
    config = config.model_copy(update={"model": resolve_model(config.model, data.tokenizer.vocab_size)})
    trainer = make_trainer(config, data)
    began = time.perf_counter()
    trainer.compile(trainer.peek_batch())
    compile_seconds = time.perf_counter() - began
    batches = trainer.batches(0)
    losses = [float(trainer.train_step(next(batches)[0])["loss"]) for _ in range(3)]
    seconds = []
    for _ in range(BLOCKS):
        began = time.perf_counter()
        for _ in range(STEPS):
            metrics = trainer.train_step(next(batches)[0])
        losses.append(float(metrics["loss"]))
        seconds.append((time.perf_counter() - began) / STEPS)
    batches.close()
    tokens = train.global_batch_size * train.sequence_length
    rates = throughput(
        tokens, median(seconds), jax.device_count(), model_flops_per_token(config.model, train.sequence_length),
        jax.devices()[0].device_kind,
    )  # fmt: skip
    ran = trainer.describe()
    backends = {kernel["operation"]: kernel["backend"] for kernel in ran["kernels"]}
    return {
        "implementation": "jaxstack", "device": jax.devices()[0].device_kind, "devices": jax.device_count(),
        "tokens_per_second_per_device": rates["tokens_per_second_per_device"],
        "tflops_per_device": rates["model_tflops_per_device"], "mfu": rates["mfu"],
        "milliseconds": 1e3 * median(seconds), "peak_memory_bytes": peak_memory_bytes(),
        "compile_seconds": compile_seconds, "first_loss": losses[0], "last_loss": losses[-1], "backends": backends,
        "matmuls": ran.get("matmuls"), "overrides": overrides,
    }  # fmt: skip


def measure_torch(work: str, overrides: list[str]) -> dict:
    """One row for a compiled PyTorch GPT of the same shape."""
    import torch

    from benchmarks.peers.torch_gpt import GptShape, TorchStep
    from jaxstack.models import model_flops_per_token
    from jaxstack.observe.throughput import throughput
    from jaxstack.run_config import load_config

    config = load_config(None, [*WORKS[work], *overrides])
    model, train = config.model, config.train
    if model.positions != "learned" or config.parallel.fsdp > 1:
        raise SystemExit(f"the PyTorch peer is a GPT on one device; it does not cover {work!r}")
    shape = GptShape(
        model.num_layers, model.num_heads, model.hidden_size, train.sequence_length, model.vocab_size, bias=True
    )
    torch.set_float32_matmul_precision("high")
    step = TorchStep(shape, compiled=True, device="cuda", autocast=torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(0)
    size = (train.global_batch_size, train.sequence_length)

    def batch() -> tuple:
        return tuple(torch.randint(0, shape.vocab_size, size, device="cuda", generator=generator) for _ in range(2))

    losses = [float(step(*batch())) for _ in range(3)]
    seconds = []
    for _ in range(BLOCKS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            loss = step(*batch())
        losses.append(float(loss))
        seconds.append((time.perf_counter() - began) / STEPS)
    flops = model_flops_per_token(model, train.sequence_length)
    name = torch.cuda.get_device_name(0)
    rates = throughput(size[0] * size[1], median(seconds), 1, flops, name)
    return {
        "implementation": f"PyTorch {torch.__version__} GPT, torch.compile", "device": name, "devices": 1,
        "tokens_per_second_per_device": rates["tokens_per_second_per_device"],
        "tflops_per_device": rates["model_tflops_per_device"], "mfu": rates["mfu"],
        "milliseconds": 1e3 * median(seconds), "peak_memory_bytes": torch.cuda.max_memory_allocated(),
        "first_loss": losses[0], "last_loss": losses[-1],
    }  # fmt: skip


IMPLEMENTATIONS = {"jaxstack": measure_jaxstack, "torch": measure_torch}


def run_worker(implementation: str, work: str, overrides: list[str], timeout: float) -> dict | None:
    """A measurement in a process of its own; None (and the reason printed) where it fails."""
    command = [sys.executable, __file__, "--worker", implementation, work, *overrides]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        print(f"{work}, {implementation}: no result within {timeout:.0f} s", flush=True)
        return None
    if done.returncode:
        print(f"{work}, {implementation} failed:\n{done.stderr[-1500:]}", flush=True)
        return None
    return {"work": work, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", help=f"of: {', '.join(WORKS)}")
    parser.add_argument("--rounds", type=int, default=1, help="how often each implementation takes its turn")
    parser.add_argument("--variants", nargs="+", default=["unrolled", "scanned"], choices=VARIANTS, help="ways to run")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="for every run of ours")
    parser.add_argument("--timeout", type=float, default=400, help="seconds a measurement may take")
    parser.add_argument("--worker", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work, *overrides = args.works
        print(json.dumps(IMPLEMENTATIONS[args.worker](work, overrides)))
        return
    from benchmarks.rows import append_rows, print_table

    rows = []
    for work in args.works or list(WORKS):
        for _ in range(args.rounds):
            for variant in args.variants:
                row = run_worker("jaxstack", work, [*VARIANTS[variant], *args.set], args.timeout)
                rows += [{**row, "variant": variant}] if row else []
            if importlib.util.find_spec("torch") and work.startswith("gpt2"):
                row = run_worker("torch", work, [], args.timeout)
                rows += [row] if row else []
        append_rows("train_step", [row for row in rows if row["work"] == work])
    columns = ["work", "implementation", "variant", "tokens_per_second_per_device", "tflops_per_device", "mfu"]
    print_table(rows, [*columns, "milliseconds", "peak_memory_bytes", "compile_seconds", "last_loss"])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
