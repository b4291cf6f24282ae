"""Makes the tables of docs/compression_training.md from benchmarks/results/compressed_training.jsonl.

python benchmarks/compressed_training.py && python scripts/compression_training_page.py
"""

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.compression_page import make_page
from scripts.result_rows import RESULTS, ROOT, Row, read_all

PAGE = ROOT / "docs" / "compression_training.md"
ROWS = RESULTS / "compressed_training.jsonl"
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


def table(part: str, rows: Iterable[Row]) -> str:
    """Return the table of one part: held-out loss, and its difference to the reference, by method."""
    rows = [row for row in rows if row["part"] == part]
    if not rows:
        return f"Not measured yet; `python benchmarks/compressed_training.py --parts {part}` measures it."
    newest = {penalty: max(row["run"] for row in rows if row.get("penalty") == penalty) for penalty in _penalties(rows)}
    rows = [row for row in rows if row["run"] == newest[row.get("penalty")]]
    rows.sort(key=lambda row: row.get("penalty", 0))
    lines = ["| weights | method | held-out loss | more than the first |", "|---|---|---|---|"]
    for row in rows:
        kept = f", penalty {row['penalty']} ({row['kept']:.0%} of the values left)" if "kept" in row else ""
        cells = (row["variant"] + kept, NAMES[row["implementation"]], f"{row['loss']:.4f}", f"{row['rise']:+.4f}")
        lines.append(f"| {' | '.join(cells)} |")
    first = rows[0]
    seeds = max(len(row["losses"]) for row in rows)
    of_seeds = f"mean of {seeds} repetitions, " if seeds > 1 else ""
    commits = ", ".join(dict.fromkeys(row["commit"][:7] for row in rows))
    if "eval_tokens" in first:
        of_seeds = f"learning rate {first['learning_rate']:g}, {first['eval_tokens']:,} held-out tokens, {of_seeds}"
    about = f"{first['work']}; {of_seeds}{first['date'][:10]}, commit {commits}, {first['device']}."
    return "\n".join([*lines, "", about[0].upper() + about[1:]])


def _penalties(rows: Iterable[Row]) -> list[float | None]:
    """Return the penalties of low rank that were measured; None for rows without one."""
    return list(dict.fromkeys(row.get("penalty") for row in rows))


def sizes_table(rows: Iterable[Row]) -> str:
    """Return the table of the part `sizes`: bytes without and with the table of 16-bit values."""
    newest: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["part"] == "sizes":
            newest.setdefault(row["work"], {})[row["implementation"]] = row
    lines = ["| | without, MiB | eDKM, MiB | ratio |", "|---|---|---|---|"]
    for work, found in newest.items():
        before = next(row["bytes"] for name, row in found.items() if name != "edkm")
        after = found["edkm"]["bytes"]
        lines.append(f"| {work} | {before / 2**20:,.0f} | {after / 2**20:,.0f} | {before / after:.1f}x |")
    return "\n".join(lines)


MADE = {
    part: functools.partial(table, part)
    for part in ("qat", "sparse", "cluster", "low_rank", "low_rank_from_start", "distill")
} | {"sizes": sizes_table}
"""Name of a made part -> function of the rows."""


if __name__ == "__main__":
    text = make_page(PAGE.read_text(encoding="utf-8"), read_all(ROWS), MADE)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
