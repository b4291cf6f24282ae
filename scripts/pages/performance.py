"""The performance pages and their charts.

Every figure on docs/performance.md, docs/performance-rows.md and docs/profiles.md comes from a row.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.bars import Bar, Group, draw_bars
from benchmarks.training.convergence import picture
from scripts.pages.page import Page
from scripts.pages.row_tables import rows_page, short_name
from scripts.pages.rows import (
    RATE,
    RESULTS,
    Comparison,
    Row,
    compare,
    is_sustained,
    newest_rows,
    read_all,
    read_rows,
    script_path,
)

WORKS = {
    "gpt2-124m bf16": "GPT-2 124M, bfloat16",
    "llama3-1b bf16": "Llama 1B, bfloat16",
    "llama3-1b fp8": "Llama 1B, FP8",
    "qwen3-30b-a3b of 6 layers bf16": "Qwen3 30B-A3B, 6 layers",
    "deepseek-v2-lite of 4 layers bf16": "DeepSeek V2 Lite, 4 layers",
    "deepseek-v2-lite of 4 layers fp8": "DeepSeek V2 Lite, 4 layers, FP8",
    "gpt-oss-20b of 2 layers bf16": "gpt-oss 20B, 2 layers",
    "gpt-oss-20b of 2 layers fp8": "gpt-oss 20B, 2 layers, FP8",
    "llama3-8b fsdp2 bf16": "Llama 8B, bfloat16, FSDP",
    "llama3-8b fsdp4 bf16": "Llama 8B, bfloat16, FSDP",
    "llama3-8b fsdp2 fp8": "Llama 8B, FP8, FSDP",
    "llama3-8b fsdp4 fp8": "Llama 8B, FP8, FSDP",
    "llama3-8b context2 65536 bf16": "Llama 8B, 65,536 tokens",
    "llama3-8b context4 65536 bf16": "Llama 8B, 65,536 tokens",
}
"""Name of a main work in the rows -> title on the page, the same for every number of GPUs."""
GOALS = {
    "gpt2-124m bf16": 1.25,
    "llama3-1b bf16": 1.20,
    "llama3-1b fp8": 1.30,
    "qwen3-30b-a3b of 6 layers bf16": 1.15,
    "deepseek-v2-lite of 4 layers bf16": 1.30,
    "deepseek-v2-lite of 4 layers fp8": 1.30,
    "gpt-oss-20b of 2 layers bf16": 1.30,
    "gpt-oss-20b of 2 layers fp8": 1.30,
    "llama3-8b fsdp2 bf16": 1.15,
    "llama3-8b fsdp4 bf16": 1.15,
    "llama3-8b fsdp2 fp8": 1.25,
    "llama3-8b fsdp4 fp8": 1.25,
    "llama3-8b context2 65536 bf16": 1.45,
    "llama3-8b context4 65536 bf16": 1.45,
}
"""Name of a main work -> the ratio to the fastest peer that the project aims for."""
PARTS = {
    "matmuls": ("first", "matmuls"),
    "attention": ("second", "attention"),
    "fusions": ("third", "other kernels"),
    "collectives": ("fourth", "collectives"),
    "idle": ("soft", "idle"),
}
"""Part of a profiled step -> its colour and its name."""

OPENING = """\
# Performance

After this page you know how fast jaxstack trains its main workloads, how that compares with the best peer measured in
the same run on the same GPU, and how far it is from what the GPU can do. Every number has the command that repeats it.

<!-- Made by `python -m scripts.pages` from benchmarks/results/. Do not edit. -->

"""
SPEED = """\
![Tokens per second of jaxstack and of the fastest peer in the same run](pictures/speed.svg)

"""
READING = """\

- **tokens/s** are those of one GPU, with random tokens, AdamW, float32 weights and clipping by the global norm.
- **peer** is the fastest other implementation in the same run: it took turns with jaxstack on the same GPUs. A
  dash means that no peer was measured in that run.
- **goal** is the ratio that the project aims for.
- **of the limit** is the speed as a share of that of an ideal step: every matmul and attention at the fastest rate
  measured on the device, and nothing else takes time (`benchmarks/planning/device.py`).
- **measured** says for how long. A GPU under load reaches its power limit and lowers its clock over ten seconds or
  more: *sustained* rows are the second half of at least 20 s of steps; *short* rows are shorter, so they overstate the
  speed of a long training run.
"""
MISSED = """
The ratios of these workloads are below their goals. Each line shows how near the goal is to the device's limit, and
what a step consists of:

{lines}
"""
NOTED = """\
- † An older row: it, or its limit, was measured with uncommitted changes, and stays until a new one replaces it.
"""
REPEAT = """
## Repeat it

```sh
python benchmarks/training/train_step.py "gpt2-124m bf16" "llama3-1b bf16" --variants unrolled --peers torch
python benchmarks/training/train_step.py "llama3-1b fp8" --variants "unrolled, all layers in FP8" \\
    --set precision.fp8=delayed
python benchmarks/planning/device.py --only gemm copy attention limit
python -m scripts.pages
```

Peers are measured where they are installed. New rows are written only if no file differs from the commit; each names
that commit, the versions, the command, the clock and the power. The commands of the other rows are on the page
[All rows](performance-rows.md).
"""
ATTENTION = """
## Attention on shapes nobody tuned

TFLOP/s of our Hopper kernels and of cuDNN in the same run, on shapes drawn at random: batch, tokens, query heads / key
heads, head dim, mask. *both* is forward and backward together; a ratio above 1 says that ours is faster. *default* is
the backend that `flash_attention` chooses if none is named.
{summary}
Rows: [attention_random](performance-rows.md#attention_random). Yours: `{command}`.

| shape | forward | cuDNN | ratio | both | cuDNN | ratio | default |
|---|---|---|---|---|---|---|---|
{lines}
"""
NOT_MEASURED = {
    "attention_kinds": "kinds of attention: linear, performer, projected, block-sparse and longformer",
    "compressed_models": "each recipe of compression on a model of 124M parameters that was trained on real text",
    "fp8": "our own matrix product in FP8, with and without quantization",
    "grouped_matmul": "the grouped matrix product of mixtures of experts",
    "memory_copies": "what copies of the state in host memory cost a step",
    "pipeline": "schedules of pipelines, and their bubbles",
    "pointwise": "elementwise operations, relative to the bandwidth of a copy",
    "processes": "one process for each GPU beside one for all GPUs of a machine",
    "recurrent": "the gated delta rule and Mamba-2's state space layer, next to flash-linear-attention and mamba_ssm",
    "replica_check": "the cost of comparing replicas",
    "startup": "the time from the start of a process to its first step",
}
"""Benchmark -> what it measures. Listed on the page while there are no rows of it."""
MISSING = """
## Not measured at present

These have a benchmark, but no row of a commit that could be repeated:

{lines}
"""
MORE = """
## More

- [Where a step's time goes](profiles.md): profiles of whole steps, and what each technique is worth.
- [All rows](performance-rows.md): every benchmark, with the command of each row.
"""
PROFILES = """\
# Where a step's time goes

After this page you know which kernels take the time of a training step, what each technique adds to the speed, and what
FP8 does to the loss.

<!-- Made by `python -m scripts.pages` from benchmarks/results/. Do not edit. -->

## Profiles of a step

Milliseconds of one traced step by kind of kernel. *Other kernels* are norms, rotary positions, activations, casts, the
softmax of the loss and the optimizer, and matmuls of our own kernels that are fused with one of these. Under the
profiler kernels are launched one by one, so *idle* is longer than in training.
Rows: [step_profile](performance-rows.md#step_profile). Yours:
`python benchmarks/training/step_profile.py "llama3-1b bf16"`.

![Milliseconds of a step by kind of kernel](pictures/profile.svg)
"""
ABLATION = """
## What each technique is worth

Each row has everything that the rows above it have, on the same batches of real text (`{work}`).
{summary}
Rows: [ablation](performance-rows.md#ablation). Yours: `python benchmarks/training/ablation.py`.

![Tokens per second as techniques are added](pictures/ablation.svg)

{table}
Compare with the times of TF32: TF32 is one setting of jax away from float32. The loss is the mean over the last
quarter of the steps. Energy is that of the GPU alone; the cost follows from the price of a GPU hour in the row.
"""
CONVERGENCE = """
## Loss in FP8

All recipes see the same batches in the same order (`{work}`).
These are single runs.
Rows: [convergence](performance-rows.md#convergence). Yours: `python benchmarks/training/convergence.py`.

![Training loss of each precision, against tokens and against time](pictures/convergence.svg)
"""


def comparisons(results: Path) -> list[Comparison]:
    """Return the comparison of each main work that has a row of ours."""
    rows = read_all(results / "train_step.jsonl") + read_all(results / "parallel.jsonl")
    limits = [row for row in read_all(results / "device.jsonl") if row["implementation"] == "limit"]
    return [found for work in WORKS if (found := compare(work, rows, limits))]


def comparison_table(found: Iterable[Comparison]) -> str:
    """Return the table of the main works."""
    lines = [
        "| workload | GPUs | jaxstack, tokens/s | peer, tokens/s | ratio | goal | of the limit | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        ours = one.ours
        peer = one.peer
        theirs = f"{peer[RATE]:,.0f} ({short_name(peer)})" if peer else "–"
        limit = f"{100 * one.limit_fraction:.0f} %" if one.limit_fraction else "–"
        limit += " †" if one.limit and one.limit.get("note") else ""
        mark = " †" if ours.get("note") else ""
        cells = (
            WORKS[one.work], f"{ours['devices']} x {device_name(ours)}", f"{ours[RATE]:,.0f}{mark}", theirs,
            f"{one.ratio:.2f}" if one.ratio else "–", f"{GOALS[one.work]:.2f}", limit, how_measured(ours),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def missed_goals(found: Iterable[Comparison], profiles: Sequence[Row]) -> str:
    """Return what limits each main work whose ratio is below its goal; an empty string if there is none.

    Args:
        found: Comparisons of the main works.
        profiles: Rows of profiled steps, the newest of each work and variant.
    """
    lines = []
    for one in found:
        if one.peer is None or one.ratio is None or one.ratio >= GOALS[one.work]:
            continue
        reasons = []
        if one.limit:
            share = GOALS[one.work] * one.peer[RATE] / one.limit[RATE]
            reasons.append(f"the goal is {100 * share:.0f} % of the device's limit")
        if "watts" in one.ours:
            reasons.append(f"the GPU takes {one.ours['watts']:.0f} W at {one.ours['sm_mhz']:,.0f} MHz")
        if profile := min(
            (row for row in profiles if row["work"] == one.work), key=lambda row: row["milliseconds"], default=None
        ):
            parts = {name: profile.get(part, 0) / profile["milliseconds"] for part, (_, name) in PARTS.items()}
            shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in parts.items() if share >= 0.01)
            reasons.append(f"a profiled step consists of {shares}")
        lines.append(f"- {WORKS[one.work]}: {one.ratio:.2f} of {GOALS[one.work]:.2f}; {'; '.join(reasons)}.")
    return MISSED.format(lines="\n".join(lines)) if lines else ""


def device_name(row: Row) -> str:
    """Return the device's name without its vendor."""
    return row["device"].removeprefix("NVIDIA ")


def not_measured(results: Path = RESULTS) -> str:
    """Return the section of what has a benchmark and no rows; an empty string if there is nothing."""
    missing = {name: what for name, what in NOT_MEASURED.items() if not read_all(results / f"{name}.jsonl")}
    lines = [f"- {what} (`python {script_path(name)}`)" for name, what in missing.items()]
    if not any(row["implementation"] == "cudnn (jax)" for row in read_all(results / "attention.jsonl")):
        what = "flash attention next to cuDNN and PyTorch, without sinks and with values as wide as keys"
        lines.append(f"- {what} (`python benchmarks/attention/attention.py`)")
    if not any("jaxstack" in row["implementation"] for row in read_all(results / "collective_matmul.jsonl")):
        what = "our kernels that communicate while they multiply, on two and four GPUs"
        lines.append(f"- {what} (`python benchmarks/distributed/collective_matmul.py`)")
    return MISSING.format(lines="\n".join(lines)) if lines else ""


def attention_section(rows: Sequence[Row]) -> str:
    """Return the section on attention of shapes drawn at random; an empty string without rows."""
    if not rows:
        return ""
    names = ("ours_forward_tflops", "cudnn_forward_tflops", "forward_ratio")
    names += ("ours_both_tflops", "cudnn_both_tflops", "both_ratio")

    def cell(row: Row, name: str) -> str:
        value = row.get(name)
        return "–" if value is None else f"{value:.2f}" if name.endswith("ratio") else f"{value:.0f}"

    lines = []
    for row in rows:
        cells = (row["work"].removeprefix("attention random "), *(cell(row, name) for name in names))
        cells += (row.get("default") or "–",)
        lines.append("| " + " | ".join(cells) + " |")
    fast = [min(row.get(f"{part}_ratio") or 0 for part in ("forward", "both")) >= 1 for row in rows]
    summary = f"On {sum(fast)} of {len(rows)} shapes ours is at least as fast in both columns"
    yields = sum(row.get("default") == "cudnn" for row, ahead in zip(rows, fast, strict=True) if not ahead)
    summary += f"; on {yields} of the others the default is cuDNN." if yields else "."
    return ATTENTION.format(summary=summary, command=rows[0]["command"], lines="\n".join(lines))


def how_measured(row: Row) -> str:
    """Return how long a row was measured, with clock and power where they are known."""
    kind = "sustained" if is_sustained(row) else "short"
    clock = f", {row['sm_mhz']:,.0f} MHz, {row['watts']:.0f} W" if "watts" in row else ""
    return f"{kind}{clock}, {row['date'][:10]}"


def make_page(results: Path = RESULTS) -> str:
    """Return docs/performance.md."""
    found = comparisons(results)
    chart = SPEED if any(one.peer for one in found) else ""
    noted = NOTED if any(row and row.get("note") for one in found for row in (one.ours, one.limit)) else ""
    limits = "\n![Share of the device's limit](pictures/limit.svg)\n" if any(one.limit for one in found) else ""
    attention = attention_section(read_rows(results / "attention_random.jsonl"))
    missed = missed_goals(found, newest_rows(read_all(results / "step_profile.jsonl")))
    return (
        OPENING
        + chart
        + comparison_table(found)
        + READING
        + noted
        + missed
        + limits
        + attention
        + REPEAT
        + not_measured(results)
        + MORE
    )


def make_profiles_page(results: Path = RESULTS) -> str:
    """Return docs/profiles.md."""
    page = PROFILES
    if ablation := newest_work(results / "ablation.jsonl"):
        first = ablation[0]
        best = max(ablation, key=lambda row: row[RATE])
        summary = (
            f"The fastest row, *{variant_name(best)}*, makes {best[RATE] / first[RATE]:.1f} times the tokens/s of the "
            f"first, at {best['loss_ratio']:.3f} of its loss."
        )
        page += ABLATION.format(work=first["work"], summary=summary, table=ablation_table(ablation))
    if curves := newest_curves(results):
        page += CONVERGENCE.format(work=curves[0]["work"])
    page += seed_ratios(read_rows(results / "convergence.jsonl"))
    return page


def ablation_table(rows: Sequence[Row]) -> str:
    """Return the table of the ablation: speed, loss, energy and cost of each row."""
    tf32 = next((row for row in rows if variant_name(row) == "TF32 matmuls"), None)
    lines = [
        "| technique | tokens/s | over float32 | over TF32 | loss | J / 1000 tokens | dollars / 10⁹ tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        energy = row.get("joules_per_token")
        cost = row.get("dollars_per_billion_tokens")
        cells = (
            variant_name(row), f"{row[RATE]:,.0f}", f"{row[RATE] / rows[0][RATE]:.2f}",
            f"{row[RATE] / tf32[RATE]:.2f}" if tf32 else "–", f"{row['final_loss']:.4f}",
            f"{1000 * energy:.2f}" if energy else "–", f"{cost:.2f}" if cost else "–",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def variant_name(row: Row) -> str:
    """Return the variant of an ablation's row without its number."""
    return str(row["variant"]).split(" ", 1)[-1]


def newest_work(path: Path) -> list[Row]:
    """Return the newest rows of the work that was measured last."""
    return newest_of(read_rows(path))


def newest_of(rows: Sequence[Row]) -> list[Row]:
    """Return those of the work that was measured last."""
    newest = max(rows, key=lambda row: row["date"])["work"] if rows else None
    return [row for row in rows if row["work"] == newest]


def newest_curves(results: Path) -> list[Row]:
    """Return the rows of the newest convergence run whose recipes had the GPU to themselves."""
    rows = [row for row in read_rows(results / "convergence.jsonl") if "milliseconds" in row]
    return newest_of(rows)


def seed_ratios(rows: Iterable[Row]) -> str:
    """Return a sentence with the held-out losses of each recipe over bfloat16's with the same seed; "" without any."""
    found: dict[str, list[float]] = {}
    seeded = newest_of([row for row in rows if ", seed " in row["variant"] and "eval_loss_ratio" in row])
    for row in sorted(seeded, key=lambda row: row["variant"]):
        found.setdefault(row["variant"].partition(",")[0], []).append(row["eval_loss_ratio"])
    shown = [
        f"{recipe} {', '.join(f'{x:.4f}' for x in ratios)}" for recipe, ratios in found.items() if recipe != "bf16"
    ]
    if not shown:
        return ""
    return f"\nHeld-out loss over bfloat16's with the same seed (`{seeded[0]['work']}`): {'; '.join(shown)}.\n"


def speed_chart(found: Sequence[Comparison]) -> str:
    """Return the bars of ours and the peer, relative to the peer."""
    groups = []
    for one in found:
        if one.peer is None or one.ratio is None:
            continue
        ours = Bar("jaxstack", [(one.ratio, "first")], f"{one.ratio:.2f}×  {one.ours[RATE]:,.0f} tokens/s")
        peer = Bar(short_name(one.peer), [(1.0, "soft")], f"{one.peer[RATE]:,.0f} tokens/s")
        devices = one.ours["devices"]
        groups.append(Group(WORKS[one.work] + f", {devices} GPUs" * (devices > 1), [ours, peer]))
    device = sorted({device_name(one.ours) for one in found if one.peer})
    note = f"Tokens per second of a GPU relative to the fastest peer in the same run, on {' or '.join(device)}"
    return draw_bars(groups, "Training speed", note)


def limit_chart(found: Sequence[Comparison]) -> str:
    """Return the bars of the share of the device's limit."""
    bars = [
        Bar(WORKS[one.work], [(one.limit_fraction, "first")], f"{100 * one.limit_fraction:.0f} %")
        for one in found
        if one.limit_fraction
    ]
    note = "jaxstack's tokens per second over the device's limit for the work (dashed)"
    return draw_bars([Group("", bars)], "Share of the limit", note, mark=1.0)


def profile_chart(rows: Iterable[Row]) -> str:
    """Return the stacked bars of profiled steps."""
    groups = []
    for row in rows:
        parts = [(row.get(name, 0.0), fill) for name, (fill, _) in PARTS.items()]
        groups.append(Group(f"{row['work']}, {row['variant']}", [Bar("", parts, f"{row['milliseconds']:.0f} ms")]))
    return draw_bars(groups, "One training step by kind of kernel", "Milliseconds", keys=list(PARTS.values()))


def ablation_chart(rows: Sequence[Row]) -> str:
    """Return the bars of the ablation."""
    bars = [
        Bar(
            variant_name(row).removesuffix(", delayed scaling"),
            [(row[RATE], "first")],
            f"{row[RATE]:,.0f}   ({row[RATE] / rows[0][RATE]:.1f}×)",
        )
        for row in rows
    ]
    return draw_bars(
        [Group("", bars)], "What each technique is worth", "Tokens per second, each row on top of the last"
    )


def make_pictures(results: Path = RESULTS) -> Mapping[str, str]:
    """Return file name -> SVG of the charts that have rows."""
    found = comparisons(results)
    drawn = {}
    if any(one.peer for one in found):
        drawn["speed.svg"] = speed_chart(found)
    if any(one.limit for one in found):
        drawn["limit.svg"] = limit_chart(found)
    if profiles := newest_rows(read_all(results / "step_profile.jsonl")):
        drawn["profile.svg"] = profile_chart(profiles)
    if ablation := newest_work(results / "ablation.jsonl"):
        drawn["ablation.svg"] = ablation_chart(ablation)
    if curves := newest_curves(results):
        drawn["convergence.svg"] = picture(curves)
    return drawn


PAGES = (
    Page("performance.md", {}, make_pictures, lambda _: make_page()),
    Page("performance-rows.md", {}, rewrite=lambda _: rows_page(RESULTS)),
    Page("profiles.md", {}, rewrite=lambda _: make_profiles_page()),
)
