"""The tables of docs/performance-rows.md: one section per benchmark, one line per row."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from scripts.pages.rows import RATE, Row, read_rows

ELSEWHERE = {
    "recovery": "reliability.md#measured",
    "fields": "fields.md",
    "compressed_models": "compression.md#what-the-recipes-cost",
    "cache_formats": "compression_cache.md#claims-and-results",
    "web": "export.md#in-a-browser",
    "families": "huggingface.md#supported-families",
    "learned_cost_errors": "plan.md#learned-cost",
}
"""Results that another page is made from -> where it shows them."""
PARTS_OF_A_START = (
    "imports", "devices and model", "lowering", "compilation", "report", "state", "data", "first step",
)  # fmt: skip
PARTS_OF_A_FIRST_CALL = ("tracing", "MLIR", "layouts", "XLA", "ptxas")
PARTS_OF_A_STEP = ("matmuls", "attention", "fusions", "copies", "collectives", "idle")

PREFACE = """\
# All rows

After this page you can look up any measured number, see the commit and the command that gave it, and run that command
on your own machine. Start with [Performance](performance.md), which shows the main workloads as charts.

<!-- Made by `python -m scripts.pages` from benchmarks/results/. Do not edit. -->

The tables show the newest row of each workload, implementation, variant and device. Commands have the present path of
their script; at the row's commit it may have been in another folder of `benchmarks/`.

- Tokens/s, TFLOP/s and memory are those of one device. The time is that of one step (or one call) on all devices.
- TFLOP/s are model FLOPs: 6 x the parameters of the matrix products (the output head counts, the input embedding does
  not), and causal attention at half of 12 x layers x sequence x (heads x head_dim), per token. Recomputation does not
  count. All implementations of a workload have the same count.
- MFU divides by the dense bfloat16 peak in the device's data sheet (989 TFLOP/s for H100 SXM and H200), for FP8 too.
- Compare rows of one run only. Machines, clocks, drivers and other users differ between runs.
- Rows with *at the start* tokens/s are the second half of 30 s of steps, or of as many as `--seconds` in the command
  says. Rows without are short measurements.
- A dash means that the row has no such value.
- The code may have changed since a row's commit: [Claims](claims.md) marks the rows behind claims for which it has.
"""
NOTES = {
    "ablation": """\
Each row has what the rows before it have, on the same batches of real text. `loss` is the mean over the last quarter of
the steps; `loss ratio` and `speedup` are relative to the first row, `speedup TF32` to that of TF32 matmuls. Energy is
that of the driver's counter over all steps, cost that of the row's price of a GPU hour.
""",
    "attention": """\
Implementations in jax take turns. PyTorch follows in a process of its own, after the GPU has cooled down.
""",
    "attention_kinds": """\
`density` is the share of the causal pairs of query and key that a kind computes; `speedup` is relative to flash
attention in the same run.
""",
    "attention_random": """\
Shapes drawn at random, for which nobody tuned block sizes: batch, tokens, query heads / key heads, head dim, mask.
`both` is forward and backward together. A ratio above 1 says that ours is faster than cuDNN in the same run;
`difference` is the largest relative difference of output and gradients between the two.
""",
    "all_reduce": """\
Sums of an array of each device over all devices, 32 in a chain as in the layers of a model, less the time of the chain
without them. Where a program has one step, what the host does for each sum when a program starts counts too. `xla` is
XLA's default, which is kernels of its own for small arrays; `mosaic` is ours, `+ norm` with the residual addition and
the RMS norm that follow.
""",
    "collective_matmul": """\
The up and down projections of an MLP whose rows are sharded between the matrix products; `ms` is forward and backward.
`serialised` is XLA's product after an all-gather and before a reduce-scatter; `no communication` has neither.
""",
    "convergence": """\
All precisions see the same batches in the same order. `loss` is the mean over the last tenth of a row's tokens; `loss
ratio` is relative to bfloat16 over the same tokens. Held-out loss is given where the run reached all tokens.
""",
    "cpu_matmuls": """\
Every matrix product of the step of `cpu_nanogpt`, the fastest call of each, added up: with that library no step on as
many cores is faster. XLA's products take longer than PyTorch's, so our step can be ahead only by what is no product.
This was the question of the script, which has been removed since.
""",
    "cpu_nanogpt": """\
Whole steps on a CPU; rows of one run took turns. Compare them with the products alone on as many cores only.
""",
    "data_wait": """\
A simulated storage takes two steps to read a batch and serves four at a time, half a step per batch on average.
`bursts`: it serves nothing for six steps, then twice as much for six. `one stalled file`: one of 64 files hangs for
ten steps. `decoding` and `heavy decoding`: half a step and a step and a half of Python per batch instead. `waiting for
data` is the share of the time of the steps after the first batch; `waiting, read-ahead full` begins after as many
batches as are read ahead, since all workers begin at the same time and the first batches become ready together.
`slowdown` is relative to batches in memory. Every batch was equal to that of a serial reader.
""",
    "device": """\
Rates that the device reaches; the rows of `limit` are the steps that follow from them: every matrix product at the best
rate of its dtype, attention at its best rate, nothing else taking time. Rows with SM MHz and W were measured under
load. GB/s of collectives are bus bandwidth as NCCL's tests define it. `update ms` is the time to read and write
weights, gradients and moments once at the speed of a copy; the limit does not include it.
""",
    "first_call": """\
CPU seconds until the first call of causal attention with a new shape is compiled. `tracing`, `MLIR` and
`layouts` (the inference of register layouts) are jax's, in Python, and remain where a process finds the compiled
program in jax's cache; `XLA` and `ptxas` are the compiler's. `separate loops` is an older version, whose kernels
had loops for all kinds of tiles, also those that the mask does not have.
""",
    "fp8": """\
A work is one weight; its rows are the products of one step on one device. `alone` is a product of operands that are in
FP8 already; the others quantize them first, and `forward and backward` also quantizes the incoming gradient.
""",
    "grouped_matmul": """\
`one dense matmul` has the FLOPs of all groups in one product; `groups not aligned` first copies the rows to tile
boundaries.
""",
    "linear_cross_entropy": """\
`sum` is `linear_cross_entropy_sum`, which training uses; `per token` is `linear_cross_entropy`. With a bfloat16 weight,
the weight's gradient is accumulated in bfloat16 over chunks of tokens.
""",
    "mixers": """\
Hybrids of three recurrent layers to one of attention, and a Transformer with about as many parameters, on the same
batches. `loss` is the mean over the last tenth of the tokens; `loss ratio` is relative to the Transformer's of the same
seed. Runs shared a GPU, so their speed is not given.
""",
    "shipped": """\
Configurations of `configs/` as they are shipped, on a CPU; `seconds` beside whatever else the machine did.
""",
    "overlap": """\
Milliseconds of a traced step on device 0. `overlap` is the share of `communication` during which another kernel
computes; `hidden` is the share of the communication of the row without overlap that adds no time to the kernels, which
counts kernels that communicate themselves.
""",
    "memory_copies": """\
Steps of a run under the launcher without copies of its state in host memory (`interval` 0), and with them;
`waited s` is the time that copies held up between all of these steps, `cost` what the copies add to the mean step.
""",
    "parallel": """\
Whole steps in parallel layouts. `efficiency` is tokens/s per device relative to one device with as many tokens.
""",
    "pipeline": """\
The gradients of a step, without the optimizer. `bubble` is the idle time of the stages as a fraction of the work;
`simulated bubble` is that of the schedule.
""",
    "pointwise": "Elementwise operations relative to the bandwidth of a copy in the same run.\n",
    "processes": """\
One process with all GPUs of a machine beside one process for each; `relative speed` is that of the step of one process.
""",
    "recurrent": """\
`ms` is forward and backward. `copy ms` is the time in which a copy reads and writes as many bytes as inputs, outputs
and gradients have: no kernel is faster. flash-linear-attention's SSD takes inputs that are repeated for each head.
""",
    "remat": """\
One workload with scanned layers under each rematerialisation policy; `slowdown` is relative to `none` in the same run.
""",
    "reinforce": """\
A step of GRPO: sampling, rewards and one update. TRL's weights and moments are bfloat16, ours float32. A peer whose
steps are long has few `steps measured`. `log-probability difference` is between sampler and trained model.
""",
    "replica_check": "Cost of comparing the replicas of the train state (`resilience.checksum_every_steps`).\n",
    "rewards": """\
Rewards of held-out prompts before and after reinforcement learning, of sampled answers and of the likeliest ones;
`minutes` are those of the supervised start and of the reinforcement together.
""",
    "schedules": """\
Each schedule at the best of the same peak rates, on the same batches. `steps to target` is the first evaluation with a
held-out loss at or below `target`, the lowest that a constant rate reaches; `steps ratio` is relative to that rate's.
""",
    "sequence_length": """\
The longest sequence whose train step, compiled for eight H200s, fits into the bytes that tensor parallelism needs for
its own. `length ratio` is relative to tensor parallelism; `bytes/token` are those of a further token, on each device.
""",
    "startup": """\
From the start of the process to the end of the first step: first with an empty cache of compiled programs, then with
the cache that the first start filled.
""",
    "step_profile": """\
Milliseconds of a traced step by kind of kernel. `fusions` are all kernels that are not products of cuBLAS,
attention, copies or collectives: elementwise passes, and matrix products of our own that are fused with one.
""",
    "train_step": "Whole training steps. `scanned` runs one compiled layer in a loop.\n",
}
"""Benchmark -> what a reader of its table needs to know. Notes hold no measured figures."""


def _number(key: str, pattern: str, factor: float = 1.0) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row.get(key)
        return pattern.format(value * factor) if isinstance(value, int | float) else "-"

    return show


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row.get(key) or "-").replace("|", "\\|")


def _fp8_matmuls(row: Row) -> str:
    """Return how many of the compiled step's matrix products run in FP8."""
    counted = row.get("matmuls")  # in a profile this is their time
    return f"{counted['fp8']} of {counted['all']}" if isinstance(counted, Mapping) and counted["fp8"] else "-"


def _versions(row: Row) -> str:
    """Return the versions that matter for the row; a peer's own version is part of its name."""
    ours = row["implementation"].startswith("jaxstack")
    names = ("python", "jax", "flax") if ours else ("python",)
    known = row.get("versions") or {}
    return ", ".join(f"{name} {known[name]}" for name in names if name in known) or "-"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "work": _text("work"),
    "implementation": _text("implementation"),
    "variant": _text("variant"),
    "device": _text("device"),
    "devices": _text("devices"),
    "tokens/s/device": _number(RATE, "{:,.0f}"),
    "at the start": _number("start_tokens_per_second_per_device", "{:,.0f}"),
    "TFLOP/s/device": _number("tflops_per_device", "{:.4g}"),
    "MFU": _number("mfu", "{:.1f} %", 100),
    "of the limit": _number("limit_fraction", "{:.0f} %", 100),
    "waiting for data": _number("wait_fraction", "{:.2f} %", 100),
    "waiting, read-ahead full": _number("filled_wait_fraction", "{:.2f} %", 100),
    "gather ms": _number("gather_milliseconds", "{:.3f}"),
    "scatter ms": _number("scatter_milliseconds", "{:.3f}"),
    "forward ms": _number("forward_milliseconds", "{:.3f}"),
    "forward TFLOP/s": _number("ours_forward_tflops", "{:.0f}"),
    "cuDNN forward TFLOP/s": _number("cudnn_forward_tflops", "{:.0f}"),
    "forward ratio": _number("forward_ratio", "{:.2f}"),
    "both TFLOP/s": _number("ours_both_tflops", "{:.0f}"),
    "cuDNN both TFLOP/s": _number("cudnn_both_tflops", "{:.0f}"),
    "both ratio": _number("both_ratio", "{:.2f}"),
    "difference": _number("difference", "{:.1e}"),
    "copy forward ms": _number("copy_forward_milliseconds", "{:.3f}"),
    "ms": _number("milliseconds", "{:,.4g}"),
    "copy ms": _number("copy_milliseconds", "{:.3f}"),
    "refused": _text("refused"),
    "SM MHz": _number("sm_mhz", "{:,.0f}"),
    "W": _number("watts", "{:.0f}"),
    "J/step": _number("joules_per_step", "{:,.0f}"),
    "update ms": _number("update_milliseconds", "{:,.3g}"),
    **{f"{name} ms": _number(name, "{:.1f}") for name in PARTS_OF_A_STEP},
    "start to first step s": _number("seconds", "{:.1f}"),
    **{f"{name} s": _number(name, "{:.1f}") for name in PARTS_OF_A_START},
    "CPU s": _number("first_call_cpu_seconds", "{:.2f}"),
    **{f"{name} CPU s": _number(name, "{:.2f}") for name in PARTS_OF_A_FIRST_CALL},
    "compile s": _number("compile_seconds", "{:.0f}"),
    "FP8 matmuls": _fp8_matmuls,
    "efficiency": _number("efficiency", "{:.1f} %", 100),
    "bubble": _number("bubble", "{:.3f}"),
    "simulated bubble": _number("simulated_bubble", "{:.3f}"),
    "tokens": _number("tokens", "{:,.0f}"),
    "loss": _number("final_loss", "{:.4f}"),
    "loss ratio": _number("loss_ratio", "{:.4f}"),
    "held-out loss": _number("eval_loss", "{:.4f}"),
    "held-out ratio": _number("eval_loss_ratio", "{:.4f}"),
    "parameters": _number("parameters", "{:,.0f}"),
    "samples/s": _number("samples_per_second", "{:.1f}"),
    "processes": _text("processes"),
    "interval": _text("interval"),
    "step s": _number("step_seconds", "{:.2f}"),
    "slowest step s": _number("slowest_step_seconds", "{:.2f}"),
    "relative speed": _number("relative_speed", "{:.3f}"),
    "copy GiB": _number("copy_gib", "{:.1f}"),
    "blocked s": _number("blocked_seconds", "{:.2f}"),
    "waited s": _number("waited_seconds", "{:.1f}"),
    "cost": _number("cost", "{:.1f} %", 100),
    "rollout s": _number("rollout_seconds", "{:.2f}"),
    "train s": _number("train_seconds", "{:.2f}"),
    "steps measured": _number("measured_steps", "{:.0f}"),
    "log-probability difference": _number("sampler_logprob_difference", "{:.4f}"),
    "reward before": _number("start_reward", "{:.3f}"),
    "reward": _number("reward", "{:.3f}"),
    "likeliest before": _number("start_reward_greedy", "{:.3f}"),
    "likeliest": _number("reward_greedy", "{:.3f}"),
    "minutes": _number("minutes", "{:.1f}"),
    "density": _number("density", "{:.3f}"),
    "speedup": _number("speedup", "{:.2f}"),
    "speedup TF32": _number("speedup_tf32", "{:.2f}"),
    "loss ratio TF32": _number("loss_ratio_tf32", "{:.4f}"),
    "J/1000 tokens": _number("joules_per_token", "{:.2f}", 1000),
    "dollars/10^9 tokens": _number("dollars_per_billion_tokens", "{:.2f}"),
    "slowdown": _number("slowdown", "{:.3f}"),
    **{f"{name} ms": _number(name, "{:.1f}") for name in ("computation", "communication", "overlapped")},
    "overlap": _number("overlap", "{:.1f} %", 100),
    "hidden": _number("hidden", "{:.1f} %", 100),
    "peak rate": _number("learning_rate", "{:g}"),
    "lowest loss": _number("lowest_loss", "{:.4f}"),
    "target": _number("target", "{:.4f}"),
    "steps to target": _number("steps_to_target", "{:,.0f}"),
    "steps ratio": _number("steps_ratio", "{:.3f}"),
    "longest sequence": _number("longest_tokens", "{:,.0f}"),
    "length ratio": _number("length_ratio", "{:.2f}"),
    "bytes/token": _number("bytes_per_token", "{:,.0f}"),
    "matmul alone TFLOP/s": _number("gemm_tflops", "{:.0f}"),
    "transposed TFLOP/s": _number("gemm_transposed_tflops", "{:.0f}"),
    "peak memory GiB": _number("peak_memory_bytes", "{:.1f}", 2**-30),
    "temporary GiB": _number("extra_bytes", "{:.2f}", 2**-30),
    "GB/s": _number("gigabytes_per_second", "{:,.0f}"),
    "of the peak GB/s": _number("bandwidth_share", "{:.1f} %", 100),
    "of a copy's GB/s": _number("roofline_fraction", "{:.0f} %", 100),
    "date": lambda row: _text("date")(row)[:16].replace("T", " "),
    "commit": lambda row: (row.get("commit") or "-")[:7] + (" with changes" if row.get("note") else ""),
    "command": lambda row: f"`{row['command']}`",
    "versions": _versions,
}


def short_name(row: Row) -> str:
    """Return an implementation's name and version without details."""
    return re.sub(
        r"\+cu\d+|,? torch\.compile|, compiled.*|,? \w+ scanned.*| Gpt| Llama", "", row["implementation"]
    ).strip(", ")


def with_limits(rows: Iterable[Row], limits: Iterable[Row]) -> list[Row]:
    """Return the rows, with `limit_fraction` where the limit of their work on their device is known."""
    places = ("work", "device", "devices")
    known = {tuple(row[name] for name in places): row[RATE] for row in limits}
    result = []
    for row in rows:
        limit = known.get(tuple(row.get(name) for name in places))
        measured = limit and RATE in row and row["implementation"] != "limit"
        result.append({**row, "limit_fraction": row[RATE] / limit} if measured else row)
    return result


def link_to_rows(name: str) -> str:
    """Return the address, within docs/, of the table that shows the rows of a file of results."""
    return ELSEWHERE.get(name, f"performance-rows.md#{name}")


def rows_page(results: Path) -> str:
    """Return the page: a section for each benchmark script that has rows."""
    limits = [row for row in read_rows(results / "device.jsonl") if row["implementation"] == "limit"]
    parts = [PREFACE]
    for path in sorted(path for path in results.glob("*.jsonl") if path.stem not in ELSEWHERE):
        lines = [[show(row) for show in COLUMNS.values()] for row in with_limits(read_rows(path), limits)]
        # A column without any value would only make the table wider.
        shown = [index for index in range(len(COLUMNS)) if any(line[index] != "-" for line in lines)]
        table = [list(COLUMNS), ["---"] * len(COLUMNS), *lines]
        text = "\n".join("| " + " | ".join(cells[index] for index in shown) + " |" for cells in table)
        note = NOTES.get(path.stem, "")
        parts.append(f"## {path.stem}\n\n" + (note + "\n" if note else "") + text + "\n")
    return "\n".join(parts)
