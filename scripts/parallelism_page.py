"""Makes the tables of docs/parallelism.md from the rows of two GPUs in overlap.jsonl and parallel.jsonl.

python benchmarks/overlap.py && python benchmarks/parallel.py && python scripts/parallelism_page.py
"""

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.page_parts import fill_page
from scripts.result_rows import RATE, RESULTS, ROOT, Row, read_rows

PAGE = ROOT / "docs" / "parallelism.md"
WEAK, STRONG = "tokens a device", "tokens in all"
"""Parts of the names of works in which the tokens grow with the number of devices, and in which they do not."""
GOALS = {"hidden": 0.80, "efficiency": 0.97}
"""Value of a row -> its goal: communication of `tensor` that is hidden; weak scaling of `data` and `fsdp`."""


def percent(value: float) -> str:
    """Return a share as a percentage with one decimal."""
    return f"{100 * value:.1f} %"


def draw_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def measured_at(rows: Sequence[Row]) -> str:
    """Return the GPUs, days and commits of rows, as a sentence."""
    names = [sorted({str(row[key])[:length] for row in rows}) for key, length in (("date", 10), ("commit", 7))]
    devices = max(rows, key=lambda row: row["devices"])
    return f"{devices['devices']} x {devices['device']}, {', '.join(names[0])}, commit {', '.join(names[1])}."


def goals(overlap: Iterable[Row], steps: Iterable[Row]) -> str:
    """Return goals beside measured values: hidden communication of `tensor`, weak scaling of `data` and `fsdp`."""
    hidden = [row for row in overlap if " tensor" in row["work"] and "hidden" in row]
    weak = [row for row in steps if WEAK in row["work"] and row["devices"] > 1]
    lines = []
    for key, rows in (("hidden", hidden), ("efficiency", weak)):
        for row in rows:
            title = "communication hidden" if key == "hidden" else f"weak scaling, `{row['variant']}`"
            missing = GOALS[key] - row[key]
            reached = "yes" if missing <= 0 else f"no, {100 * missing:.1f} points short"
            cells = (title, row["work"], f"{row['devices']} x {row['device'].removeprefix('NVIDIA ')}")
            lines.append([*cells, f"{100 * GOALS[key]:.0f} %", percent(row[key]), reached])
    if not lines:
        return "Not measured yet."
    return draw_table(["what", "workload", "GPUs", "goal", "measured", "reached"], lines)


def overlap_table(rows: Iterable[Row]) -> str:
    """Return the traces of `tensor` without and with overlap, and the time of the communication that is not hidden."""
    traced = [row for row in rows if " tensor" in row["work"]]
    by_variant = {row["variant"]: row for row in traced}
    if not {"no overlap", "overlap"} <= set(by_variant):
        return "Not measured yet; `python benchmarks/overlap.py --layouts tensor` measures it."
    before, after = by_variant["no overlap"], by_variant["overlap"]
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


def step_table(rows: Iterable[Row]) -> str:
    """Return whole steps of `tensor`, and of weak and strong scaling, relative to a baseline."""
    lines = []
    for work, found in group_by_work(rows).items():
        if " tensor" in work:
            base = next((row for row in found if "no overlap" in row["variant"]), None)
        else:
            base = next((row for row in found if row["devices"] == 1), None)
        if base is None or len(found) < 2:
            continue
        for row in sorted(found, key=lambda row: (row is not base, row["variant"])):
            clock = f"{row['sm_mhz']:,.0f}" if "sm_mhz" in row else "–"
            cells = (work, row["variant"], str(row["devices"]), f"{row['milliseconds']:,.1f}", f"{row[RATE]:,.0f}")
            lines.append([*cells, f"{row[RATE] / base[RATE]:.3f}", clock])
    if not lines:
        return "Not measured yet; `python benchmarks/parallel.py --only weak strong tensor` measures it."
    return draw_table(["workload", "variant", "GPUs", "step, ms", "tokens/s/GPU", "relative", "MHz"], lines)


def clocks(rows: Iterable[Row]) -> str:
    """Return, for weak scaling, how much longer a step takes than on one GPU, and how much its clock differs."""
    sentences, used = [], []
    for found in (rows for work, rows in group_by_work(rows).items() if WEAK in work):
        single = next((row for row in found if row["devices"] == 1), None)
        for row in found:
            if single is None or row is single or "sm_mhz" not in row or "sm_mhz" not in single:
                continue
            used += [single, row]
            longer = row["milliseconds"] / single["milliseconds"] - 1
            clock = row["sm_mhz"] / single["sm_mhz"] - 1
            how = f"{percent(abs(clock))} {'higher' if clock > 0 else 'lower'}"
            sentences.append(
                f"A step with `{row['variant']}` takes {percent(longer)} longer than on one GPU, at a clock {how}."
            )
    return " ".join([*sentences, measured_at(used)]) if sentences else "Not measured yet."


def group_by_work(rows: Iterable[Row]) -> Mapping[str, list[Row]]:
    """Return the rows of each work, in the order in which works appear."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["work"], []).append(row)
    return found


def make_page(page: str, overlap: Sequence[Row], steps: Sequence[Row]) -> str:
    """Return the page with its made parts replaced, from rows of benchmarks/overlap.py and benchmarks/parallel.py."""
    makers = {
        "goals": functools.partial(goals, overlap, steps),
        "overlap": functools.partial(overlap_table, overlap),
        "steps": functools.partial(step_table, steps),
        "clocks": functools.partial(clocks, steps),
    }
    return fill_page(page, makers)


if __name__ == "__main__":
    found = [read_rows(RESULTS / f"{name}.jsonl") for name in ("overlap", "parallel")]
    PAGE.write_text(make_page(PAGE.read_text(encoding="utf-8"), *found), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
