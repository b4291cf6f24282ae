"""Maps jaxstack's parameters to the tensors of a Hugging Face checkpoint: names, order of dims, slices.

A leaf is one of our parameters, which may contain all layers of a stack and all experts. A piece is the part of a leaf
that is one tensor of the checkpoint, or a part of such a tensor.

Dims: D model, N heads, H head_dim, F feed-forward, V vocabulary.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.models.config import ModelConfig
from jaxstack.models.transformer import Transformer


class Tensor(NamedTuple):
    """Mapping between a parameter of jaxstack and its tensors in a Hugging Face checkpoint: names and order of dims."""

    path: str
    """Path of our parameter; in a layer, `layers/` and the path within the layer."""
    name: str
    """Name of the checkpoint's tensor, with {layer} and {expert}."""
    order: tuple[tuple[int, ...], ...]
    """Dims of our piece that each dim of the tensor merges: ((1, 2), (0,)) is [N x H, D] for our [D, N, H]. A dim of
    size 1 merges none."""
    joined: int | None = None
    """Dim of the tensor along which the pieces of all rows of this name follow each other, in the table's order; None:
    the piece is the whole tensor."""
    interleaved: bool = False
    """True if n joined pieces, which are then equally large, take turns along the last dim: the first piece is the
    elements 0, n, 2 n and so on."""
    of_experts: bool = False
    """True if the tensor has all experts of a layer, in its first dim."""
    pairs: bool = False
    """True if the channels 2 i and 2 i + 1 of a head, the last dim of our piece, rotate together; ours are i and i +
    half."""

    groups: Callable[[ModelConfig], int] | None = None
    """Number of groups of the rows of pieces joined along dim 0: the tensor has the first group of each piece, such as
    the rows of one head, then the next groups. None: one group."""

    @property
    def leading(self) -> int:
        """Number of leading dims of the parameter that index separate tensors: 1 if there is one per expert, else 0."""
        return int("{expert}" in self.name)

    @property
    def dims(self) -> list[int]:
        """Dims of our piece in the order of the tensor."""
        return [d for group in self.order for d in group]

    def shape(self, piece: Sequence[int]) -> list[int]:
        """Return the shape of the piece in the checkpoint, given the parameter's shape for one layer and expert."""
        return [math.prod(piece[d] for d in group) for group in self.order]

    def write(self, piece: np.ndarray) -> np.ndarray:
        """Reorder the dims of a parameter (of one layer and expert) to those of its checkpoint tensor."""
        if self.pairs:
            piece = piece[..., np.argsort(even_then_odd(piece.shape[-1]))]
        return piece.transpose(self.dims).reshape(self.shape(piece.shape))

    def join(self, pieces: Sequence[np.ndarray], groups: int = 1) -> np.ndarray:
        """Join all pieces of a checkpoint tensor, each as `write` returns it."""
        if groups > 1:
            rows = [piece.reshape(groups, -1, *piece.shape[1:]) for piece in pieces]
            return np.concatenate(rows, axis=1).reshape(-1, *pieces[0].shape[1:])
        if self.interleaved:
            return np.stack(pieces, axis=-1).reshape(*pieces[0].shape[:-1], -1)
        return pieces[0] if self.joined is None else np.concatenate(pieces, axis=self.joined)


def even_then_odd(size: int) -> np.ndarray:
    """Return the order 0, 2, 4 ..., 1, 3, 5 ... of the channels of a head, which joins those that rotate together."""
    return np.arange(size).reshape(-1, 2).T.reshape(-1)


def whole(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that select a whole array of the given shape."""
    return tuple(slice(0, size) for size in shape)


def explicit_slices(index: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return array slices with an explicit start and stop in every dim, such as [0:4, 2:8] for [:, 2:]."""
    return tuple(slice(*cut.indices(size)[:2]) for cut, size in zip(index, shape, strict=True))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter of jaxstack's model, with the Hugging Face tensors that store it.

    Attributes:
      path: keys of nested dicts, joined by `/`.
      shape: shape of the parameter.
      leading_dims: number of leading dims (layers, experts) over which the checkpoint has separate tensors.
      names: names of those tensors, in order.
      row: row of the family's table.
      variable: abstract variable of the model.
      start: where the parameter's pieces begin along the dim `row.joined` of their tensors.
      joined_size: size of that dim.
      groups: number of groups of its rows, from `row.groups`.
    """

    path: str
    shape: tuple[int, ...]
    leading_dims: int
    names: tuple[str, ...]
    row: Tensor
    variable: nnx.Variable
    start: int = 0
    joined_size: int = 0
    groups: int = 1

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of the part of the parameter that one tensor of the checkpoint stores."""
        return self.shape[self.leading_dims :]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each of the checkpoint's tensors."""
        shape = self.row.shape(self.piece)
        if self.row.joined is not None:
            shape[self.row.joined] = self.joined_size
        return tuple(shape)

    @property
    def is_table(self) -> bool:
        """True for the token embedding, whose packed (quantized) weight is stored transposed."""
        return self.path == "embedding/table"

    @property
    def is_linear(self) -> bool:
        """True if the parameter is the weight of dense layers, which may be quantized in the checkpoint."""
        return len(self.row.order) == 2 and self.path.split("/")[0] != "embedding"

    @property
    def is_matrix(self) -> bool:
        """True if whole [out, in] tensors store the parameter, one or one for each expert, so that it may be packed."""
        order = [dim for dims in reversed(self.row.order) for dim in dims]
        unrolled = self.leading_dims == self.row.leading
        whole = unrolled and self.row.joined is None and not self.row.pairs and len(self.row.order) == 2
        multiplied = self.path.rpartition("/")[2] in ("kernel", "head") and "/router/" not in self.path
        return whole and (self.is_table or (multiplied and order == sorted(order)))

    @property
    def is_matrices(self) -> bool:
        """True if the parameter is all of, or a part of the outputs of, one tensor [experts, in, out]."""
        whole = self.leading_dims == 0 and self.row.of_experts and self.row.order == ((0,), (1,), (2,))
        return whole and self.row.joined in (None, 2)

    @property
    def outputs(self) -> slice:
        """Part of the last dim of its tensors that the parameter takes where it `is_matrices`."""
        if self.row.interleaved:
            step = self.joined_size // self.shape[-1]
            return slice(self.start // self.shape[-1], None, step)
        return slice(self.start, self.start + self.shape[-1])

    def read(self, source: Any, index: Sequence[slice], on_device: bool = False) -> Any:
        """Read a slice of one piece from its tensor, reading little more than needed.

        Args:
          source: object that reads slices of the tensor, e.g. `safe_open(...).get_slice(name)`.
          index: the part of the parameter, as slices with start and stop; those of the leading dims are ignored.
          on_device: whether `source` returns arrays of JAX, as the result is then, instead of NumPy's.
        """
        piece = self.piece
        cuts = []
        sizes = []
        left = list(index[self.leading_dims :])
        for group in self.row.order:
            if not group:
                cuts.append(slice(0, 1))
                continue
            first = group[0]
            inner = math.prod(piece[d] for d in group[1:])
            if all(left[d] == slice(0, piece[d]) for d in group[1:]):
                start = left[first].start
                stop = left[first].stop
                left[first] = slice(None)
            else:
                start = 0
                stop = piece[first]
            cuts.append(slice(start * inner, stop * inner))
            sizes += [stop - start, *(piece[d] for d in group[1:])]
        step = 1
        if self.groups > 1:
            return self._arrange(self._read_groups(source, cuts, on_device), sizes, left)
        if self.row.joined is not None:
            cut = cuts[self.row.joined]
            if self.row.interleaved:
                step = self.joined_size // self.row.shape(piece)[-1]
                cuts[-1] = slice(cut.start * step, cut.stop * step)
            else:
                cuts[self.row.joined] = slice(cut.start + self.start, cut.stop + self.start)
        found = source[tuple(cuts)] if on_device else np.asarray(source[tuple(cuts)])
        if step > 1:
            found = found[..., self.start * step // self.joined_size :: step]
        return self._arrange(found, sizes, left)

    def _read_groups(self, source: Any, cuts: Sequence[slice], on_device: bool) -> Any:
        """Read rows of this piece from a tensor in which the rows of all pieces take turns, a group of rows each."""
        rows, all_rows, start = (
            size // self.groups for size in (self.row.shape(self.piece)[0], self.joined_size, self.start)
        )
        first = cuts[0].start // rows
        last = -(-cuts[0].stop // rows)
        read = source[(slice(first * all_rows, last * all_rows), *cuts[1:])]
        found = read if on_device else np.asarray(read)
        found = found.reshape(last - first, all_rows, *found.shape[1:])[:, start : start + rows]
        found = found.reshape(-1, *found.shape[2:])
        return found[cuts[0].start - first * rows : cuts[0].stop - first * rows]

    def _arrange(self, found: Any, sizes: Sequence[int], left: Sequence[slice]) -> Any:
        """Return what was read in the order of the parameter's dims, cut further by `left`."""
        found = found.reshape(sizes).transpose(np.argsort(self.row.dims))
        if self.row.pairs:
            found = found[..., even_then_odd(self.piece[-1])]
        return found[tuple(left)]

    def pieces(self, index: Sequence[slice]) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield (index along the leading dims, tensor name) of each tensor needed to read a slice of the parameter.

        Args:
          index: the part, as slices of the leading dims (further slices are ignored).
        """
        sizes = self.shape[: self.leading_dims]
        chosen = [range(size)[cut] for size, cut in zip(sizes, index, strict=False)]
        for at in itertools.product(*(range(len(r)) for r in chosen)):
            number = 0
            for r, i, size in zip(chosen, at, sizes, strict=True):
                number = number * size + r[i]
            yield at, self.names[number]


_LAYER = re.compile(r"^.*layers\.\{layer\}\.")
"""Prefix of the names of a layer's tensors."""


def find_leaves(config: ModelConfig, rows: Sequence[Tensor], prediction_prefix: str | None = None) -> list[Leaf]:
    """List the parameters of a Transformer with the Hugging Face tensors that store them.

    Args:
      config: the model.
      rows: conversion between parameters and tensors.
      prediction_prefix: see `Family`.

    Raises:
      ConfigError: the table has no row for a parameter.
    """
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    # A layer's MLP and its experts have the same paths.
    table = {(row.path, row.leading or int(row.of_experts)): (at, row) for at, row in enumerate(rows)}
    found: list[tuple[Any, Leaf]] = []
    for keys, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        path = tuple(map(str, keys))
        inner = path[:2] in (("decoder", "layers"), ("mtp", "layers"))
        axes = variable.get_metadata().get("logical_axes") or ()
        known = "layers/" + "/".join(path[3:]) if inner else "/".join(path), int("expert" in axes)
        if known not in table:
            raise ConfigError(f"this family has no place for the parameter {'/'.join(path)}.")
        at, row = table[known]
        numbers = [0]
        if inner:  # in the files layers for multi-token prediction follow the model's
            index = int(path[2])
            predicts = path[0] == "mtp"
            numbers = [config.num_layers + index] if predicts else list(model.decoder.layer_numbers(index))
            if predicts and prediction_prefix is not None:
                row = row._replace(name=_LAYER.sub(f"{prediction_prefix}layers.{index}.", row.name))
        stacked = "layers" in axes
        leading_dims = int(stacked) + row.leading
        experts = range(variable.shape[int(stacked)]) if row.leading else range(1)
        names = tuple(row.name.format(layer=n, expert=e) for n in numbers for e in experts)
        order = (numbers[0] if inner else -1, at)
        groups = 1 if row.groups is None else row.groups(config)
        leaf = Leaf("/".join(path), tuple(variable.shape), leading_dims, names, row, variable, groups=groups)
        found.append((order, leaf))
    return _place_joined([leaf for _, leaf in sorted(found, key=lambda pair: pair[0])])


def _place_joined(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the leaves with the place of those that share tensors, which follow each other in the given order."""
    sizes: dict[tuple[str, ...], int] = {}
    placed = []
    for leaf in leaves:
        start = sizes.get(leaf.names, 0)
        if (dim := leaf.row.joined) is not None:
            sizes[leaf.names] = start + leaf.row.shape(leaf.piece)[dim]
        placed.append(dataclasses.replace(leaf, start=start))
    return [dataclasses.replace(leaf, joined_size=sizes.get(leaf.names, 0)) for leaf in placed]


def find_copies(config: ModelConfig, leaves: Sequence[Leaf], rows: Sequence[Tensor]) -> list[Leaf]:
    """List the further tensors, of the layers for multi-token prediction, in which a file stores some parameters again.

    Args:
      leaves: from `find_leaves`.
      rows: `Family.copies`.
    """
    known = {leaf.path: leaf for leaf in leaves}
    layers = range(config.num_layers, config.num_layers + config.num_nextn_predict_layers)
    return [
        dataclasses.replace(known[row.path], row=row, names=(row.name.format(layer=layer),))
        for layer in layers
        for row in rows
        if row.path in known
    ]
