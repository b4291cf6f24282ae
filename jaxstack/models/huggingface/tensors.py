"""Where a parameter lies in a Hugging Face checkpoint, and how its dims are ordered there.

A leaf is one of our parameters: it may hold all layers of a stack, all experts. A piece is the part of it that is one
tensor of theirs, or a part of one.

D model, N heads, H head_dim, F feed-forward, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Tensor(NamedTuple):
    """One row of a family's table."""

    path: str
    """Ours; within a layer after `layers/`."""
    name: str
    """Theirs, with {layer} and {expert}."""
    order: tuple[tuple[int, ...], ...]
    """For each dim of theirs, which dims of our piece it merges: ((1, 2), (0,)) is [N x H, D] of our [D, N, H]."""
    part: tuple[int, int] = (0, 1)
    """Ours is part i of n along the last dim of theirs."""

    @property
    def leading(self) -> int:
        """Dims of a leaf, after that of the layers, over which theirs is a tensor each."""
        return int("{expert}" in self.name)

    def shape(self, piece: Sequence[int]) -> tuple[int, ...]:
        """Theirs, of a piece's."""
        dims = [math.prod(piece[d] for d in group) for group in self.order]
        return (*dims[:-1], dims[-1] * self.part[1])

    def read(self, source: Any, piece: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        """A part of a piece of ours, from a slice of theirs that holds little more than it.

        Args:
          source: what takes slices of theirs, e.g. from `safe_open(...).get_slice(name)`.
          index: of the part, with start and stop.
        """
        cuts, sizes, left = [], [], list(index)
        for group in self.order:
            first, inner = group[0], math.prod(piece[d] for d in group[1:])
            if all(index[d] == slice(0, piece[d]) for d in group[1:]):
                start, stop = index[first].start, index[first].stop
                left[first] = slice(None)
            else:
                start, stop = 0, piece[first]
            cuts.append(slice(start * inner, stop * inner))
            sizes += [stop - start, *(piece[d] for d in group[1:])]
        last, whole = cuts[-1], math.prod(piece[d] for d in self.order[-1])
        cuts[-1] = slice(last.start + self.part[0] * whole, last.stop + self.part[0] * whole)
        dims = [d for group in self.order for d in group]
        found = np.asarray(source[tuple(cuts)]).reshape(sizes).transpose(np.argsort(dims))
        return found[tuple(left)]

    def write(self, piece: np.ndarray) -> np.ndarray:
        """Theirs (this part of it), of a piece."""
        dims = [d for group in self.order for d in group]
        return piece.transpose(dims).reshape([math.prod(piece.shape[d] for d in group) for group in self.order])


def whole(shape: Sequence[int]) -> tuple[slice, ...]:
    """The index of all of an array."""
    return tuple(slice(0, size) for size in shape)


def bounded(index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
    """The index with start and stop of every dim."""
    return tuple(slice(*cut.indices(size)[:2]) for cut, size in zip(index, shape, strict=True))
