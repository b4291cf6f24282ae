"""Where a parameter lies in a Hugging Face checkpoint, and how its dims are ordered there.

A leaf is one of our parameters: it may hold all layers of a stack, all experts. A piece is the part of it that is one
tensor of theirs, or a part of one. D model, N heads, H head_dim, F feed-forward, V vocabulary.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.models.config import ModelConfig
from jaxstack.models.transformer import Transformer


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


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One of our parameters and the row that says where it lies.

    Attributes:
      path: of nested dicts, joined by `/`.
      lead: dims at its start of which each index is a tensor of its own.
      names: of those tensors, in order.
    """

    path: str
    shape: tuple[int, ...]
    lead: int
    names: tuple[str, ...]
    row: Tensor
    variable: Any

    @property
    def piece(self) -> tuple[int, ...]:
        return self.shape[self.lead :]

    def pieces(self, index: Sequence[slice]) -> Iterator[tuple[tuple[int, ...], str]]:
        """(where within a part of the leaf, name) of the tensors that the part needs."""
        sizes = self.shape[: self.lead]
        chosen = [range(size)[cut] for size, cut in zip(sizes, index, strict=False)]
        for at in itertools.product(*(range(len(r)) for r in chosen)):
            number = 0
            for r, i, size in zip(chosen, at, sizes, strict=True):
                number = number * size + r[i]
            yield at, self.names[number]


def find_leaves(config: ModelConfig, rows: Sequence[Tensor]) -> list[Leaf]:
    """The parameters of `Transformer(config)` with their places, in the order of the table.

    Raises:
      ConfigError: the table has no row for a parameter.
    """
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    table = {row.path: (at, row) for at, row in enumerate(rows)}
    found: list[tuple[Any, Leaf]] = []
    for keys, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        path = tuple(map(str, keys))
        inner = path[:2] == ("decoder", "layers")
        known = "layers/" + "/".join(path[3:]) if inner else "/".join(path)
        if known not in table:
            raise ConfigError(f"this family has no place for the parameter {'/'.join(path)}.")
        at, row = table[known]
        numbers = list(model.decoder.numbers(int(path[2]))) if inner else [0]
        stacked = "layers" in (variable.get_metadata().get("logical_axes") or ())
        lead = int(stacked) + row.leading
        experts = range(variable.shape[int(stacked)]) if row.leading else range(1)
        names = tuple(row.name.format(layer=n, expert=e) for n in numbers for e in experts)
        order = (int(path[2]) if inner else -1, at)
        found.append((order, Leaf("/".join(path), tuple(variable.shape), lead, names, row, variable)))
    return [leaf for _, leaf in sorted(found, key=lambda pair: pair[0])]


def whole(shape: Sequence[int]) -> tuple[slice, ...]:
    """The index of all of an array."""
    return tuple(slice(0, size) for size in shape)


def bounded(index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
    """The index with start and stop of every dim."""
    return tuple(slice(*cut.indices(size)[:2]) for cut, size in zip(index, shape, strict=True))


def abstract(leaf: Leaf, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
    """Shape, dtype and layout of a leaf."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.variable.dtype, sharding=sharding)
