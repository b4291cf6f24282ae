"""Result rows: one JSON object a line in `benchmarks/results/<script>.jsonl`, and a printed table.

A row names the commit that it was measured at. Where files differ from that commit, or no commit is known, rows are
refused, because nobody could repeat them. `BENCHMARK_UNCOMMITTED=1` writes them all the same, with the list of the
differing files; such rows do not appear in the documentation. `BENCHMARK_RESULTS` names another folder than
benchmarks/results.
"""

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.sources import read_sources

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).parent / "results")
RUN = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S} {platform.node()} {os.getpid()}"
"""Name of this process: rows that have the same were measured in turn on one machine."""
UNCOMMITTED = "BENCHMARK_UNCOMMITTED"
SCRATCH = "tiny/"
"""Prefix of the results of dry runs with tiny sizes, which git ignores; these rows are never refused."""


def append_rows(script: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to the script's results, each with the versions, commit, command and date of this process.

    A row without `devices` is that of one device.

    This function touches no device: where every measurement has a process of its own, the process that writes the rows
    must not hold GPU memory.

    Raises:
        SystemExit: Files differ from the commit, or no commit is known, and `BENCHMARK_UNCOMMITTED` is not set.
    """
    from jaxstack.observe.environment import installed_versions

    common = {
        "versions": installed_versions(),
        **commit_fields(allow_uncommitted=script.startswith(SCRATCH) or bool(os.environ.get(UNCOMMITTED))),
        "command": "python " + " ".join(shlex.quote(a) for a in [_script_path(), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "run": RUN,
    }
    path = RESULTS / f"{script}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({"devices": 1, **row, **common}) + "\n")


def read_own_rows(script: str) -> list[dict[str, Any]]:
    """Return the stored rows of a script that were measured with the present files, oldest first.

    A measurement that goes on after a stop, or is compared with a stored one, takes these: others may be of other code.
    """
    path = RESULTS / f"{script}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    present = commit_fields(allow_uncommitted=True)
    return [row for row in map(json.loads, lines) if row["commit"] == present["commit"]
            and row.get("uncommitted") == present.get("uncommitted")]  # fmt: skip


def require_commit(script: str) -> None:
    """Refuse to start a measurement whose rows would be refused at its end.

    Raises:
        SystemExit: See `append_rows`.
    """
    commit_fields(allow_uncommitted=script.startswith(SCRATCH) or bool(os.environ.get(UNCOMMITTED)))


def commit_fields(allow_uncommitted: bool) -> dict[str, Any]:
    """Return `commit`, and `uncommitted` (the paths that differ from it) where there are such files.

    Raises:
        SystemExit: There are such files, or no commit is known, and `allow_uncommitted` is False.
    """
    sources = read_sources()
    if (sources.commit is None or sources.differing) and not allow_uncommitted:
        shown = ", ".join(sources.differing[:5]) + (", ..." if len(sources.differing) > 5 else "")
        found = f"these files differ from {sources.commit}: {shown}" if sources.commit else "no commit is known"
        raise SystemExit(
            f"No rows are written, as nobody could repeat them: {found}. Commit the changes (without git: copy the "
            f"manifest of `python benchmarks/sources.py --seal`), or set {UNCOMMITTED}=1 to write rows marked so."
        )
    return {"commit": sources.commit} | ({"uncommitted": list(sources.differing)} if sources.differing else {})


def print_table(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> None:
    """Print the chosen columns, aligned; numbers with four significant digits."""
    columns = list(columns)
    cells = [columns] + [[_format(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def _format(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _script_path() -> str:
    path = Path(sys.argv[0]).resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
