"""Reads the rows that benchmarks append to `benchmarks/results/`, and chooses those that documentation shows."""

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Row = Mapping[str, Any]
RATE = "tokens_per_second_per_device"


def can_be_repeated(row: Row) -> bool:
    """Return True if a row names the commit that it was measured at, without uncommitted files, or carries a note."""
    commit = row.get("commit") or ""
    return bool(row.get("note") or (commit and "dirty" not in commit and not row.get("uncommitted")))


def read_all(path: Path) -> list[Row]:
    """Return the rows of a file that can be repeated, oldest first; none if there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [row for row in (json.loads(line) for line in lines if line.strip()) if can_be_repeated(row)]
    return sorted((with_present_path(row) for row in rows), key=lambda row: row["date"])


@functools.cache
def script_path(name: str) -> str | None:
    """Return the path of a benchmark below the root of the repository, by its name; None if there is none."""
    found = [*(ROOT / "benchmarks").glob(f"**/{name}.py")]
    return found[0].relative_to(ROOT).as_posix() if found else None


def with_present_path(row: Row) -> Row:
    """Return a row whose command has the present path of its script; of a removed one, where the command still runs.

    Rows name the path that the script had at their commit.
    """
    found = re.search(r"benchmarks/(?:\w+/)?(\w+)\.py", row["command"])
    if found is None:
        return row
    path = script_path(found[1])
    if path is None:
        return {**row, "command": f"git checkout {row['commit'][:7]} && {row['command']}"}
    return {**row, "command": row["command"].replace(found[0], path)}


def newest_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the newest row of each work, implementation, variant and device; works in order of first appearance."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row.get(name) for name in ("work", "implementation", "variant", "device", "devices"))
        if key not in newest or row["date"] >= newest[key]["date"]:
            newest[key] = row
    works = list(dict.fromkeys(key[0] for key in newest))
    return sorted(newest.values(), key=lambda row: works.index(row.get("work")))


def read_rows(path: Path) -> list[Row]:
    """Return the newest rows of a file, see `newest_rows`."""
    return newest_rows(read_all(path))


@dataclass(frozen=True)
class Comparison:
    """A work's fastest row of ours and the fastest peer in the same run, and the row of the device's limit if known."""

    work: str
    ours: Row
    peer: Row | None
    limit: Row | None

    @property
    def ratio(self) -> float | None:
        """Our tokens/s over those of the peer."""
        return self.ours[RATE] / self.peer[RATE] if self.peer else None

    @property
    def limit_fraction(self) -> float | None:
        """Our tokens/s over the limit."""
        return self.ours[RATE] / self.limit[RATE] if self.limit else None


def is_sustained(row: Row) -> bool:
    """Return True if the row was measured for as long as a GPU takes to settle on its clock."""
    return row.get("measured_seconds", 0) >= 20


def compare(work: str, rows: Iterable[Row], limits: Iterable[Row]) -> Comparison | None:
    """Choose the newest run of a work: sustained before short, with a peer before without.

    Returns:
        None if there is no row of ours.
    """
    runs: dict[Any, list[Row]] = {}
    for row in rows:
        if row["work"] == work and RATE in row:
            runs.setdefault(row.get("run") or (row["commit"], row.get("host"), row["command"]), []).append(row)
    found = []
    for run in runs.values():
        ours = [row for row in run if row["implementation"].startswith("jaxstack")]
        peers = [row for row in run if row not in ours]
        if ours:
            best, peer = (max(part, key=lambda row: row[RATE], default=None) for part in (ours, peers))
            found.append((is_sustained(ours[0]), bool(peers), run[-1]["date"], best, peer))
    if not found:
        return None
    *_, ours, peer = max(found, key=lambda one: one[:3])
    limit = [row for row in limits if all(row.get(key) == ours.get(key) for key in ("work", "device", "devices"))]
    return Comparison(work, ours, peer, limit[-1] if limit else None)


def read_newest_run(path: Path, device: str) -> list[Row]:
    """Return the rows of a file that its newest run on a device wrote, in their order."""
    rows = [row for row in read_all(path) if row["device"] == device]
    newest = max((row["date"] for row in rows), default="")
    return [row for row in rows if row["date"] == newest]
