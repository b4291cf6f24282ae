"""Maps jaxstack's parameters to the tensors of a Hugging Face checkpoint: names, order of dims, slices.

A leaf is one of our parameters, which may contain all layers of a stack and all experts. A piece is the part of a leaf
that is one tensor of the checkpoint, or a part of such a tensor.

Dims: D model, N heads, H head_dim, F feed-forward, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Tensor(NamedTuple):
    """Mapping between a parameter of jaxstack and its tensors in a Hugging Face checkpoint: names and order of dims."""

    path: str
    """Path of our parameter; in a layer, `layers/` and the path within the layer."""
    name: str
    """Name of the checkpoint's tensor, with {layer} and {expert}."""
    order: tuple[tuple[int, ...], ...]
    """Dims of our piece that each dim of the tensor merges: ((1, 2), (0,)) is [N x H, D] for our [D, N, H]."""
    part: tuple[int, int] = (0, 1)
    """(i, n): our piece is part i of n along the last dim of the tensor."""

    @property
    def leading(self) -> int:
        """Number of leading dims of the parameter that index separate tensors: 1 if there is one per expert, else 0."""
        return int("{expert}" in self.name)

    def shape(self, piece: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the checkpoint's tensor, given the parameter's shape for one layer and expert."""
        dims = [math.prod(piece[d] for d in group) for group in self.order]
        return (*dims[:-1], dims[-1] * self.part[1])

    def read(self, source: Any, piece: Sequence[int], index: Sequence[slice], on_device: bool = False) -> Any:
        """Read a slice of a parameter from its checkpoint tensor, reading little more than needed.

        Args:
          source: object that reads slices of the tensor, e.g. `safe_open(...).get_slice(name)`.
          piece: shape of the piece.
          index: the part, as slices with start and stop.
          on_device: whether `source` returns arrays of JAX, as the result is then, instead of NumPy's.
        """
        cuts = []
        sizes = []
        left = list(index)
        for group in self.order:
            first = group[0]
            inner = math.prod(piece[d] for d in group[1:])
            if all(index[d] == slice(0, piece[d]) for d in group[1:]):
                start = index[first].start
                stop = index[first].stop
                left[first] = slice(None)
            else:
                start = 0
                stop = piece[first]
            cuts.append(slice(start * inner, stop * inner))
            sizes += [stop - start, *(piece[d] for d in group[1:])]
        last = cuts[-1]
        whole = math.prod(piece[d] for d in self.order[-1])
        cuts[-1] = slice(last.start + self.part[0] * whole, last.stop + self.part[0] * whole)
        dims = [d for group in self.order for d in group]
        found = source[tuple(cuts)] if on_device else np.asarray(source[tuple(cuts)])
        found = found.reshape(sizes).transpose(np.argsort(dims))
        return found[tuple(left)]

    def write(self, piece: np.ndarray) -> np.ndarray:
        """Reorder the dims of a parameter (of one layer and expert) to those of its checkpoint tensor."""
        dims = [d for group in self.order for d in group]
        return piece.transpose(dims).reshape([math.prod(piece.shape[d] for d in group) for group in self.order])


def whole(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that select a whole array of the given shape."""
    return tuple(slice(0, size) for size in shape)


def explicit_slices(index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return array slices with an explicit start and stop in every dim, such as [0:4, 2:8] for [:, 2:]."""
    return tuple(slice(*cut.indices(size)[:2]) for cut, size in zip(index, shape, strict=True))
