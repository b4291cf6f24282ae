"""Ready layouts for `block_sparse_attention`: boolean numpy arrays [blocks, blocks], queries by keys.

With `causal` the blocks after the diagonal are left out, and the pattern of fewer blocks is the upper left corner of
that of more: a model sees the same however long its input is.
"""

import numpy as np


def strided(blocks: int, *, local: int, stride: int, causal: bool = True) -> np.ndarray:
    """The `local` nearest blocks, itself included, and every `stride`-th (Child et al., arXiv:1904.10509).

    Without `causal` to both sides.
    """
    distance = _distance(blocks, local=local, stride=stride)
    return _limit((np.abs(distance) < local) | (distance % stride == 0), causal)


def fixed(blocks: int, *, stride: int, summary: int, causal: bool = True) -> np.ndarray:
    """All blocks of its own stripe of `stride` blocks, and the last `summary` of every stripe (Child et al. 2019)."""
    _distance(blocks, stride=stride, summary=summary)
    if summary > stride:
        raise ValueError(f"summary ({summary}) counts blocks of a stripe and must not exceed stride ({stride})")
    number = np.arange(blocks)
    same = number[:, None] // stride == number[None, :] // stride
    return _limit(same | (number % stride >= stride - summary)[None, :], causal)


def bigbird(
    blocks: int, *, window: int, global_blocks: int, random_blocks: int, seed: int = 0, causal: bool = True
) -> np.ndarray:
    """Neighbours, global blocks and random blocks (BigBird, Zaheer et al., arXiv:2007.14062).

    Args:
        window: the nearest blocks, itself included; without `causal` to both sides.
        global_blocks: so many first blocks are seen by all, and see all that `causal` leaves.
        random_blocks: drawn for each row from the blocks that it does not see anyway, all of them where fewer are left.
        seed: of the draw, which is made for each row by itself.
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
