"""Block sizes of the Hopper attention kernels, chosen for a call from tables of tuned sizes.

Nothing is measured at import or in a call: `python -m pallas_kernels.tune` measures and writes a table.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.tiling_tables import Row, read_tables
from pallas_kernels.target import device_kind


def _block(default: int | bool, *others: int | bool) -> Any:
    """Declare a field of `Tiling`: its default, and the other values that tuning tries."""
    return dataclasses.field(default=default, metadata={"values": (default, *others)})


@dataclass(frozen=True)
class Tiling:
    """Block sizes of all Hopper attention kernels; a field's first word names its kernel (`forward_keys`).

    A computing warpgroup has 64 rows: of queries, or of keys in dK and dV.

    Attributes:
        forward_warpgroups: Computing warpgroups of the forward; at head dim 64 a call without segments has 2 in place
            of 3 where that makes it faster (`balance.fewer_warpgroups_help`).
        forward_keys: Keys of a tile of the forward.
        forward_stages: Tiles of the forward in flight from global memory.
        fused_queries: Queries of a tile of the kernel that computes all gradients, with two computing warpgroups; 0 to
            use the other backward kernels, where the fused one is slower or does not fit into registers or shared
            memory (at head dim 256 with segment ids).
        fused_keys: Keys of its programs: 128, of which each warpgroup has 64, or 64 that both share, each with
            half of the head dim (`mosaic_wide_backward`, for wide heads; tiles of 64 queries only).
        fused_stages: Its tiles in flight; 2 with shared keys.
        query_keys: Keys of a tile of the dQ kernel, which has two computing warpgroups.
        query_stages: Its tiles in flight.
        key_queries: Queries of a tile of the dK and dV kernel, which has two computing warpgroups.
        key_stages: Its tiles in flight.
        key_value_together: True if one kernel computes both dK and dV, False if two do, which need
            fewer registers.
    """

    forward_warpgroups: int = _block(2, 3)
    forward_keys: int = _block(128, 64, 192, 256)
    forward_stages: int = _block(2, 3, 4)
    fused_queries: int = _block(64, 128, 0)
    fused_keys: int = _block(128, 64)
    fused_stages: int = _block(2, 1, 3)
    query_keys: int = _block(64, 32, 128)
    query_stages: int = _block(2, 3, 4)
    key_queries: int = _block(64, 32, 128)
    key_stages: int = _block(2, 3, 4)
    key_value_together: bool = _block(True, False)


RUNS_WITH: dict[str, dict[str, Any]] = {"query": {"fused_queries": 0}, "key": {"fused_queries": 0}}
"""Fields of other kernels, by kernel, without which that kernel does not run."""


def kernels() -> dict[str, dict[str, tuple]]:
    """Return the block sizes that tuning tries, as {kernel: {block name: values}}, the default value first."""
    found: dict[str, dict[str, tuple]] = {}
    for field in dataclasses.fields(Tiling):
        kernel, _, block = field.name.partition("_")
        found.setdefault(kernel, {})[block] = field.metadata["values"]
    return found


def with_blocks(tiling: Tiling, kernel: str, blocks: Mapping[str, Any]) -> Tiling:
    """Return `tiling` with new block sizes for one kernel."""
    return dataclasses.replace(tiling, **{f"{kernel}_{block}": value for block, value in blocks.items()})


def blocks_of(tiling: Tiling, kernel: str) -> dict[str, Any]:
    """Return the block sizes of one kernel as {block name: size}, the form stored in a table row."""
    return {block: getattr(tiling, f"{kernel}_{block}") for block in kernels()[kernel]}


def mask_kind(mask: Mask, packed: bool) -> str:
    """Classify a mask for the tables of block sizes: "packed", "causal", "full", or "windowed" for all others.

    Masks differ in how many tiles a row of tiles has and how many of those are cut.
    """
    if packed:
        return "packed"
    if mask == Mask(mask.causal):
        return "causal" if mask.causal else "full"
    return "windowed"


def choose_tiling(head_dim: int, mask: str, key_length: int, device: str | None = None) -> Tiling:
    """Choose block sizes for each kernel from the best-fitting row of the tables, or the defaults if none fits.

    A row fits if its head dim is at least `head_dim`: what has room for a wide head has room for a narrow one. Of those
    the nearest head dim wins, then the device, then the mask, then a user's own row, then the nearest length.

    Args:
        head_dim: H; the mean of H and V where values are narrower than keys.
        mask: Kind of mask, from `mask_kind`.
        key_length: S.
        device: Name of the device as jax gives it; None for the one that is lowered for.

    Raises:
        ValueError: a user's table cannot be read.
    """
    tables = read_tables({kernel: tuple(blocks) for kernel, blocks in kernels().items()})
    return _choose(tables, head_dim, mask, key_length, device_kind() if device is None else device)


@functools.lru_cache(maxsize=256)
def _choose(tables: tuple[tuple[Row, ...], ...], head_dim: int, mask: str, length: int, device: str) -> Tiling:
    tiling = Tiling()
    for kernel in kernels():
        ranked = [
            (*_mismatch(row, head_dim, mask, device), table, _length_ratio(row, length), place, row)
            for table, rows in enumerate(tables)
            for place, row in enumerate(rows)
            if row.kernel == kernel and row.head_dim >= head_dim
        ]
        if ranked:
            tiling = with_blocks(tiling, kernel, min(ranked)[-1].blocks)
    return tiling


def _mismatch(row: Row, head_dim: int, mask: str, device: str) -> tuple[int, bool, int]:
    other_mask = 0 if row.mask == mask else 1 if row.mask is None else 2
    return row.head_dim - head_dim, row.device not in device, other_mask


def _length_ratio(row: Row, length: int) -> float:
    return math.inf if row.length is None else abs(math.log2(length / row.length))
