"""Seeds of data sources."""

import hashlib


def source_seed(seed: int, source: int | str) -> int:
    """Derive a 32-bit seed for one data source, independent of those of other sources and of similar seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed} {source}".encode()).digest()[:4], "big")
