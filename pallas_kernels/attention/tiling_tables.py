"""JSON tables of tuned block sizes: the one that the package ships, and a user's own, which takes precedence.

A table is a list of rows, each the blocks of one kernel on one device for one head dim and kind of mask:

    {"device": "H200", "kernel": "forward", "head_dim": 128, "mask": "causal", "length": 4096,
     "blocks": {"warpgroups": 2, "keys": 128, "stages": 2}, "measured": "0.71 ms, jax 0.11.2"}

A row without `mask` or `length` applies to all of them. A user's own table is the file that `JAXSTACK_TILINGS` names,
else `jaxstack/tilings.json` in the user's cache directory.
"""

import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SHIPPED = Path(__file__).with_name("tilings.json")
VARIABLE = "JAXSTACK_TILINGS"

Known = Mapping[str, tuple[str, ...]]
"""Names of the blocks of each kernel."""


@dataclass(frozen=True, eq=False)
class Row:
    """Row of a table: the tuned block sizes of one kernel for a device, a head dim and optionally a mask and a length.

    Attributes:
        device: Part of the name that jax gives the device.
        kernel: Name of the kernel.
        head_dim: H; the mean of H and V where values are narrower than keys.
        blocks: Block sizes by name.
        mask: Kind of mask (`tilings.mask_kind`); None for any.
        length: Number of keys, S; None for any.
        measured: How it was measured, in words.
    """

    device: str
    kernel: str
    head_dim: int
    blocks: Mapping[str, int | bool]
    mask: str | None = None
    length: int | None = None
    measured: str | None = None

    @property
    def key(self) -> tuple:
        """Key that identifies the row: when tables are merged, a new row replaces an old row with the same key."""
        return self.device, self.kernel, self.head_dim, self.mask or "", self.length or 0


def user_table_path() -> Path:
    """Return the path of the JSON file with the user's own tuned block sizes."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "jaxstack" / "tilings.json"


def read_tables(known: Known) -> tuple[tuple[Row, ...], ...]:
    """Return the user's and the shipped table of tuned block sizes; files are read again only after they change.

    Rows of kernels or blocks that this version does not have are skipped: a table may be older or newer.

    Raises:
        ValueError: a file is not such a table, or the one that `JAXSTACK_TILINGS` names does not exist.
    """
    names = tuple(sorted(known.items()))
    user = user_table_path()
    if os.environ.get(VARIABLE) and not user.is_file():
        raise ValueError(
            f"{VARIABLE} names {user}, which is not a file: write it by `python -m pallas_kernels.tune` or unset it"
        )
    return _read(user, _stamp(user), names), _read(SHIPPED, _stamp(SHIPPED), names)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a file's modification time and size, to notice changes; None if it is missing or not trusted."""
    try:
        found = path.stat()
    except OSError:
        return None
    # A cache file that another user owns is not trusted.
    if path != SHIPPED and not os.environ.get(VARIABLE) and found.st_uid != os.getuid():
        return None
    return found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=16)
def _read(path: Path, stamp: tuple[int, int] | None, known: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[Row, ...]:
    blocks = dict(known)
    rows = [] if stamp is None else load(path)
    return tuple(row for row in rows if set(row.blocks) == set(blocks.get(row.kernel, ())))


def load(path: Path) -> list[Row]:
    """Read a table of block sizes from a JSON file.

    Raises:
        ValueError: it is not a JSON list of rows.
    """
    try:
        rows = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no table of block sizes ({error}): delete it or mend it") from None
    for row in rows:
        sizes = row.blocks.values() if isinstance(row.blocks, dict) else [None]
        if not all(isinstance(size, int) and size >= 0 for size in (*sizes, row.head_dim, row.length or 0)):
            raise ValueError(f"{path}: head dim, length and blocks are numbers, got {dataclasses.asdict(row)}: mend it")
    return rows


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Merge two tables of block sizes and sort the rows; of rows with equal keys the one in `new` wins."""
    rows = {row.key: row for row in (*old, *new)}
    return [rows[key] for key in sorted(rows)]


def save(path: Path, rows: Sequence[Row]) -> None:
    """Write a table of block sizes as JSON, one row per line, atomically: readers see the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lines = [
        json.dumps({name: value for name, value in dataclasses.asdict(row).items() if value is not None})
        for row in rows
    ]
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write("[\n  " + ",\n  ".join(lines) + "\n]\n" if lines else "[]\n")
    os.replace(file.name, path)
