"""Makes docs/performance.md from the rows in benchmarks/results/, so that no number stands there that no run gave.

python scripts/performance_page.py
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.convergence import picture

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md"
PICTURE = PAGE.parent / "pictures" / "convergence.svg"
ELSEWHERE = ("recovery",)
"""Results that another page is made from."""
PARTS_OF_A_START = (
    "imports", "devices and model", "lowering", "compilation", "report", "state", "data", "first step",
)  # fmt: skip
PARTS_OF_A_STEP = ("matmuls", "attention", "fusions", "copies", "collectives", "idle")

PREFACE = """\
# Performance

This page is made by `python scripts/performance_page.py` from the rows that the benchmarks append to
`benchmarks/results/`. Do not edit it. Of each work, implementation, variant and device it shows the newest row; the
files keep those before it.

How to read it:

- Tokens/s, TFLOP/s and memory are those of one device. The time is that of one step (or one call) on all devices.
- TFLOP/s are model FLOPs: 6 x the parameters of the matmuls (the input embedding not counted, the output head
  counted), and causal attention at half of 12 x layers x sequence x (heads x head_dim), per token. Recomputation is
  not counted. Every implementation is given the same count for the same work.
- MFU divides by the dense bfloat16 peak of the device, from its data sheet (989 TFLOP/s for H100 SXM and H200), also
  where FP8 is used.
- Compare only rows of one run: the same date and command under one heading. Machines, clocks, drivers and other users
  differ between runs. Where a peer and jaxstack stand in one run, they took turns on the same device.
- A dash means that the row has no such value.

Every row names its command. Run it on your own machine; it appends a row of its own.
"""

Row = Mapping[str, Any]


def _number(key: str, pattern: str, factor: float = 1.0) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row.get(key)
        return pattern.format(value * factor) if isinstance(value, int | float) else "-"

    return show


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row.get(key) or "-").replace("|", "\\|")


def _fp8_matmuls(row: Row) -> str:
    """How many of the compiled step's matmuls run in FP8, where some do."""
    counted = row.get("matmuls")  # of a profile it is their time
    return f"{counted['fp8']} of {counted['all']}" if isinstance(counted, Mapping) and counted["fp8"] else "-"


def _versions(row: Row) -> str:
    """Python, and of the rest what the implementation is made of; a peer's own version stands in its name."""
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
    "tokens/s/device": _number("tokens_per_second_per_device", "{:,.0f}"),
    "TFLOP/s/device": _number("tflops_per_device", "{:.4g}"),
    "MFU": _number("mfu", "{:.1f} %", 100),
    "of the limit": _number("limit_fraction", "{:.0f} %", 100),
    "gather ms": _number("gather_milliseconds", "{:.3f}"),
    "scatter ms": _number("scatter_milliseconds", "{:.3f}"),
    "forward ms": _number("forward_milliseconds", "{:.3f}"),
    "ms": _number("milliseconds", "{:,.4g}"),
    "SM MHz": _number("sm_mhz", "{:,.0f}"),
    "W": _number("watts", "{:.0f}"),
    "update ms": _number("update_milliseconds", "{:,.3g}"),
    **{f"{name} ms": _number(name, "{:.1f}") for name in PARTS_OF_A_STEP},
    "start to first step s": _number("seconds", "{:.1f}"),
    **{f"{name} s": _number(name, "{:.1f}") for name in PARTS_OF_A_START},
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
    "density": _number("density", "{:.3f}"),
    "speedup": _number("speedup", "{:.2f}"),
    "matmul alone TFLOP/s": _number("gemm_tflops", "{:.0f}"),
    "transposed TFLOP/s": _number("gemm_transposed_tflops", "{:.0f}"),
    "peak memory GiB": _number("peak_memory_bytes", "{:.1f}", 2**-30),
    "beside inputs and outputs GiB": _number("extra_bytes", "{:.2f}", 2**-30),
    "GB/s": _number("gigabytes_per_second", "{:,.0f}"),
    "of a copy's GB/s": _number("roofline_fraction", "{:.0f} %", 100),
    "date": lambda row: _text("date")(row)[:16].replace("T", " "),
    "command": lambda row: f"`{row['command']}`",
    "versions": _versions,
}


NOTES = {
    "ablation": """\
Every row has what the rows before it have, on the same batches of real text. `loss` is the mean over the last quarter
of the steps, `loss ratio` and `speedup` are against the first row. The script says what the first row is.

The fastest row is 16.9 times as fast as the first, at 1.005 of its loss after 30 steps; longer runs are under
`convergence`. The last two rows give speed back. With eight layers a scan saves two seconds of compiling and no memory;
rematerialisation saves 40 % of the memory for 7 % of the speed.
""",
    "attention": """\
`jaxstack mosaic` is the default on Hopper, but at head dim 256, where cuDNN is faster and is taken. Implementations of
jax take turns, torch follows in a process of its own on a GPU that has cooled down a little; under load an H200 lowers
its clocks, so a second run differs.

At head dim 64 the exponentials take as many cycles of the forward as the matmuls: a third warpgroup keeps both busy.
At 1,024 causal tokens two are faster: tiles of 192 queries compute a third more than those of 128.
Where ours is behind: the forward without a mask, at 2 x 8192; the forward at head dim 192; head dim 256, where the
backward is two kernels with seven products in place of five.
""",
    "collective_matmul": """\
Up and down of an MLP whose rows lie split over the devices between matmuls; `ms` is forward and backward. `serialised`
is XLA's matmul after an all-gather and before a reduce-scatter, `no communication` the same without both: the most that
can be won. `gather`, `scatter` and `forward` are the two parts and the whole forward, the last columns our matmul alone
on one device beside XLA's.

Since these rows were measured a program of our kernels claims its tiles while it runs, see `docs/kernels.md`. Two forms
were measured and are gone: `pair`, in which two multiprocessors share an operand, was no faster, and chunks sent by
NCCL's permutes beside XLA's matmuls were slower than the serialised form.
""",
    "convergence": f"""\
Every precision sees the same batches in the same order. `loss` is the mean over the last tenth of a row's tokens, `loss
ratio` that by bfloat16's over the same tokens; held-out loss where all tokens were seen. Some recipes ran beside each
other, each on a GPU of its own.

In the rows of 290 steps, which the picture shows, float32 was cut off by its time two steps before the end. Each FP8
recipe ends within 1 % of bfloat16, in training and held out; so does float32 in training. The losses part between steps
16 and 64, where that of `delayed` is 2.4 % below bfloat16's, and come closer from there. These are single runs: a ratio
below one is not to FP8's credit.

The rows of 1,221 steps were cut off by their time, after 59 to 80 % of a schedule with a learning rate of 1e-3 and 61
steps of warm-up. With 32 steps to that rate, losses jumped, those of some recipes more than others'; the script now
goes to half of it, over a tenth of the schedule.

![Training loss of each precision, against tokens and against time](pictures/{PICTURE.name})
""",
    "device": """\
The ceilings of the device, and in the rows of `limit` the step that they allow: every matmul at the best rate of its
dtype, attention at its best rate, nothing else taking time. In other tables `of the limit` is the share of that which
was reached. GB/s of collectives are bus bandwidth as NCCL's tests count it. `update ms` is what reading and writing
weights, gradient and moments once would take at the speed of the copy; it is not part of the limit.

The rows below were measured in bursts, on GPUs that had not yet reached their limit of power. The script now measures
each kernel over two seconds of load, in which an H200 draws its 700 W and lowers its clock from 1,980 MHz to 1,440 to
1,700. So measured, in a run of which only these figures were kept (2026-11-22): matmuls in bfloat16 662 to 692
TFLOP/s, in FP8 1,233 to 1,332, in int8 1,213 to 1,343; a copy 4.28 TB/s; attention forward and backward 510 (8,192
tokens) and 539 (65,536) at head dim 128, 443 (8,192) and 263 (1,024) at 64. The limits in tokens/s are then 777,255
for gpt2-124m, 69,677 and 97,123 (FP8) for llama3-1b, 12,868 and 20,566 (FP8) for llama3-8b on four GPUs, 6,238 for it
at 65,536 tokens. `of the limit` in other tables still divides by the rows below.
""",
    "parallel": """\
Whole steps in parallel layouts. `efficiency` is tokens/s a device against one device with as many tokens a device.

Our goal for llama3-8b at 65,536 tokens on four GPUs, 5,500 tokens/s, is missed: unrolled and without
rematerialisation it makes 4,950 to 4,977 with weights and gradients by the copy engines, in turns with 4,740 to 4,790
with NCCL's collectives, and compiles in 139 s in place of 98 (2026-11-22, of which only these figures were kept). By a
profile of that step attention takes 1,933 of 3,205 ms, matmuls 900, XLA's own kernels 313, and in 31 nothing runs; the
GPUs draw 675 of their 700 W, at 1,592 MHz. At its kernels' rates under load the limit is 6,238 (`device` above).
1,048,576 tokens over four GPUs, two layers with `save_attention_offload`, in the same run: 7,724 tokens/s (33.9 s a
step), 41.6 GiB a GPU.
""",
    "pipeline": """\
The gradients of a step, without optimizer. `bubble` is the time in which stages wait, in parts of the work: the work of
a microbatch is what a step takes longer with one more. `simulated bubble` is the schedule's own.
""",
    "attention_kinds": """\
`density` is the share of the causal pairs of query and key that a kind computes, `speedup` is against flash attention
in the same run. Linear attention and Performer compute no such pairs; they are XLA programs.
""",
    "fp8": """\
A work is one weight, its rows are those of a step on one device. `alone` is a product of operands that are in FP8
already; the others round them first, and `forward and backward` rounds the incoming gradient too. Rows of the same
shape from 19:47 and later are of different kernels: the block-scaled product has got its sums out of local memory, and
one kernel rounds and turns for `current` and `delayed`, in one pass over memory.

What bounds them: products of `current` run at the rate of cuBLAS (`device` above), those of gradients at 1,390 TFLOP/s
against 1,570 of the forward in the profiled step of 22:58, as their sums are kept in float32 throughout. The
block-scaled product scales the sum of every 128 products outside of the tensor cores, for weight gradients by two
factors. Two warpgroups take turns to hide it; a quarter to a third of the FP8 rate is lost all the same.
""",
    "grouped_matmul": """\
`one dense matmul` has the FLOPs of all groups in one product; `groups not aligned` copies the rows to where a tile
begins first, which the layers of this repository do not need.
""",
    "linear_cross_entropy": """\
`sum` is `linear_cross_entropy_sum`, which training uses; `per token` is `linear_cross_entropy`. A bfloat16 weight's
gradient is summed up over chunks of tokens in bfloat16, to stay below 1 GiB; its error there is more than twice that of
plain bfloat16, which the script reports as a failed check. With a float32 weight, as in training, it is that of plain
bfloat16.
""",
    "pointwise": """\
XLA's fusions against the bandwidth of a plain copy in the same run. The norm's and the rotation's backward stay below
it; since these rows were measured the norm's is a kernel of our own.
""",
    "startup": """\
From the start of the process to the end of the first step, as `python -m jaxstack.train` does it, with an empty cache
of compiled programs and with what the first start left there. The cache is on in every command
(`~/.cache/jaxstack/compiled`). `lowering` is tracing in Python, which a second start repeats; `state` creates the
weights and moments, which a start now does while Python traces the step. Our goals for llama3-8b are 120 s for the
first start and 30 s for the second.

On four GPUs, unrolled, by copies (2026-11-22, of which only these figures were kept): 78.3 s and 34.0 s. With the
compiled program read once for the report, and the state's program compiled beside the step's, 87.1 s and 32.8 s; of the
second 9.3 s were tracing, 4.3 the step from the cache, 3.1 the report, 2.0 the first step, and 6.7 the state, whose
program neither traces nor compiles that long: on two GPUs it takes half of that. Since then the state is created beside
the tracing, which leaves the time of this to be measured again.
""",
    "replica_check": """\
What comparing the copies of the train state costs (`resilience.checksum_every_steps`).
""",
    "step_profile": """\
Milliseconds of a traced step by what its kernels are: `fusions` are XLA's own kernels (norms, rotations, activations,
casts, the softmax of the loss, the optimizer). Under the profiler XLA launches kernel by kernel, so that `idle` is more
than in the untraced steps of `train_step`. The row of llama3-8b is of a machine on which the step took 764 ms.
""",
    "train_step": """\
`scanned` at 8B runs one compiled layer in a loop, and gathers each layer's weights again in the backward.

Power bounds most of these steps. Under matmuls an H200 draws its 700 W after a fraction of a second and lowers
its clock, from 1,980 MHz to 1,440 to 1,600 by the machine, which is why machines differ by several percent. A step
that hides communication, or closes gaps between kernels, then runs at a lower clock, and gains less than the time it
hid; what takes less energy gains. `SM MHz` is the slowest GPU's clock during a row's measurement, `W` the mean power
of a GPU; rows without them are older. The figures of the next table are of runs whose rows were not kept.

| each work in turns on one machine, 2026-11-22 | tokens/s/GPU | of the limit under load | MHz, W | goal |
| --- | --- | --- | --- | --- |
| gpt2-124m | 607,939 | 78 % | 1,559, 693 | 700,000 |
| the same, torch 2.11 compiled | 536,874 | 69 % | 1,910 | |
| llama3-1b bf16 | 61,391 | 88 % | 1,556 | 64,000 |
| the same, torch 2.11 compiled | 56,265 | 81 % | | |
| the same, torchtitan 0.2.2 | 54,627 | 78 % | | |
| the same, MaxText 0.2.5 | 47,080 | 68 % | | |
| llama3-1b FP8, `delayed` in all layers | 77,157 | 79 % | | 80,000 |
| the same, `current` | 73,248 | 75 % | | |
| the same, torchtitan 0.2.2 | 62,626 | 64 % | | |
| llama3-8b bf16, gathered once, by copies | 10,047, 9,984; later 9,846 | 78 % | later 1,581, 632 | 11,800 |
| the same by NCCL, sums in bfloat16 | 10,077, 10,127 | 79 % | | |
| llama3-8b FP8, `fsdp: 4`, by copies | 15,229, 15,065 | 74 % | the latter 1,471 | 16,000 |
| the same by NCCL, sums in bfloat16 | 14,867 | 72 % | | |

MaxText ran unrolled, without rematerialisation, with cuDNN's attention; 56,400 was measured of it elsewhere, with other
flags, so that the figure here is of our settings for it rather than of its best.

What bounds the steps on one GPU, by profiles of the step before the loss's logits left their product as exponentials:

- gpt2-124m: 106.9 ms, of which the matmuls take 63.9 at 500 to 750 TFLOP/s, attention 15.7 (head dim 64, 1,024 tokens)
  and what surrounds its dQ, which is summed up in float32, 2.3. The largest gaps to what the memory or the tensor cores
  allow: the up-projection, whose GELU cuBLAS takes in, at 528 TFLOP/s (2 ms over 750), GELU's gradient inside of a
  product, whose tiles it keeps waiting (2.3 over), the loss's pass over its logits (4.5; in turns in one process the
  step took 111.6 ms with it and 109.7 without, as our product is slower than cuBLAS's), LayerNorm 4.5 (0.9 over), sums
  of bias gradients 2.4, and 2.9 in which nothing runs. Our goal of 700,000 tokens/s is 93.6 ms.
- llama3-1b: 544 ms: matmuls 315, attention 153, SwiGLU's gradient inside of a product 33 (cuBLAS would take 23 for the
  product alone), SwiGLU 6.8, AdamW 9.4, both at the rate of a copy, the loss's pass over its logits 6, which is gone.
  Our goal of 64,000 (512 ms) needs attention faster, or that product.
- llama3-1b in FP8: with delayed scaling and all layers in FP8 the head is left in bfloat16 (71 of 434 ms), attention
  takes 151 and the FP8 products 142. In turns in one process the step took 424.4 ms before, and 421.6 ms since the
  norm is computed where it is rounded and maxima and scales in the kernels; 80,000 tokens/s are 409.6. With blocks of
  128 the products take 202 ms, at 946 TFLOP/s: faster than bfloat16 by 7 %, slower than one scale a tensor.
- llama3-8b on four GPUs, gathered once (`data: 4`, `zero: 2`), by copies: 764 ms on one machine, 809 to 832 on another.
  By a profile of the first GPU of the former matmuls take 446 ms at about 730 TFLOP/s, attention 141, SwiGLU's gradient
  inside of a product 49, passes that take gradients apart and put weights in order 16, AdamW 14, copies run for 68 ms
  beside them; in 24 nothing runs, and in 8 it waits in the last sum for slower GPUs. Our goal of 11,800 is 694 ms, less
  than its kernels take. A GPU receives 24 or 36 GB a step; both cuBLAS's and our own kernels start one program a
  multiprocessor, and those for which NCCL leaves no place run afterwards. By copies, which take no multiprocessor, the
  step is nevertheless as fast as with NCCL's sums in bfloat16 (the table above), and sums in float32. In turns in one
  process, eight layers: `delayed` FP8 in all layers and `fsdp: 4` 187.9 ms by NCCL, 176.9 by copies; bfloat16 gathered
  once 233.4 by NCCL with sums in bfloat16, 230.4 by copies; the same permutes by NCCL's kernels 255.6, gradients by an
  all-to-all of copies 239.0. On two GPUs before: 252.9 ms; 252.8 with our kernels' tiles dealt out by the hardware;
  250.9 with NCCL's symmetric buffers and its policy of no multiprocessors.
- llama3-8b in FP8 on four GPUs (2 x 8192 a GPU): 1,066 to 1,088 ms by copies, 1.3 % less than by NCCL in the same run.
  Our goal of 16,000 is 1,024.

Earlier runs of ours and compiled peers in turn on one GPU, in tokens/s: llama3-1b in bfloat16 60,901, torch 2.11
56,100, torchtitan 0.2.2 54,596; in FP8 77,881 (delayed scaling) and torchtitan 62,963 (its default, dynamic scaling),
both in every layer but not in the head; gpt2-124m 612,939 and torch 546,471. On another machine llama3-1b in bfloat16
made 62,287 and torchtitan 55,662, in a run that was cut off before it wrote its rows.

Tried, slower and dropped: a Triton kernel for the gradients of norms in blocks of four rows (one row by a few warps is
faster than XLA), the gradient of the activation beside the next tile's product, concurrent command buffers,
XLA's own double-buffered loops and pipelined all-gathers. In turns, one process a model: the state's small arrays in
one kernel each, LayerNorm's forward by a Triton kernel, biases' gradients where LayerNorm's backward reads them, and
dQ's zeros in the pass before took gpt2-124m from 107.7 to 107.0 ms, llama3-1b from 531.8 to 531.7: too little for
their code. An activation inside of the product before it, by a kernel of our own: SwiGLU 1.73 ms against 1.80 of
XLA's two kernels, too little for its code; GELU 0.60 against cuBLAS's 0.59.
Attention at head dim 64 (llama3-1b's, forward 2.43 ms, backward 6.01, alone on a cool GPU): the scores of the next tile
and the products of the one before beside a tile's softmax (2.63 to 2.82; backward 6.33 to 6.78), and an eighth to three
eighths of the exponentials as polynomials (2.46 to 2.83). No unit of a multiprocessor is its limit by counting. An
order of programs that keeps heads together whose keys fit in the cache: backward 6.12 to 6.30 ms against 6.07 in the
same run; gpt2-124m's forward 0.345 to 0.401 against 0.320, its backward 0.953 against 0.965, 0.1 % of its step.
""",
}
"""Section -> what a reader of its table should know."""


def newest_rows(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each work, implementation, variant and device, works in the order of their first appearance."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row.get(name) for name in ("work", "implementation", "variant", "device", "devices"))
        if key not in newest or row["date"] >= newest[key]["date"]:
            newest[key] = row
    works = list(dict.fromkeys(key[0] for key in newest))
    return sorted(newest.values(), key=lambda row: works.index(row.get("work")))


def read_rows(path: Path) -> list[Row]:
    """The newest rows of a file; none where there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return newest_rows(json.loads(line) for line in lines if line.strip())


def beside_limits(rows: Iterable[Row], limits: Iterable[Row]) -> list[Row]:
    """The rows, with `limit_fraction` where the limit of their work on their device is known."""
    rate, places = "tokens_per_second_per_device", ("work", "device", "devices")
    known = {tuple(row[name] for name in places): row[rate] for row in limits}
    result = []
    for row in rows:
        limit = known.get(tuple(row.get(name) for name in places))
        measured = limit and rate in row and row["implementation"] != "limit"
        result.append({**row, "limit_fraction": row[rate] / limit} if measured else row)
    return result


def make_page(results: Path = RESULTS) -> str:
    """The whole page; a section for each benchmark script."""
    limits = [row for row in read_rows(results / "device.jsonl") if row["implementation"] == "limit"]
    parts = [PREFACE]
    for path in sorted(path for path in results.glob("*.jsonl") if path.stem not in ELSEWHERE):
        lines = [[show(row) for show in COLUMNS.values()] for row in beside_limits(read_rows(path), limits)]
        # Columns of which no row has a value only make a table wide.
        shown = [index for index in range(len(COLUMNS)) if any(line[index] != "-" for line in lines)]
        table = [list(COLUMNS), ["---"] * len(COLUMNS), *lines]
        text = "\n".join("| " + " | ".join(cells[index] for index in shown) + " |" for cells in table)
        note = NOTES.get(path.stem, "")
        parts.append(f"## {path.stem}\n\n" + (note + "\n" if note else "") + text + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    curves = read_rows(RESULTS / "convergence.jsonl")
    if curves:
        work = max(curves, key=lambda row: row["date"])["work"]
        PICTURE.write_text(picture(row for row in curves if row["work"] == work), encoding="utf-8")
        print(PICTURE.relative_to(ROOT))
