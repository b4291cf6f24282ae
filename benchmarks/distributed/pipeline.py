"""Pipeline schedules: the measured bubble of a step, compared with the simulated one.

    python benchmarks/distributed/pipeline.py --microbatches 4 8 16        # as many stages as GPUs, four layers on each
    python benchmarks/distributed/pipeline.py --tiny                       # tiny sizes on simulated CPU devices

A step of m microbatches takes m times the work of one, plus the time in which the pipeline fills and drains. The work
of one is the additional time per additional microbatch, from the two largest counts. `bubble` is the remaining time
as a fraction of the work; `simulated_bubble` is that of the schedule's table. The vocabulary is small, so that the
head takes little time. One process; microbatches of one sequence; bfloat16 compute, no optimizer. All programs are
compiled at the same time first; then the rows of a schedule are appended to benchmarks/results/pipeline.jsonl as soon
as it is measured. Zero-bubble fills its gaps only with 2 x stages - 1 microbatches or more.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rows import append_rows, print_table
from benchmarks.timing import median_seconds
from benchmarks.turns import Turn
from jaxstack.distributed.device_setup import cache_compilations, start_devices
from jaxstack.launch.supervisor import count_gpus
from jaxstack.loss import language_model_loss
from jaxstack.models import ModelConfig, Transformer, model_flops_per_token
from jaxstack.observe.what_ran import compiler_memory_estimate
from jaxstack.parallel import ParallelConfig, StepLayout, make_mesh
from jaxstack.parallel.pipeline.plan import plan_pipeline
from jaxstack.parallel.pipeline.schedule import SCHEDULES, simulate
from jaxstack.run_config import TrainConfig
from jaxstack.trainer import Trainer

COLUMNS = ("variant", "milliseconds", "milliseconds_a_microbatch", "bubble", "simulated_bubble", "tflops_per_device")
MORE = ("predicted_bytes", "compile_seconds")
TINY = {"width": 64, "length": 32, "vocabulary": 128, "seconds": 0.05}


@dataclasses.dataclass(frozen=True)
class Program:
    """The gradients of one global batch."""

    trainer: Trainer
    schedule: str
    microbatches: int


def model_config(args: argparse.Namespace) -> ModelConfig:
    """Blocks with the proportions of Llama 3."""
    return ModelConfig(
        vocab_size=args.vocabulary, hidden_size=args.width, num_layers=args.layers, num_heads=max(1, args.width // 128),
        num_kv_heads=max(1, args.width // 512), intermediate_size=args.width * 7 // 2, remat=args.remat,
        scan_layers=not args.unroll,
    )  # fmt: skip


def make_program(args: argparse.Namespace, microbatches: int, schedule: Any) -> Program:
    """A model in stages."""
    model = model_config(args)
    parallel = ParallelConfig(pipeline=args.stages, pipeline_schedule=schedule)
    train = TrainConfig(global_batch_size=microbatches, sequence_length=args.length, gradient_accumulation=microbatches)
    plan = plan_pipeline(parallel, microbatches, microbatches)
    trainer = Trainer(
        lambda rngs: Transformer(model, rngs, dtype=jnp.bfloat16),
        language_model_loss,
        lambda step: None,
        mesh=make_mesh(parallel, jax.devices()[: args.stages]),
        layout=StepLayout(pipeline=plan),
        train=train,
    )
    return Program(trainer, schedule, microbatches)


def make_batch(args: argparse.Namespace, program: Program) -> dict[str, jax.Array]:
    """One global batch of random tokens on the devices."""
    tokens = np.random.default_rng(0).integers(0, args.vocabulary, (program.microbatches, args.length), dtype=np.int32)
    return program.trainer.put({"tokens": tokens, "labels": np.roll(tokens, -1, 1)})


def compile_program(args: argparse.Namespace, program: Program) -> tuple[Any, float]:
    """The compiled program and the seconds that it took."""
    state = program.trainer.abstract_state
    step = jax.jit(lambda *arguments: program.trainer.steps.gradients(*arguments)[0])
    began = time.perf_counter()
    lowered = step.lower(state.params, state.non_params, make_batch(args, program), jax.random.key(1))
    compiled = lowered.compile(compiler_options=program.trainer.compiler_options)
    return compiled, time.perf_counter() - began


def measure(args: argparse.Namespace, program: Program, compiled: Any) -> float:
    """Milliseconds of the gradients of one global batch."""
    shardings = program.trainer.shardings
    create = jax.jit(program.trainer.module.init, out_shardings=(shardings.params, shardings.non_params))
    inputs = *create(jax.random.key(0)), make_batch(args, program), jax.random.key(1)

    # The queue is as long as one call: gradients of several would not fit beside one another.
    def run():
        return jax.block_until_ready(compiled(*inputs)).loss

    return 1e3 * median_seconds(run, jax.block_until_ready, args.seconds)


def simulated_bubble(trainer: Trainer, remat: str) -> float:
    """Return the bubble of the schedule's table; rematerialised layers run forward again in the backward pass."""
    schedule = trainer.pipeline.table()
    again = float(remat != "none")  # pyright: ignore
    split = schedule.splits_backward
    costs = {"F": 1.0, "B": again + (1.0 if split else 2.0), "W": float(split)}
    return simulate(schedule, costs).bubble  # pyright: ignore


def measure_all(args: argparse.Namespace, turn: Turn) -> Iterator[dict[str, Any]]:
    """Yield a row for each schedule and number of microbatches, once it is this process's turn."""
    counts = sorted(args.microbatches)
    programs = [make_program(args, count, schedule) for schedule in args.schedules for count in counts]
    with ThreadPoolExecutor(args.compile_threads) as pool:
        ready = iter(list(pool.map(functools.partial(compile_program, args), programs)))
    print(f"{len(programs)} programs compiled", flush=True)
    turn.wait()
    for schedule in args.schedules:
        found = [(program, *next(ready)) for program in programs if program.schedule == schedule]
        times = [measure(args, program, compiled) for program, compiled, _ in found]
        each = (times[-1] - times[-2]) / (counts[-1] - counts[-2])
        for (program, compiled, compile_seconds), milliseconds in zip(found, times, strict=True):
            microbatches = program.microbatches
            flops = model_flops_per_token(model_config(args), args.length) * microbatches * args.length
            yield {
                "work": f"{args.layers} layers of {args.width}, {args.length} tokens a microbatch, remat {args.remat}"
                + (", unrolled" if args.unroll else ""),
                "implementation": "jaxstack", "variant": f"{schedule}, {microbatches} microbatches",
                "device": jax.devices()[0].device_kind, "devices": args.stages,
                "virtual_stages": program.trainer.pipeline.chunks,  # pyright: ignore
                "milliseconds": milliseconds, "milliseconds_a_microbatch": each,
                "bubble": milliseconds / (microbatches * each) - 1,
                "simulated_bubble": simulated_bubble(program.trainer, args.remat),
                "tflops_per_device": flops / milliseconds / 1e9 / args.stages, "compile_seconds": compile_seconds,
                "predicted_bytes": compiler_memory_estimate(compiled).get("predicted_bytes"),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, help="left out: as many as GPUs (four with --tiny)")
    parser.add_argument("--layers", type=int, help="left out: four a stage")
    parser.add_argument("--width", type=int, default=4096, help="hidden size of the model")
    parser.add_argument("--length", type=int, default=2048, help="tokens a microbatch")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens that the model knows")
    parser.add_argument("--microbatches", type=int, nargs="+", help="left out: 1, 2 and 4 times the stages")
    parser.add_argument("--schedules", nargs="+", default=[*SCHEDULES], choices=SCHEDULES, help="to measure")
    parser.add_argument("--remat", default="none", choices=["none", "full", "save_attention", "save_dots"])
    parser.add_argument("--unroll", action="store_true", help="the layers of a stage unrolled instead of in a loop")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each of the five blocks of a measurement")
    parser.add_argument("--compile-threads", type=int, default=4, help="programs that are compiled at the same time")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on simulated CPU devices; rows go to tiny/")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
    args.stages = args.stages or (4 if args.tiny else count_gpus())
    if args.stages < 2:
        parser.error(f"needs two or more GPUs, found {args.stages}; or --tiny, on simulated CPU devices")
    args.layers = args.layers or 4 * args.stages
    args.microbatches = args.microbatches or [args.stages, 2 * args.stages, 4 * args.stages]
    if len(set(args.microbatches)) < 2:
        parser.error("--microbatches needs two different counts: what one more takes is measured by their difference")
    if any(count % args.stages for count in args.microbatches) and "interleaved" in args.schedules:
        parser.error(f"--microbatches must be multiples of --stages ({args.stages}) for interleaved")
    turn = Turn()
    start_devices(args.stages if args.tiny else None)
    cache_compilations()
    rows = []
    for row in measure_all(args, turn):
        rows.append(row)
        append_rows("tiny/pipeline" if args.tiny else "pipeline", [row])
        print(f"{row['variant']}: bubble {row['bubble']:.3f}, simulated {row['simulated_bubble']:.3f}", flush=True)
    print_table(rows, [*COLUMNS, *MORE])


if __name__ == "__main__":
    main()
