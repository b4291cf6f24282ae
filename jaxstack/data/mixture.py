"""The order in which training rows are read from all sources, which depends only on the seed and the weights."""

import hashlib
import os
from collections.abc import Sequence

os.environ["ENABLE_PYGRAIN_PROMETHEUS_TELEMETRY"] = "false"  # Grain would listen on every interface

import grain

from jaxstack.data.seeds import source_seed
from jaxstack.errors import ConfigError

MOST_ROWS = 2**32 - 1  # Grain's index shuffle works on 32 bits


class _Rows:
    """Data source for Grain whose item i is the pair (source, i), which represents row i of that source."""

    def __init__(self, source: int, count: int):
        self._source = source
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index) -> tuple[int, int]:
        return self._source, int(index)

    def __repr__(self) -> str:
        return f"rows of source {self._source} ({self._count})"


def row_order(counts: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> grain.MapDataset:
    """Return the order of training rows: an endless dataset whose element i is (source, row) of global sample i.

    Every source is read in a new permutation each epoch, decided by (seed, source, epoch). Sources alternate in the
    proportion of their weights within every stretch of the order, so that no random draw can skew a short run.

    Args:
      counts: number of rows of each source.
      weights: share of each source, relative to the others.
      seed: decides the permutations.
      shuffle: False: rows in their order.

    Raises:
      ConfigError: a source has more rows than Grain's shuffle can order.
    """
    parts = []
    for source, count in enumerate(counts):
        if count > MOST_ROWS:
            raise ConfigError(
                f"source {source} has {count} rows, the shuffle orders at most {MOST_ROWS}: "
                "raise the sequence length, or list the data as several sources"
            )
        dataset = grain.MapDataset.source(_Rows(source, count))
        if shuffle:
            dataset = dataset.shuffle(seed=source_seed(seed, source))
        parts.append(dataset.repeat())
    if len(parts) == 1:
        return parts[0]
    return grain.MapDataset.mix(parts, weights=list(weights))


def order_hash(order: grain.MapDataset) -> str:
    """Return a hash of parts of the row order, to detect a version of Grain that shuffles differently."""
    picked = [*range(64), *(2**k + k for k in range(7, 31))]
    return hashlib.sha256(repr([order[i] for i in picked]).encode()).hexdigest()
