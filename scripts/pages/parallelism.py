"""The tables of docs/parallelism.md: goals, overlap of communication, and whole steps in parallel layouts."""

from collections.abc import Iterable, Sequence

from scripts.pages.page import Page
from scripts.pages.page import spaced_table as table
from scripts.pages.rows import RATE, RESULTS, Row, newest_rows, read_all, read_rows

WEAK = "tokens a device"
STRONG = "tokens in all"
"""Parts of the names of works in which the tokens grow with the number of devices, and in which they do not."""
OVERLAP_GOAL = 0.80
"""Goal of the hidden share, and of the overlapped share, of the communication of `tensor`."""
WEAK_GOALS = {2: 0.97, 4: 0.95}
"""Number of GPUs -> goal of weak scaling."""


def percent(value: float) -> str:
    """Return a share as a percentage with one decimal."""
    return f"{100 * value:.1f} %"


def measured_at(rows: Sequence[Row]) -> str:
    """Return the GPUs, days and commits of rows on several GPUs, and of their baselines on one, as a sentence."""
    names = [sorted({str(row[key])[:length] for row in rows}) for key, length in (("date", 10), ("commit", 7))]
    counts = " and ".join(str(count) for count in sorted({row["devices"] for row in rows} - {1}))
    return f"{counts} x {rows[0]['device']}, {', '.join(names[0])}, commit {', '.join(names[1])}."


def goals(overlap: Iterable[Row], steps: Sequence[Row]) -> str:
    """Return goals beside measured values: overlapped and hidden communication of `tensor`, and weak scaling."""
    found = []
    for row in overlap:
        if " tensor" in row["work"] and "hidden" in row:
            found.append((row, "communication overlapped", OVERLAP_GOAL, row["overlap"]))
            found.append((row, "communication hidden", OVERLAP_GOAL, row["hidden"]))
    for row in newest_rows(steps):
        if WEAK in row["work"] and row["devices"] in WEAK_GOALS:
            found.append((row, f"weak scaling, `{row['variant']}`", WEAK_GOALS[row["devices"]], row["efficiency"]))
    lines = []
    for row, title, goal, value in found:
        reached = "yes" if value >= goal else f"no, {100 * (goal - value):.1f} points short"
        cells = (title, row["work"], f"{row['devices']} x {row['device'].removeprefix('NVIDIA ')}")
        lines.append([*cells, f"{100 * goal:.0f} %", percent(value), reached])
    if not lines:
        return "Not measured yet."
    return table(["what", "workload", "GPUs", "goal", "measured", "reached"], lines)


def overlap_table(rows: Iterable[Row]) -> str:
    """Return the traces of `tensor` without and with overlap, and the time of the communication that is not hidden."""
    traced = [row for row in rows if " tensor" in row["work"]]
    by_variant = {row["variant"]: row for row in traced}
    if not {"no overlap", "overlap"} <= set(by_variant):
        return "Not measured yet; `python benchmarks/distributed/overlap.py --layouts tensor` measures it."
    before = by_variant["no overlap"]
    after = by_variant["overlap"]
    parts = ("milliseconds", "computation", "communication", "overlapped")
    lines = [
        [row["variant"], *(f"{row[part]:.1f}" for part in parts), percent(row["overlap"])] for row in (before, after)
    ]
    drawn = table(["variant", "step, ms", "computation", "communication", "at the same time", "overlap"], lines)
    added = after["busy"] - before["computation"]
    longer = after["computation"] - before["computation"]
    alone = after["communication"] - after["overlapped"]
    text = (
        f"Of the {before['communication']:.1f} ms of communication, {added:.1f} ms still add to the kernels' time, so "
        f"that {percent(after['hidden'])} are hidden: {longer:.1f} ms because kernels that send while they multiply "
        f"take longer than the same computation alone, {alone:.1f} ms of collectives while nothing computes. "
        f"`{after['work']}`, {measured_at([before, after])}"
    )
    return f"{drawn}\n\n{text}"


def step_table(steps: Sequence[Row]) -> str:
    """Return whole steps of `tensor`, and of weak and strong scaling, relative to the baseline of the same run."""
    lines = []
    for base, rows in compared_runs(steps):
        for row in (base, *sorted(rows, key=lambda row: (row["devices"], row["variant"]))):
            clock = f"{row['sm_mhz']:,.0f}" if "sm_mhz" in row else "–"
            cells = (row["work"], row["variant"], str(row["devices"]), f"{row['milliseconds']:,.1f}")
            lines.append([*cells, f"{row[RATE]:,.0f}", f"{row[RATE] / base[RATE]:.3f}", clock])
    if not lines:
        return "Not measured yet; `python benchmarks/distributed/parallel.py --only weak strong tensor` measures it."
    return table(["workload", "variant", "GPUs", "step, ms", "tokens/s/GPU", "relative", "MHz"], lines)


def clocks(steps: Sequence[Row]) -> str:
    """Return, for weak scaling, how much longer a step takes than on one GPU, and how much its clock differs."""
    sentences = []
    used = []
    for base, rows in compared_runs(steps):
        if WEAK not in base["work"]:
            continue
        for row in rows:
            if "sm_mhz" not in row or "sm_mhz" not in base:
                continue
            used += [base, row]
            longer = row["milliseconds"] / base["milliseconds"] - 1
            clock = row["sm_mhz"] / base["sm_mhz"] - 1
            how = f"{percent(abs(clock))} {'higher' if clock > 0 else 'lower'}"
            sentences.append(
                f"On {row['devices']} GPUs a step with `{row['variant']}` takes {percent(longer)} longer than on one, "
                f"at a clock {how}."
            )
    return " ".join([*sentences, measured_at(used)]) if sentences else "Not measured yet."


def processes_table(rows: Sequence[Row]) -> str:
    """Return the steps of one process with all GPUs and of one for each GPU, of the newest run of each work."""
    if not rows:
        return "Not measured yet; `python benchmarks/distributed/processes.py` measures it."
    newest = {row["work"]: row["run"] for row in rows}
    used = [row for row in rows if row["run"] == newest[row["work"]]]
    lines = [
        [row["work"], row.get("nccl", ""), str(row["processes"]), f"{1000 * row['step_seconds']:.1f}",
         f"{row['relative_speed']:.3f}"]
        for row in used
    ]  # fmt: skip
    header = ["workload", "NCCL", "processes", "step, ms", "relative"]
    return f"{table(header, lines)}\n\n{measured_at(used)}"


def is_baseline(row: Row) -> bool:
    """Return True for the row with which the others of its work and run are compared."""
    return "no overlap" in row["variant"] if " tensor" in row["work"] else row["devices"] == 1


def compared_runs(steps: Sequence[Row]) -> list[tuple[Row, list[Row]]]:
    """Return, for each work and run, its baseline and its other rows, without those that a later run measured again."""
    newest = [row for row in newest_rows(steps) if not is_baseline(row)]
    found: dict[tuple[str, str], tuple[Row, list[Row]]] = {}
    for row in newest:
        run = str(row.get("run") or row["command"])
        bases = [
            base
            for base in steps
            if is_baseline(base) and base["work"] == row["work"] and str(base.get("run") or base["command"]) == run
        ]
        if bases:
            found.setdefault((row["work"], run), (bases[-1], []))[1].append(row)
    return list(found.values())


def read_steps() -> list[Row]:
    """Return all rows of whole steps in parallel layouts."""
    return read_all(RESULTS / "parallel.jsonl")


def read_overlap() -> list[Row]:
    """Return the newest traces."""
    return read_rows(RESULTS / "overlap.jsonl")


PARTS = {
    "processes": lambda: processes_table(read_all(RESULTS / "processes.jsonl")),
    "goals": lambda: goals(read_overlap(), read_steps()),
    "overlap": lambda: overlap_table(read_overlap()),
    "steps": lambda: step_table(read_steps()),
    "clocks": lambda: clocks(read_steps()),
}
PAGES = (Page("parallelism.md", PARTS),)
