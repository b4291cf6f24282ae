"""The serving engine with random weights: throughput, first tokens, random arrivals, shared prefixes; beside vLLM.

    python benchmarks/serving/serve.py  # llama3-1b on a GPU, tiny on a CPU
    python benchmarks/serving/serve.py llama3-8b --work latency throughput --vllm /opt/vllm/bin/python
    python benchmarks/serving/serve.py llama3-8b --work latency throughput --recipe fp8-dynamic
    python benchmarks/serving/serve.py llama3-8b --work throughput --slots 384 --prompt 1000 --tokens 1000 \\
        --requests 768 --chunk 1024 --step-tokens 8192 --chunk-slowdown 100 --decode-steps 1 --shapes 1x1024 8x1024
    python benchmarks/serving/serve.py --long 8000 --chunk 256 --work interruption parallel.tensor=2
    python benchmarks/serving/serve.py llama3-8b --work throughput --half-batches-from 1024 parallel.tensor=2

arrivals: requests of random lengths that arrive at random (Poisson), against one after another, by the engine and by
`Decoder.generate`. interruption: time between the tokens of running answers, alone and while a long prompt arrives,
with one decode step per program.
prefix: prompts of which 90 % is common, with and without the prefix cache: seconds per request of many at once, and
time to the first token of single ones. throughput: all requests at once, with the share of the optimum C / (2 P) tokens
of prompts and answers per second (NanoFlow, Zhu et al. 2024, arXiv:2408.12757): C is the peak FLOP/s of the devices
(--peak, by default the data sheet's for bfloat16), P the parameters that multiply each token (without the input
embedding; of experts those that a token uses). Its row has the tokens/s while all slots decode, the mean duration of
each kind of program, the share of these durations in which the host waited for the device, and the share of the run
in which nothing was dispatched; further rows have the device time of single programs, by kind of kernel. latency:
--batches prompts at once on an idle engine, the time until all have their first token, and of each further step.
With --vllm, the Python of an environment with vLLM, it is measured before ours in throughput and latency, with as many
prompts of the same lengths (`benchmarks/peers/vllm_engine.py`); rows of ours then tell the ratio.
All are greedy, through the library's API, after warm-up. `start_seconds` is the time that the engine takes to start; it
compiles what is not in JAX's persistent compilation cache. start: these seconds of an engine as `jaxstack serve` starts
it, and those until its first answer; the second of two processes finds the programs of the first. Rows are appended to
benchmarks/results/serve.jsonl.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from benchmarks.rows import append_rows, print_table
from benchmarks.serving.generate import VOCABULARY, make_decoder
from benchmarks.serving.serve_breakdown import program_rows
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.requests import Request
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.step_shapes import ChunkShape
from jaxstack.distributed.device_setup import cache_compilations, start_devices
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, count_parameters
from jaxstack.models.huggingface.families import choose_family
from jaxstack.observe.throughput import dense_bf16_peak
from jaxstack.run_config import RunConfig, load_config
from jaxstack.serve.config import EngineConfig

GREEDY = Sampling(temperature=0.0)
Asked = tuple[list[int], int]
"""Prompt and number of new tokens."""


def make_requests(decoder: Decoder, args: argparse.Namespace, seed: int = 0) -> list[Asked]:
    """Prompts and answers of a quarter up to the whole of the given lengths."""
    random = np.random.default_rng(seed)
    vocabulary = decoder.config.vocab_size
    lengths = random.integers(max(1, args.prompt // 4), args.prompt + 1, args.requests)
    counts = random.integers(max(1, args.tokens // 4), args.tokens + 1, args.requests)
    prompts = [random.integers(0, vocabulary, length).tolist() for length in lengths]
    return list(zip(prompts, counts.tolist(), strict=True))


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def start_engine(decoder: Decoder, config: EngineConfig, shapes: Sequence[ChunkShape] = ()) -> tuple[Engine, float]:
    """Start an engine, with only these shapes of prompt chunks if any are given; return it with the seconds it took."""
    began = time.perf_counter()
    engine = Engine(decoder, config, warm_up=False)
    if missing := set(shapes) - set(engine.scheduler.shapes):
        raise ConfigError(f"--shapes: the engine has no shapes {missing}; it has {engine.scheduler.shapes}.")
    engine.scheduler.shapes = tuple(shapes) or engine.scheduler.shapes
    engine.warm_up()
    return engine, time.perf_counter() - began


def submit_all(engine: Engine, asked: Sequence[Asked], waits: Sequence[float] = ()) -> None:
    """Submit the requests, each after its wait or all together, and wait for all answers."""
    requests = []
    with contextlib.nullcontext() if waits else engine.together():
        for number, (prompt, count) in enumerate(asked):
            if waits:
                time.sleep(waits[number])
            requests.append(engine.submit(prompt, count, GREEDY))
    for request in requests:
        request.result()


def arrivals(decoder: Decoder, config: EngineConfig, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens/s of random arrivals, and of the same requests one after another."""
    asked = make_requests(decoder, args)
    waits = np.random.default_rng(1).exponential(1 / args.rate, len(asked)).tolist()
    tokens = sum(count for _, count in asked)
    few = asked[: max(4, len(asked) // 8)]
    one_by_one = sum(count for _, count in few)
    engine, start = start_engine(decoder, config.model_copy(update={"prefix_cache": False}))
    with engine:
        compiled = engine.programs.compiled
        together = timed(lambda: submit_all(engine, asked, waits)) / tokens
        alone = timed(lambda: [engine.submit(*request, GREEDY).result() for request in few]) / one_by_one
        if engine.programs.compiled != compiled:
            raise AssertionError("a program was compiled after the warm-up.")
    generate = [lambda p=p, n=n: list(decoder.generate([p], n, GREEDY)) for p, n in few]
    for call in generate:
        call()  # compiles
    decoded = sum(timed(call) for call in generate) / one_by_one
    return [
        {"variant": "random arrivals", "seconds_per_token": together, "times_sequential": decoded / together,
         "start_seconds": start},
        {"variant": "one at a time, engine", "seconds_per_token": alone, "start_seconds": start},
        {"variant": "one at a time, Decoder.generate", "seconds_per_token": decoded},
    ]  # fmt: skip


def token_times(engine: Engine, asked: Sequence[Asked], disturb: Callable[[], Request] | None) -> np.ndarray:
    """Return the seconds between the tokens of requests that run together, until `disturb`'s first token if given."""
    times: list[list[float]] = [[] for _ in asked]
    requests = [engine.submit(prompt, count, GREEDY) for prompt, count in asked]
    for request, moments in zip(requests, times, strict=True):
        request.listen(lambda moments=moments: moments.append(time.perf_counter()))
    while min(request.count for request in requests) < 8:
        time.sleep(0.001)
    begin = time.perf_counter()
    if disturb is not None:
        next(iter(disturb()))
        end = time.perf_counter()
    else:
        for request in requests:
            request.result()
        end = min(request.times.newest_token or begin for request in requests)
    for request in requests:
        request.cancel()
        request.result()
    within = [np.asarray(moments)[(np.asarray(moments) >= begin) & (np.asarray(moments) <= end)] for moments in times]
    return np.concatenate([np.diff(moments) for moments in within])


def interruption(decoder: Decoder, config: EngineConfig, args: argparse.Namespace) -> list[dict[str, Any]]:
    """99th percentile of the time between tokens of running answers, alone and while a long prompt arrives."""
    random = np.random.default_rng(2)
    count = max(1, config.slots - 1)
    asked = [(random.integers(0, decoder.config.vocab_size, 64).tolist(), args.tokens) for _ in range(count)]
    long = random.integers(0, decoder.config.vocab_size, args.long).tolist()
    alone = list[np.ndarray]()
    beside = list[np.ndarray]()
    waits = list[float]()

    def disturb() -> Request:
        requests.append(engine.submit(long, 1, GREEDY))
        return requests[-1]

    engine, start = start_engine(decoder, config.model_copy(update={"prefix_cache": False, "decode_steps": 1}))
    with engine:
        token_times(engine, asked, None)
        places = (0, args.long / engine.context)
        widest = [max(rows * width for rows, width in engine.scheduler.shapes_beside(place)) for place in places]
        many = [(prompt, engine.context - 64) for prompt, _ in asked]
        for _ in range(args.turns):
            requests: list[Request] = []
            alone.append(token_times(engine, asked, None))
            beside.append(token_times(engine, many, disturb))
            waits.append(first_token_seconds(requests[0]))
    percentiles = [1e3 * float(np.percentile(np.concatenate(times), 99)) for times in (alone, beside)]
    return [
        {"variant": "p99 alone", "milliseconds": percentiles[0], "start_seconds": start},
        {"variant": f"p99 beside {args.long} tokens, chunk {config.chunk}, {widest[0]} beside answers",
         "milliseconds": percentiles[1], "times_alone": percentiles[1] / percentiles[0], "chunk_at_end": widest[1],
         "first_token_milliseconds": 1e3 * float(np.median(waits)), "start_seconds": start},
    ]  # fmt: skip


def first_token_seconds(request: Request) -> float:
    """Return the seconds from the submission of a finished request to its first token."""
    assert request.times.first_token is not None
    return request.times.first_token - request.times.submitted


def prefix(decoder: Decoder, config: EngineConfig, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Requests that begin with the same document of 90 % of their prompt, with and without the prefix cache.

    Questions differ in every turn, so that only the document is cached. The engines take turns. All requests of a turn
    are submitted at once; then a few one at a time, for the time to the first token of an idle engine.
    """
    random = np.random.default_rng(3)
    answer = min(args.tokens, 64)
    document = random.integers(0, decoder.config.vocab_size, args.shared * 9 // 10).tolist()
    found = {name: {"seconds": list[float](), "first": list[float](), "computed": 0} for name in ("off", "on")}
    started = {name: start_engine(decoder, config.model_copy(update={"prefix_cache": name == "on"})) for name in found}
    engines = {name: engine for name, (engine, _) in started.items()}
    try:
        for turn in range(args.turns + 1):
            ends = random.integers(0, decoder.config.vocab_size, (args.requests, args.shared - len(document)))
            asked = [([*document, *end.tolist()], answer) for end in ends]
            alone = random.integers(0, decoder.config.vocab_size, (5, args.shared - len(document))).tolist()
            for name, engine in engines.items():
                if turn == 0:  # computes the document once
                    submit_all(engine, asked[:2])
                    continue
                before = engine.stats.computed_tokens
                found[name]["seconds"].append(timed(lambda e=engine, a=asked: submit_all(e, a)))
                found[name]["computed"] = (engine.stats.computed_tokens - before) / len(asked)
                for end in alone:
                    request = engine.submit([*document, *end], 1, GREEDY)
                    request.result()
                    found[name]["first"].append(first_token_seconds(request))
    finally:
        for engine in engines.values():
            engine.close()
    rows = [
        {"variant": f"prefix cache {name}, {len(document)} of {args.shared} tokens common, answers of {answer}",
         "milliseconds": 1e3 * float(np.median(result["seconds"])) / args.requests,
         "first_token_milliseconds": 1e3 * float(np.median(result["first"])),
         "computed_tokens_per_request": result["computed"], "start_seconds": started[name][1]}
        for name, result in found.items()
    ]  # fmt: skip
    rows[1]["times_without"] = rows[0]["milliseconds"] / rows[1]["milliseconds"]
    rows[1]["first_token_times_without"] = rows[0]["first_token_milliseconds"] / rows[1]["first_token_milliseconds"]
    return rows


def steady_speed(engine: Engine, requests: Sequence[Request]) -> float | None:
    """Wait for the answers; return tokens/s while all slots decode, or None if that time is too short to tell.

    It begins when as many prompts as there are slots have been computed, and ends when no request waits for a slot any
    more. With as many requests again as slots, and answers of equal length, that is one whole answer of each slot.
    """
    first = sum(len(request.prompt) for request in requests[: engine.slots])
    seen = list[tuple[float, int]]()
    while engine.failure is None and engine.stats.finished["length"] < len(requests):
        if engine.stats.prompt_tokens >= first and engine.waiting:
            seen.append((time.perf_counter(), engine.stats.generated_tokens))
        time.sleep(0.02)
    for request in requests:
        request.result()
    if len(seen) < 20:
        return None
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def throughput(decoder: Decoder, config: EngineConfig, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the row of a run in which all requests are there from the start, then rows of single programs."""
    prompts = np.random.default_rng(4).integers(0, decoder.config.vocab_size, (args.requests, args.prompt)).tolist()
    engine, start = start_engine(decoder, config, args.shapes)
    with engine:
        began = time.perf_counter()
        with engine.together():
            requests = [engine.submit(prompt, args.tokens, GREEDY) for prompt in prompts]
        steady = steady_speed(engine, requests)
        seconds = time.perf_counter() - began
        yield throughput_row(engine, seconds, args) | {"steady_tokens_per_second": steady, "start_seconds": start}
        yield from program_rows(engine, (args.prompt, args.prompt + args.tokens), args.kernels)


def throughput_row(engine: Engine, seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a run of `throughput` that took so many seconds."""
    config = engine.config
    stats = engine.stats
    devices = engine.model.rules.mesh.size
    halves = "" if config.half_batches_from is None else f", half-batches from {config.half_batches_from} tokens"
    more = "" if config.step_tokens is None else f", {config.step_tokens} tokens a step"
    busy = sum(stats.nanoseconds.values())
    row = {
        "variant": f"{config.slots} slots, chunk {config.chunk}{more}{halves}",
        "seconds_per_token": seconds / (args.requests * args.tokens),
        "milliseconds_per_step": 1e3 * seconds / stats.steps, "measured_seconds": seconds,
        "programs": dict(stats.programs), "preemptions": engine.scheduler.preemptions,
        "milliseconds_by_program": {kind: 1e-6 * spent / stats.programs[kind]
                                    for kind, spent in stats.nanoseconds.items()},
        "share_waiting_for_device": stats.waiting / busy, "share_nothing_dispatched": 1 - 1e-9 * busy / seconds,
    }  # fmt: skip
    peak = args.peak or dense_bf16_peak(jax.devices()[0].device_kind)
    if peak is not None:
        optimum = devices * optimal_tokens_per_second(engine.model.config, peak)
        computed = args.requests * (args.prompt + args.tokens)
        row |= {"peak_tflops": peak, "share_of_optimum": computed / seconds / optimum}
    return row


def optimal_tokens_per_second(model: ModelConfig, peak_tflops: float) -> float:
    """Return the tokens per second of a device that only multiplies each token with the parameters, at its peak."""
    return 1e12 * peak_tflops / (2 * count_parameters(model).matmul)


def chunk_shape(text: str) -> ChunkShape:
    """Return the shape that a text such as 8x1024 names."""
    rows, width = text.split("x")
    return ChunkShape(int(rows), int(width))


def latency(decoder: Decoder, config: EngineConfig, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield, for each number of prompts at once, the time to their first tokens, and that of each further step."""
    random = np.random.default_rng(6)
    prompt, tokens = args.latency
    most = max(args.batches)
    shapes = [ChunkShape(1, prompt), ChunkShape(max(1, min(most, 8192 // prompt)), prompt)]
    sizes = {"prefix_cache": False, "slots": most, "context": prompt + tokens, "chunk": prompt,
             "step_tokens": prompt * shapes[1].rows, "chunk_slowdown": 100.0}  # fmt: skip
    engine, start = start_engine(decoder, config.model_copy(update=sizes), shapes)

    def seconds(batch: int, count: int) -> float:
        prompts = random.integers(0, decoder.config.vocab_size, (batch, prompt)).tolist()
        return timed(lambda: submit_all(engine, [(ids, count) for ids in prompts]))

    with engine:
        for batch in args.batches:
            seconds(batch, 8)
            first = float(np.median([seconds(batch, 1) for _ in range(args.turns)]))
            whole = float(np.median([seconds(batch, tokens) for _ in range(args.turns)]))
            yield latency_row(batch, first, (whole - first) / (tokens - 1)) | {"start_seconds": start}


def latency_row(batch: int, first: float, step: float) -> dict[str, Any]:
    """Return the row of a batch whose first tokens and further steps take these seconds."""
    return {"variant": f"{batch} at once", "first_token_milliseconds": 1e3 * first, "milliseconds_per_step": 1e3 * step,
            "seconds_per_token": step / batch}  # fmt: skip


def vllm_rows(config: RunConfig, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of vLLM on the same requests, each with its `work`; print the end of its errors if it fails."""
    model = config.model.model_copy(update={"vocab_size": config.model.vocab_size or VOCABULARY})
    _, keys = choose_family(model)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**keys, "torch_dtype": "bfloat16"}), encoding="utf-8")
        sizes = {"requests": args.requests, "prompt": args.prompt, "tokens": args.tokens, "turns": args.turns}
        words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        words += ["--latency", *map(str, args.latency)]
        words += ["--batches", *map(str, args.batches), "--work", *(set(args.work) & {"latency", "throughput"})]
        words += ["--cache-fp8"] if config.precision.kv_cache == "fp8" else []
        words += ["--fp8"] if args.recipe == "fp8-dynamic" else []
        script = Path(__file__).resolve().parents[1] / "peers" / "vllm_engine.py"
        done = subprocess.run([args.vllm, script, folder, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        print("vLLM failed:", *(done.stdout + done.stderr).strip().splitlines()[-40:], sep="\n", flush=True)
    for found in (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"work"')):
        if found["work"] == "latency":
            row = latency_row(found.pop("batch"), found.pop("first"), found.pop("step"))
        else:
            seconds = found.pop("seconds")
            row = {"variant": f"{args.requests} requests", "seconds_per_token": seconds / args.requests / args.tokens,
                   "measured_seconds": seconds}  # fmt: skip
        yield {"implementation": f"vllm {found.pop('vllm')}", **found, **row}


def start(decoder: Decoder, config: EngineConfig, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the seconds until an engine that `jaxstack serve` starts takes requests, answers one, and has all programs.

    The variant tells whether the programs that suffice for most requests were in JAX's compilation cache.
    """
    began = time.perf_counter()
    on_cpu = jax.default_backend() == "cpu"
    with Engine(decoder, config, warm_up="first" if on_cpu else "cached") as engine:
        ready = time.perf_counter() - began
        gradual = not engine.warmed_up
        answer = timed(lambda: engine.submit(make_requests(decoder, args)[0][0], 8, GREEDY).result())
        while not engine.warmed_up:
            time.sleep(0.1)
        complete = time.perf_counter() - began
    variant = "start, gradual" if gradual else "start, all programs first"
    yield {"variant": variant, "start_seconds": ready, "first_answer_seconds": ready + answer,
           "all_programs_seconds": complete if gradual else ready}  # fmt: skip


WORKS = {
    "arrivals": arrivals, "interruption": interruption, "prefix": prefix, "throughput": throughput,
    "latency": latency, "start": start,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="PRESET | section.key=value", help="model; parallel, precision")
    parser.add_argument("--work", nargs="+", default=["arrivals", "interruption", "prefix"], choices=WORKS)
    start_devices()
    small = jax.default_backend() == "cpu"
    parser.add_argument("--requests", type=int, default=64 if small else 256, help="requests")
    parser.add_argument("--prompt", type=int, default=64 if small else 512, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=32 if small else 256, help="tokens of the longest answer")
    parser.add_argument("--long", type=int, default=400 if small else 8000, help="tokens of the prompt that interrupts")
    parser.add_argument("--shared", type=int, default=400 if small else 4000, help="tokens of prompts with a document")
    parser.add_argument("--turns", type=int, default=3, help="repetitions of interruption and prefix")
    parser.add_argument("--rate", type=float, default=1000.0, help="arrivals per second")
    parser.add_argument("--slots", type=int, default=16 if small else 64, help="requests that run together")
    parser.add_argument("--chunk", type=int, default=128 if small else 512, help="prompt tokens per step")
    parser.add_argument("--step-tokens", type=int, help="prompt tokens per step of several prompts (default: --chunk)")
    parser.add_argument("--shapes", type=chunk_shape, nargs="+", default=(), metavar="ROWSxWIDTH",
                        help="only these chunk shapes, for a shorter start of throughput (default: all)")  # fmt: skip
    parser.add_argument("--chunk-slowdown", type=float, default=EngineConfig().chunk_slowdown,
                        help="of a step with prompt tokens beside answers (default: %(default)s)")  # fmt: skip
    parser.add_argument("--decode-steps", type=int, default=8, help="decode steps per program at most")
    parser.add_argument("--half-batches-from", type=int, help="engine.half_batches_from (default: never)")
    parser.add_argument("--peak", type=float, help="TFLOP/s of a device, for the share of the optimum")
    parser.add_argument("--context", type=int, help="tokens of a sequence at most (default: as many as are needed)")
    parser.add_argument("--kernels", type=Path, help="folder for the time of each kernel (throughput)")
    parser.add_argument("--page", type=int, default=16, help="tokens per page")
    parser.add_argument("--latency", type=int, nargs=2, default=(64, 32) if small else (512, 128),
                        metavar=("PROMPT", "TOKENS"), help="lengths of latency")  # fmt: skip
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="prompts at once, of latency")
    parser.add_argument("--recipe", metavar="NAME", help="compress the weights by this recipe, such as fp8-dynamic")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python of an environment with vLLM, to be measured too")
    parser.add_argument("--no-rows", action="store_true", help="print the rows only")
    args = parser.parse_intermixed_args()
    overrides = [word for word in args.words if "=" in word]
    cache_compilations()
    name = next((word for word in args.words if "=" not in word), "tiny" if small else "llama3-1b")
    given = any(word.startswith("parallel.") for word in overrides)
    config = load_config(None, [f"model.preset={name}", "model.scan_layers=false", *overrides])
    rows: list[dict[str, Any]] = []

    def keep(work: str, **row: Any) -> None:
        dtype = args.recipe or config.precision.compute_dtype(jax.devices()[0].platform)
        cache = "" if config.precision.kv_cache == "none" else f" cache {config.precision.kv_cache}"
        prompt, tokens = args.latency if work == "latency" else (args.prompt, args.tokens)
        named = f"serve {name} {work} prompt {prompt} tokens {tokens} slots {args.slots} {dtype}{cache}"
        if "seconds_per_token" in row:
            row["tokens_per_second_per_device"] = 1 / row.pop("seconds_per_token") / row.get("devices", 1)
        rows.append({"work": named, "device": jax.devices()[0].device_kind, **row})
        if not args.no_rows:  # at once, as a later measurement may fail
            append_rows("serve", rows[-1:])

    if args.vllm:  # first, while the memory is free
        for row in vllm_rows(config, args):
            keep(**row)
    decoder = make_decoder(config, given, recipe=args.recipe, purpose="serve")
    for work in args.work:
        room = args.long + 64 if work == "interruption" else args.prompt + args.tokens
        room = args.shared + min(args.tokens, 64) if work == "prefix" else room
        sizes = EngineConfig(
            slots=args.slots, context=args.context or room, chunk=args.chunk, chunk_slowdown=args.chunk_slowdown,
            step_tokens=args.step_tokens, page_size=args.page, decode_steps=args.decode_steps,
            queue=args.requests + args.slots, half_batches_from=args.half_batches_from,
        )  # fmt: skip
        for row in WORKS[work](decoder, sizes, args):
            keep(
                work, implementation="jaxstack", devices=decoder.rules.mesh.size, decode_steps=args.decode_steps, **row
            )
    shown = (
        "work",
        "implementation",
        "variant",
        "milliseconds",
        "milliseconds_per_step",
        "tokens_per_second_per_device",
        "times_sequential",
        "times_alone",
    )
    first = ("first_token_milliseconds", "first_token_times_without")
    print_table(
        rows, (*shown, "steady_tokens_per_second", "share_of_optimum", "times_without", *first, "start_seconds")
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
