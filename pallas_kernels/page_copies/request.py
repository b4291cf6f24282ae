"""Checked arguments of a call of `copy_newest`. Dims: R rows, W pages of a row, P pages of the cache."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import AnyArray
from pallas_kernels.target import Target, current_target

BLOCK = 256
"""Largest number of neighbouring keys that an attention kernel reads together."""


@dataclass(frozen=True)
class PageCopyRequest:
    """Checked arguments of one call of `copy_newest`, arrays or shape structs, as its arguments are described there.

    Attributes:
        target: the device that the call is lowered for.
    """

    keys: jax.Array
    values: jax.Array
    table: jax.Array
    lengths: jax.Array
    dtype: jnp.dtype
    target: Target

    @property
    def page_size(self) -> int:
        """Number of tokens of a page."""
        return self.keys.shape[1]

    @property
    def width(self) -> int:
        """Number of slots of a row of the copies."""
        return self.table.shape[1] * self.page_size

    def elements(self, pages: jax.Array) -> int:
        """Return how many numbers a token has in the cache of keys or that of values."""
        return math.prod(pages.shape[2:])

    def __str__(self) -> str:
        return f"pages {list(self.keys.shape)} {self.keys.dtype.name} table {list(self.table.shape)} on {self.target}"


def make_request(
    keys: AnyArray, values: AnyArray, table: AnyArray, lengths: AnyArray, dtype: jax.typing.DTypeLike
) -> PageCopyRequest:
    """Check the arguments of a call of `copy_newest`, and return them in one object.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule and the values.
    """
    keys, values, table, lengths = map(jnp.asarray, (keys, values, table, lengths))
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:2] != values.shape[:2] or keys.dtype != values.dtype:
        raise ValueError(
            f"keys and values must have the same pages [P, page, ...] and dtype; got {list(keys.shape)} {keys.dtype} "
            f"and {list(values.shape)} {values.dtype}"
        )
    if table.ndim != 2 or lengths.shape != table.shape[:1]:
        raise ValueError(f"table must be [R, W] and lengths [R]; got {list(table.shape)} and {list(lengths.shape)}")
    return PageCopyRequest(
        keys, values, table.astype(jnp.int32), lengths.astype(jnp.int32), jnp.dtype(dtype), current_target()
    )
