"""The measured part of docs/kernels.md: recurrences beside the kernels of other packages."""

from collections import defaultdict

from scripts.pages.page import Page, table
from scripts.pages.rows import RESULTS, Row, read_all

TIMES = ("forward_milliseconds", "milliseconds")


def recurrences() -> str:
    """Return the times of each work and package in the newest run that measured both; ours first."""
    runs = defaultdict[tuple[str, str], list[Row]](list)
    for row in read_all(RESULTS / "recurrent.jsonl"):
        runs[row["work"], row["run"]].append(row)
    newest: dict[str, list[Row]] = {}
    for (work, _), rows in sorted(runs.items(), key=lambda item: item[1][-1]["date"]):
        if len({_package(row) for row in rows}) > 1:
            newest[work] = sorted(rows, key=lambda row: _package(row) != "jaxstack")
    lines = []
    for work, rows in newest.items():
        for row in rows:
            times = [f"{row[name]:.3f}" if row.get(name) else "refused" for name in TIMES]
            ratios = [f"{row[name] / rows[0][name]:.2f}" if row.get(name) else "" for name in TIMES]
            lines.append([work, row["implementation"], *times, *ratios, row["commit"][:7]])
    measured = ("forward", "with gradients")
    ratios = (f"{name} / ours" for name in measured)
    titles = ["work", "implementation", *(f"{name}, ms" for name in measured), *ratios, "commit"]
    return f"{table(titles, lines)}\n\n{', '.join(dict.fromkeys(rows[0]['device'] for rows in newest.values()))}."


def _package(row: Row) -> str:
    return row["implementation"].split()[0]


PAGES = (Page("kernels.md", {"recurrences": recurrences}),)
