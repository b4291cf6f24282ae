"""The tables of docs/local-sgd.md: loss, bytes and speed of the methods for workers over slow links."""

import functools
from collections.abc import Sequence

from scripts.pages.page import Page, table_of
from scripts.pages.rows import RESULTS, Row, read_all

NAMES = {
    "data_parallel": "data parallelism",
    "local_sgd": "`local_sgd`",
    "local_sgd_synchronous": "`local_sgd`, `synchronous_steps: 200`",
    "diloco": "`diloco`, defaults",
    "diloco_calm": "`diloco`, `outer_learning_rate: 0.9`, `momentum: 0.3`",
    "diloco_steady": "`diloco`, `momentum: 0.6`",
    "diloco_int8": "`diloco`, `compression: int8`",
    "diloco_int8_often": "`diloco`, `every: 6`, `compression: int8`, `outer_learning_rate: 0.9`, `momentum: 0.3`",
    "diloco_powersgd": "`diloco`, `compression: powersgd`, `rank: 4`",
    "streaming": "`streaming`, `fragments: 2`",
    "gossip": "`gossip`",
}
"""Method of a row -> what the page calls it."""
LOSS = {
    "": "{title}",
    "held-out loss": "{eval_loss:.3f}",
    "relative to data parallelism": "{relative_loss:.3f}",
    "bytes between workers": "{relative_bytes:.3f}",
}
LOSS_BY_RATE = {
    "": "{title}",
    "learning rate": "{rate}",
    "held-out loss": "{eval_loss:.3f}",
    "relative to data parallelism": "{relative_loss:.3f}",
    "to its best rate": "{to_best:.3f}",
    "bytes between workers": "{relative_bytes:.3f}",
}
LOSS_SOURCE = "{steps:,} steps, {islands} workers, {device}, {date:.10}, commit {commit:.7}."
LONG_COMMAND = "python benchmarks/distributed/islands.py --gpus --work long --methods diloco,diloco_steady"
SPEED = {
    "": "{title}",
    "ms a step": "{milliseconds:.0f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "relative speed": "{relative_speed:.1f}",
    "bytes sent a step": "{bytes_per_step:,.0f}",
}
SPEED_SOURCE = (
    "Two processes, {limit_megabytes:g} MB/s on each connection, {steps} steps, {device}, {date:.10}, "
    "commit {commit:.7}."
)


def methods(columns: dict[str, str], source: str, rows: list[Row]) -> str:
    """Return a table of the newest row of each method, in the order of `NAMES`, and where the last was measured."""
    newest = {row["method"]: row for row in rows}
    shown = [{**newest[method], "title": title} for method, title in NAMES.items() if method in newest]
    last = max(newest.values(), key=lambda row: row["date"])
    return f"{table_of(columns, shown)}\n\n{source.format_map(last)}"


def losses(work: str, overrides: Sequence[str] = ()) -> str:
    """Return held-out loss and bytes between workers of each method, relative to data parallelism."""
    found = read_all(RESULTS / "islands.jsonl")
    rows = [row for row in found if (row["work"], *row.get("overrides", ())) == (work, *overrides)]
    return methods(LOSS, LOSS_SOURCE, rows) if rows else f"Not measured yet; `{LONG_COMMAND}` measures it."


def losses_by_rate() -> str:
    """Return the loss of each method for learning rates, after as many steps, also relative to the best rate."""
    found = [row for row in read_all(RESULTS / "islands.jsonl") if len(row.get("overrides", ())) == 2]
    rows = {(row["overrides"][1], row["method"]): row for row in found if row["overrides"][0] == "train.steps=3000"}
    best = min(row["eval_loss"] for (_, method), row in rows.items() if method == "data_parallel")
    shown = [
        {**row, "title": NAMES[method], "rate": rate.partition("=")[2], "to_best": row["eval_loss"] / best}
        for (rate, method), row in rows.items()
    ]
    last = max(shown, key=lambda row: row["date"])
    return f"{table_of(LOSS_BY_RATE, shown)}\n\n{LOSS_SOURCE.format_map(last)}"


def speeds() -> str:
    """Return the speed of each method over a limited link, relative to data parallelism."""
    return methods(SPEED, SPEED_SOURCE, read_all(RESULTS / "slow_link.jsonl"))


PARTS = {
    **{work: functools.partial(losses, work) for work in ("bytes", "quickstart", "long")},
    "many steps": functools.partial(losses, "bytes", ["train.steps=3000"]),
    "rates": losses_by_rate,
}
PAGES = (Page("local-sgd.md", {**PARTS, "slow link": speeds}),)
