"""Makes the tables of docs/parallelism.md from the rows in overlap.jsonl and parallel.jsonl.

python benchmarks/overlap.py && python benchmarks/parallel.py && python scripts/parallelism_page.py
"""

import functools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.page_parts import fill_page
from scripts.result_rows import RATE, RESULTS, ROOT, Row, newest_rows, read_all, read_rows

PAGE = ROOT / "docs" / "parallelism.md"
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


def draw_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


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
    return draw_table(["what", "workload", "GPUs", "goal", "measured", "reached"], lines)


def overlap_table(rows: Iterable[Row]) -> str:
    """Return the traces of `tensor` without and with overlap, and the time of the communication that is not hidden."""
    traced = [row for row in rows if " tensor" in row["work"]]
    by_variant = {row["variant"]: row for row in traced}
    if not {"no overlap", "overlap"} <= set(by_variant):
        return "Not measured yet; `python benchmarks/overlap.py --layouts tensor` measures it."
    before = by_variant["no overlap"]
    after = by_variant["overlap"]
    parts = ("milliseconds", "computation", "communication", "overlapped")
    lines = [
        [row["variant"], *(f"{row[part]:.1f}" for part in parts), percent(row["overlap"])] for row in (before, after)
    ]
    table = draw_table(["variant", "step, ms", "computation", "communication", "at the same time", "overlap"], lines)
    added = after["busy"] - before["computation"]
    longer = after["computation"] - before["computation"]
    alone = after["communication"] - after["overlapped"]
    text = (
        f"Of the {before['communication']:.1f} ms of communication, {added:.1f} ms still add to the kernels' time, so "
        f"that {percent(after['hidden'])} are hidden: {longer:.1f} ms because kernels that send while they multiply "
        f"take longer than the same computation alone, {alone:.1f} ms of collectives beside which nothing computes. "
        f"`{after['work']}`, {measured_at([before, after])}"
    )
    return f"{table}\n\n{text}"


def step_table(steps: Sequence[Row]) -> str:
    """Return whole steps of `tensor`, and of weak and strong scaling, relative to the baseline of the same run."""
    lines = []
    for base, rows in compared_runs(steps):
        for row in (base, *sorted(rows, key=lambda row: (row["devices"], row["variant"]))):
            clock = f"{row['sm_mhz']:,.0f}" if "sm_mhz" in row else "–"
            cells = (row["work"], row["variant"], str(row["devices"]), f"{row['milliseconds']:,.1f}")
            lines.append([*cells, f"{row[RATE]:,.0f}", f"{row[RATE] / base[RATE]:.3f}", clock])
    if not lines:
        return "Not measured yet; `python benchmarks/parallel.py --only weak strong tensor` measures it."
    return draw_table(["workload", "variant", "GPUs", "step, ms", "tokens/s/GPU", "relative", "MHz"], lines)


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


def make_page(page: str, overlap: Sequence[Row], steps: Sequence[Row]) -> str:
    """Return the page with its made parts replaced.

    Args:
        page: The page in Markdown.
        overlap: The newest rows of benchmarks/overlap.py.
        steps: All rows of benchmarks/parallel.py.
    """
    makers = {
        "goals": functools.partial(goals, overlap, steps),
        "overlap": functools.partial(overlap_table, overlap),
        "steps": functools.partial(step_table, steps),
        "clocks": functools.partial(clocks, steps),
    }
    return fill_page(page, makers)


if __name__ == "__main__":
    rows = read_rows(RESULTS / "overlap.jsonl"), read_all(RESULTS / "parallel.jsonl")
    PAGE.write_text(make_page(PAGE.read_text(encoding="utf-8"), *rows), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
