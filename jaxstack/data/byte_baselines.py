"""What general-purpose compressors reach on a text: the yardstick for a language model's bits per byte."""

import gzip
import lzma


def compression_baselines(raw: bytes) -> dict[str, float]:
    """Bits per byte of `gzip -9` and `xz -9` on `raw` as one stream.

    Returns `{"gzip -9": ..., "xz -9": ...}`, empty for empty input. A model whose mean negative
    log-likelihood in bits, summed over these same bytes and divided by their number, is lower, compresses
    the text better.
    """
    if not raw:
        return {}
    bits = 8 / len(raw)
    return {
        "gzip -9": bits * len(gzip.compress(raw, compresslevel=9, mtime=0)),
        "xz -9": bits * len(lzma.compress(raw, preset=9)),
    }
