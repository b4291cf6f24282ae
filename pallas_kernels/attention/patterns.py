"""Well-known block-sparse attention patterns, as boolean numpy arrays [query blocks, key blocks].

With `causal` the blocks after the diagonal are left out, and the pattern for fewer blocks is the upper left corner of
that for more: a model sees the same whatever the length of its input.
"""

import numpy as np
from jaxtyping import Bool

BlockPattern = Bool[np.ndarray, "blocks blocks"]


def strided(blocks: int, *, local: int, stride: int, causal: bool = True) -> BlockPattern:
    """Return the strided pattern: the nearest and every `stride`-th key block (Child et al., arXiv:1904.10509).

    Without `causal` the pattern extends to both sides.
    """
    distance = _distance(blocks, local=local, stride=stride)
    return _limit((np.abs(distance) < local) | (distance % stride == 0), causal)


def fixed(blocks: int, *, stride: int, summary: int, causal: bool = True) -> BlockPattern:
    """Return the fixed pattern: a query sees its own run of `stride` key blocks, and the last blocks of every run.

    The runs (stripes) divide the sequence; of each one the last `summary` blocks are seen (Child et al.,
    arXiv:1904.10509).
    """
    _distance(blocks, stride=stride, summary=summary)
    if summary > stride:
        raise ValueError(f"summary ({summary}) counts blocks of a stripe and must not exceed stride ({stride})")
    number = np.arange(blocks)
    same = number[:, None] // stride == number[None, :] // stride
    return _limit(same | (number % stride >= stride - summary)[None, :], causal)


def bigbird(
    blocks: int, *, window: int, global_blocks: int, random_blocks: int, seed: int = 0, causal: bool = True
) -> BlockPattern:
    """Return a pattern of neighbouring, global and random blocks (BigBird, Zaheer et al., arXiv:2007.14062).

    Args:
        blocks: number of rows and columns of the pattern.
        window: number of nearest blocks seen, itself included; without `causal` on both sides.
        global_blocks: number of first blocks that every block sees, and that see all blocks that `causal` allows.
        random_blocks: number of further blocks drawn for each row from those that it does not see, or all of them if
            fewer are left.
        seed: seed of the draws; each row has its own draw.
        causal: True to leave out the blocks after the diagonal.
    """
    distance = _distance(blocks, window=window)
    for name, count in (("global_blocks", global_blocks), ("random_blocks", random_blocks)):
        if count < 0:
            raise ValueError(f"{name} must be at least 0; got {count}")
    number = np.arange(blocks)
    seen = (np.abs(distance) < window) | (number < global_blocks)[:, None] | (number < global_blocks)[None, :]
    for row in range(blocks):
        free = np.flatnonzero(~seen[row, : row + 1 if causal else blocks])
        generator = np.random.default_rng([seed, row])
        seen[row, generator.permutation(free)[:random_blocks]] = True
    return _limit(seen, causal)


def _distance(blocks: int, **at_least_one: int) -> np.ndarray:
    for name, count in {"blocks": blocks, **at_least_one}.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1; got {count}")
    return np.arange(blocks)[:, None] - np.arange(blocks)[None, :]


def _limit(pattern: np.ndarray, causal: bool) -> np.ndarray:
    return np.tril(pattern) if causal else pattern
