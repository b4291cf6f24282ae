"""Bits per byte to which gzip and xz compress a text, as a baseline for the loss of a language model."""

import gzip
import lzma


def compression_baselines(raw: bytes) -> dict[str, float]:
    """Return the bits per byte that `gzip -9` and `xz -9` need for `raw`, compressed as one stream.

    A model compresses the text better if its negative log-likelihood in bits, summed over the same bytes and divided
    by their number, is lower.

    Returns:
      `{"gzip -9": ..., "xz -9": ...}`; empty for empty input.
    """
    if not raw:
        return {}
    bits = 8 / len(raw)
    return {
        "gzip -9": bits * len(gzip.compress(raw, compresslevel=9, mtime=0)),
        "xz -9": bits * len(lzma.compress(raw, preset=9)),
    }
