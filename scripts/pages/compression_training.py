"""The tables of docs/compression_training.md: held-out loss of training with compressed weights."""

import functools
from collections.abc import Iterable, Sequence

from scripts.pages import page
from scripts.pages.page import Page
from scripts.pages.rows import RESULTS, Row, read_all

NAMES = {
    "float32": "further training alone",
    "float32 once more": "further training, then once more on the same text",
    "rtn": "further training, then rounding",
    "gptq": "further training, then GPTQ",
    "qat": "further training, then GPTQ, then the same text once more with rounded weights",
    "qat with a teacher": "the same with the uncompressed model as teacher instead of the text",
    "magnitude": "further training, then magnitude pruning",
    "sparsegpt": "further training, then SparseGPT",
    "magnitude, then trained with its zeros": "magnitude pruning, then training with its zeros",
    "sparsegpt, then trained with its zeros": "SparseGPT, then training with its zeros",
    "kmeans": "further training, then k-means",
    "edkm": "training with clusters",
    "truncated svd": "further training, then the singular value decomposition at the same ranks",
    "maestro": "training with factors",
    "float32 from the start": "training without factors",
    "maestro from the start": "training with factors from the first step on",
    "svd at its ranks": "training without factors, then the singular value decomposition at the same ranks",
    "svd of as many values in each layer": "the same, with this share of the values in each matrix",
    "from the text": "from the text alone",
    "distilled": "from the text and the teacher",
}
"""Implementation -> what the page calls it."""
SAME = 0.01
"""Difference of losses, in nats, below which runs began with the same model on the same text."""


def table(part: str, rows: Iterable[Row]) -> str:
    """Return the table of one part: held-out loss, and its difference to the reference, by method."""
    rows = [row for row in rows if row["part"] == part]
    if not rows:
        return f"Not measured yet; `python benchmarks/compression/compressed_training.py --parts {part}` measures it."
    rows = _of_one_start(rows)
    newest = {penalty: max(row["run"] for row in rows if row.get("penalty") == penalty) for penalty in _penalties(rows)}
    rows = [row for row in rows if row["run"] == newest[row.get("penalty")]]
    rows.sort(key=lambda row: row.get("penalty", 0))
    lines = []
    for row in rows:
        kept = f", penalty {row['penalty']} ({row['kept']:.0%} of the values left)" if "kept" in row else ""
        name = NAMES[row["implementation"]]
        lines.append([row["variant"] + kept, name, f"{row['loss']:.4f}", f"{row['rise']:+.4f}"])
    first = rows[0]
    seeds = max(len(row["losses"]) for row in rows)
    of_seeds = f"mean of {seeds} repetitions, " if seeds > 1 else ""
    commits = ", ".join(dict.fromkeys(row["commit"][:7] for row in rows))
    if "eval_tokens" in first:
        of_seeds = f"learning rate {first['learning_rate']:g}, {first['eval_tokens']:,} held-out tokens, {of_seeds}"
    about = f"{first['work']}; {of_seeds}{first['date'][:10]}, commit {commits}, {first['device']}."
    drawn = page.table(["weights", "method", "held-out loss", "more than the first"], lines)
    return f"{drawn}\n\n{about[0].upper()}{about[1:]}"


def _of_one_start(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose runs have the newest run's loss without compression, to which their losses compare."""
    newest = max(rows, key=lambda row: row["date"])
    return [row for row in rows if abs(_reference(row) - _reference(newest)) < SAME]


def _reference(row: Row) -> float:
    """Return the loss without compression in a row's run."""
    return row["loss"] - row["rise"]


def _penalties(rows: Iterable[Row]) -> list[float | None]:
    """Return the penalties of low rank that were measured; None for rows without one."""
    return list(dict.fromkeys(row.get("penalty") for row in rows))


def sizes_table(rows: Iterable[Row]) -> str:
    """Return the table of the part `sizes`: bytes without and with the table of 16-bit values."""
    newest: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["part"] == "sizes":
            newest.setdefault(row["work"], {})[row["implementation"]] = row
    lines = []
    for work, found in newest.items():
        before = next(row["bytes"] for name, row in found.items() if name != "edkm")
        after = found["edkm"]["bytes"]
        lines.append([work, f"{before / 2**20:,.0f}", f"{after / 2**20:,.0f}", f"{before / after:.1f}x"])
    return page.table(["", "without, MiB", "eDKM, MiB", "ratio"], lines)


def read_training() -> list[Row]:
    """Return all rows of training with compressed weights."""
    return read_all(RESULTS / "compressed_training.jsonl")


def part(name: str) -> str:
    """Return the table of a part, from the stored rows."""
    return table(name, read_training())


PARTS = {
    **{n: functools.partial(part, n)
       for n in ("qat", "sparse", "cluster", "low_rank", "low_rank_from_start", "distill")},
    "sizes": lambda: sizes_table(read_training()),
}  # fmt: skip
PAGES = (Page("compression_training.md", PARTS),)
