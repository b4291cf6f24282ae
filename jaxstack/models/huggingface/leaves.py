"""Parameters of a Transformer, each with the Hugging Face tensors that it is read from and written to."""

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
    """A parameter of jaxstack's model, with the Hugging Face tensors that store it.

    Attributes:
      path: keys of nested dicts, joined by `/`.
      shape: shape of the parameter.
      leading_dims: number of leading dims (layers, experts) over which the checkpoint has separate tensors.
      names: names of those tensors, in order.
      row: row of the family's table.
      variable: abstract variable of the model.
    """

    path: str
    shape: tuple[int, ...]
    leading_dims: int
    names: tuple[str, ...]
    row: Tensor
    variable: nnx.Variable

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of the part of the parameter that one tensor of the checkpoint stores."""
        return self.shape[self.leading_dims :]

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
        """True if one whole [out, in] tensor stores the parameter, so that it may be loaded as a packed weight."""
        order = [dim for dims in reversed(self.row.order) for dim in dims]
        whole = self.leading_dims == 0 and self.row.part == (0, 1) and len(self.row.order) == 2
        return whole and (self.is_table or order == sorted(order))

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


def find_leaves(config: ModelConfig, rows: Sequence[Tensor]) -> list[Leaf]:
    """List the parameters of a Transformer with the Hugging Face tensors that store them.

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
        leading_dims = int(stacked) + row.leading
        experts = range(variable.shape[int(stacked)]) if row.leading else range(1)
        names = tuple(row.name.format(layer=n, expert=e) for n in numbers for e in experts)
        order = (int(path[2]) if inner else -1, at)
        found.append((order, Leaf("/".join(path), tuple(variable.shape), leading_dims, names, row, variable)))
    return [leaf for _, leaf in sorted(found, key=lambda pair: pair[0])]
