"""Result rows: one JSON object a line in `benchmarks/results/<script>.jsonl`, and a printed table.

The variable `BENCHMARK_RESULTS` names another folder than benchmarks/results.
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

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).parent / "results")


def append_rows(script: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows to the script's results, each with the versions, commit, command and date of this process.

    Touches no device: where every measurement has a process of its own, this one must hold no memory of a GPU.
    """
    from jaxstack.observe.environment import git_commit, installed_versions

    common = {
        "versions": installed_versions(),
        "commit": git_commit(),
        "command": "python " + " ".join(shlex.quote(a) for a in [_script_path(), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
    }
    path = RESULTS / f"{script}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**row, **common}) + "\n")


def print_table(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> None:
    """Prints the chosen columns, aligned; numbers with four significant digits."""
    columns = list(columns)
    cells = [columns] + [[_shown(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _script_path() -> str:
    path = Path(sys.argv[0]).resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
