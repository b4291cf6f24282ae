"""Pipeline schedules: measured time of a step's gradients against one stage's work without bubble, and simulated.

    python benchmarks/pipeline.py --stages 4 --layers 16 --microbatches 4 8 16

Reference: one device, layers / stages of the layers, the same microbatches one after the other. Efficiency is the
reference's time over the pipeline's; `simulated` is that of the schedule's table alone. The vocabulary is small, so
that the head weighs little. One process; microbatches of one sequence; bfloat16 compute, no optimizer.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

COLUMNS = ("schedule", "microbatches", "milliseconds", "reference_milliseconds", "efficiency", "simulated")
MORE = ("tflops_per_device", "predicted_bytes", "compile_seconds")


def model_config(args: argparse.Namespace, layers: int) -> Any:
    """Blocks with the proportions of Llama 3."""
    from jaxstack.models import ModelConfig

    return ModelConfig(
        vocab_size=args.vocabulary, hidden_size=args.width, num_layers=layers, num_heads=max(1, args.width // 128),
        num_kv_heads=max(1, args.width // 512), intermediate_size=args.width * 7 // 2, remat=args.remat,
        scan_layers=not args.unroll,
    )  # fmt: skip


def build(args: argparse.Namespace, layers: int, microbatches: int, schedule: Any) -> Any:
    """A trainer of `layers` layers: on all stages with a schedule, otherwise on one device with accumulation."""
    import jax
    import jax.numpy as jnp

    from jaxstack.loss import language_model_loss
    from jaxstack.models import Transformer
    from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
    from jaxstack.parallel.pipeline import plan_pipeline
    from jaxstack.run_config import TrainConfig
    from jaxstack.trainer import Trainer

    model = model_config(args, layers)
    stages = args.stages if schedule else 1
    parallel = ParallelConfig(pipeline=stages, pipeline_schedule=schedule)
    train = TrainConfig(global_batch_size=microbatches, sequence_length=args.length, gradient_accumulation=microbatches)
    plan = plan_pipeline(parallel, microbatches, microbatches) if schedule else None
    return Trainer(
        lambda rngs: Transformer(model, rngs, dtype=jnp.bfloat16),
        language_model_loss,
        lambda step: None,
        mesh=make_rules(make_mesh(parallel, jax.devices()[:stages]), pipeline=plan),
        train=train,
    )


def measure(trainer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the gradients of one global batch, and what compiling and memory cost."""
    import jax
    import numpy as np

    from benchmarks.timing import median_seconds
    from jaxstack.observe.ran import predicted_memory

    rows = trainer.train.global_batch_size
    tokens = np.random.default_rng(0).integers(0, args.vocabulary, (rows, args.length), dtype=np.int32)
    batch = trainer.put({"tokens": tokens, "labels": np.roll(tokens, -1, 1)})
    shardings = trainer.shardings
    create = jax.jit(lambda key: trainer.module.init(key), out_shardings=(shardings.params, shardings.rest))
    params, rest = create(jax.random.key(0))
    step = jax.jit(lambda *arguments: trainer.steps.gradients(*arguments)[0])
    began = time.perf_counter()
    compiled = step.lower(params, rest, batch, jax.random.key(1)).compile()
    compile_seconds = time.perf_counter() - began
    key = jax.random.key(1)
    # The queue is as long as one call: gradients of several would not fit beside one another.
    seconds = median_seconds(
        lambda: jax.block_until_ready(compiled(params, rest, batch, key)).loss, jax.block_until_ready, args.seconds
    )
    return {
        "milliseconds": 1e3 * seconds,
        "compile_seconds": compile_seconds,
        "predicted_bytes": predicted_memory(compiled).get("predicted_bytes"),
    }


def simulated_efficiency(trainer: Any, remat: str) -> float:
    """Of the schedule's table, with a forward again in the backward pass where layers are rematerialised."""
    from jaxstack.parallel.pipeline import simulate

    schedule, again = trainer.pipeline.table(), float(remat != "none")
    split = schedule.splits_backward
    return simulate(schedule, {"F": 1.0, "B": again + (1.0 if split else 2.0), "W": float(split)}).efficiency


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a schedule and number of microbatches."""
    import jax

    from jaxstack.models import model_flops_per_token

    rows = []
    for microbatches in args.microbatches:
        reference = measure(build(args, args.layers // args.stages, microbatches, None), args)["milliseconds"]
        for schedule in args.schedules:
            if schedule == "interleaved" and microbatches % args.stages:
                continue
            trainer = build(args, args.layers, microbatches, schedule)
            found = measure(trainer, args)
            flops = model_flops_per_token(model_config(args, args.layers), args.length) * microbatches * args.length
            rows.append({
                "work": f"{args.layers} layers of {args.width}, {args.length} tokens a microbatch, remat {args.remat}",
                "implementation": "jaxstack", "variant": f"{schedule}, {microbatches} microbatches",
                "device": jax.devices()[0].device_kind, "devices": args.stages,
                "schedule": schedule, "virtual_stages": trainer.pipeline.chunks, "microbatches": microbatches,
                "reference_milliseconds": reference, "efficiency": reference / found["milliseconds"],
                "simulated": simulated_efficiency(trainer, args.remat),
                "tflops_per_device": flops / found["milliseconds"] / 1e9 / args.stages, **found,
            })  # fmt: skip
            print(f"{schedule}, {microbatches} microbatches: {found['milliseconds']:.1f} ms", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--length", type=int, default=2048, help="tokens a microbatch")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "interleaved", "zero_bubble"])
    parser.add_argument("--remat", default="none", choices=["none", "full", "save_attention", "save_dots"])
    parser.add_argument("--unroll", action="store_true", help="the layers of a stage unrolled instead of in a loop")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each of the five blocks of a measurement")
    parser.add_argument("--simulate-devices", action="store_true", help="on simulated CPU devices, to try the script")
    args = parser.parse_args()
    from benchmarks.rows import append_rows, print_table
    from jaxstack.startup import cache_compilations, start_devices

    start_devices(args.stages if args.simulate_devices else None)
    cache_compilations()
    rows = measure_all(args)
    print_table(rows, [*COLUMNS, *MORE])
    if not args.simulate_devices:
        append_rows("pipeline", rows)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
