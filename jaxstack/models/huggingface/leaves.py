"""The parameters of a Transformer, each with the tensors of a Hugging Face checkpoint that hold it."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.tensors import Tensor
from jaxstack.models.transformer import Transformer


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
    # A layer's MLP and its experts have the same paths.
    table = {(row.path, row.leading): (at, row) for at, row in enumerate(rows)}
    found: list[tuple[Any, Leaf]] = []
    for keys, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        path = tuple(map(str, keys))
        inner = path[:2] == ("decoder", "layers")
        axes = variable.get_metadata().get("logical_axes") or ()
        known = "layers/" + "/".join(path[3:]) if inner else "/".join(path), int("expert" in axes)
        if known not in table:
            raise ConfigError(f"this family has no place for the parameter {'/'.join(path)}.")
        at, row = table[known]
        numbers = list(model.decoder.layer_numbers(int(path[2]))) if inner else [0]
        stacked = "layers" in axes
        lead = int(stacked) + row.leading
        experts = range(variable.shape[int(stacked)]) if row.leading else range(1)
        names = tuple(row.name.format(layer=n, expert=e) for n in numbers for e in experts)
        order = (int(path[2]) if inner else -1, at)
        found.append((order, Leaf("/".join(path), tuple(variable.shape), lead, names, row, variable)))
    return [leaf for _, leaf in sorted(found, key=lambda pair: pair[0])]
