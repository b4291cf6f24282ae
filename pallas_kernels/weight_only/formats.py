"""Formats of packed weights: how a matrix [out, in] is stored in few bits, and how it is dequantized.

A format is a frozen dataclass; its arrays are a dict next to it, in `packed.PackedWeight`.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.weight_only.rounding_grid import Grid

Arrays = Mapping[str, jax.Array]
"""Arrays of one packed matrix by name."""


def integer_dtype(bits: int) -> jax.typing.DTypeLike:
    """Return the storage dtype of signed integers of `bits` bits: int4 (two per byte) or int8."""
    return jnp.int4 if bits <= 4 else jnp.int8


def index_dtype(bits: int) -> jax.typing.DTypeLike:
    """Return the storage dtype of indices of `bits` bits: uint4 (two per byte) or uint8."""
    return jnp.uint4 if bits <= 4 else jnp.uint8


class Format(ABC):
    """Storage format of a quantized matrix [out, in]. Subclasses are frozen dataclasses, listed in `FORMATS`."""

    name: ClassVar[str]
    divides_units: ClassVar[bool] = True
    """True if parts smaller than a `unit` can have scales of their own."""
    numbers: ClassVar[str | None] = None
    """The array that holds weights as they are, in any floating-point dtype; None: there is none."""

    @property
    @abstractmethod
    def bits_of(self) -> Mapping[str, int]:
        """Bits per value of each integer array, by array name; float arrays are not listed."""

    @property
    @abstractmethod
    def dims_of(self) -> Mapping[str, tuple[str | None, ...]]:
        """Dim of the matrix ("out", "in" or None) that each dim of a stored array corresponds to, by array name."""

    @abstractmethod
    def dense(self, arrays: Arrays) -> Float[Array, "out in"]:
        """Dequantize the matrix to float32 [out, in]."""

    def unit(self, arrays: Arrays) -> tuple[int, int]:
        """Return the numbers of outputs and of inputs that share a scale; 1 if all share it, or none do.

        A matrix can be cut into parts at multiples of them. The arrays may be those of a stack of matrices.
        """
        sizes: dict[str | None, list[int]] = {"out": [], "in": [], None: []}
        for name, array in arrays.items():
            for dim, size in zip(self.dims_of[name], array.shape[-2:], strict=True):
                sizes[dim] += [size] if size > 1 else []  # one scale for all serves any part of them
        outputs, inputs = (max(sizes[dim], default=1) // min(sizes[dim], default=1) for dim in ("out", "in"))
        return outputs, inputs

    def with_unit(self, outputs: int | None, inputs: int | None) -> "Format":
        """Return the format of the same values with scales repeated for a smaller `unit`; None: it is as before."""
        del outputs, inputs
        return self

    @property
    def weight_only(self) -> "Format":
        """The format of the same arrays whose products take inputs as they are, not rounded."""
        return self

    def take_rows(self, arrays: Arrays, ids: Int[Array, " rows"]) -> dict[str, jax.Array]:
        """Return the stored arrays of only the rows `ids` of the matrix."""
        return {name: array[ids] for name, array in arrays.items()}


@dataclasses.dataclass(frozen=True)
class IntegerFormat(Format):
    """Integers with a scale for each row or each group of inputs: w = q * scale, or (q - zero) * scale.

    Arrays: `q` int4 or int8 [out, in]; `scales` float [out, groups]; `zeros` as q [out, groups], only if the grid of
    the integers is not symmetric about 0.
    """

    name: ClassVar[str] = "integer"
    grid: Grid

    @property
    def bits_of(self) -> Mapping[str, int]:
        return {"q": self.grid.bits, "zeros": self.grid.bits}

    @property
    def dims_of(self) -> Mapping[str, tuple[str | None, ...]]:
        return {"q": ("out", "in"), "scales": ("out", "in"), "zeros": ("out", "in")}

    def with_unit(self, outputs: int | None, inputs: int | None) -> "IntegerFormat":
        return self if inputs is None else dataclasses.replace(self, grid=Grid(self.grid.bits, inputs))

    def dense(self, arrays: Arrays) -> Float[Array, "out in"]:
        q = arrays["q"].astype(jnp.float32)
        scales = arrays["scales"].astype(jnp.float32)
        size = q.shape[1] // scales.shape[1]
        if "zeros" in arrays:
            q -= jnp.repeat(arrays["zeros"].astype(jnp.float32), size, axis=1)
        return q * jnp.repeat(scales, size, axis=1)


@dataclasses.dataclass(frozen=True)
class RoundedInputFormat(IntegerFormat):
    """W8A8: 8-bit integers with a scale for each output, multiplied with inputs rounded to int8 with a scale per token.

    Arrays: `q` int8 [out, in] and `scales` float [out, 1].
    """

    name: ClassVar[str] = "integer_w8a8"
    grid: Grid = Grid(8)

    def __post_init__(self) -> None:
        if self.grid != Grid(8):
            raise ValueError(
                "inputs rounded to int8 need weights with bits 8 and group_size null (a scale for each output)."
            )

    @property
    def weight_only(self) -> IntegerFormat:
        return IntegerFormat(self.grid)


@dataclasses.dataclass(frozen=True)
class Float8Format(Format):
    """FP8 numbers (e4m3) with a scale for each row, each group of inputs or each block: w = q * scale.

    Arrays: `q` float8_e4m3fn [out, in]; `scales` float [out, groups], or [out / rows, in / columns] rounded up, for
    blocks of rows x columns, as DeepSeek-V3 stores its weights (arXiv:2412.19437, section 3.3).

    Attributes:
      rows, columns: outputs and inputs of a block; None: there are no blocks.
    """

    name: ClassVar[str] = "float8"
    rows: int | None = None
    columns: int | None = None

    @property
    def bits_of(self) -> Mapping[str, int]:
        return {}

    @property
    def dims_of(self) -> Mapping[str, tuple[str | None, ...]]:
        return {"q": ("out", "in"), "scales": ("out", "in")}

    def unit(self, arrays: Arrays) -> tuple[int, int]:
        if self.rows is None or self.columns is None:
            return super().unit(arrays)
        rows, columns = arrays["scales"].shape[-2:]
        return self.rows if rows > 1 else 1, self.columns if columns > 1 else 1

    def with_unit(self, outputs: int | None, inputs: int | None) -> "Float8Format":
        return self if self.rows is None else Float8Format(outputs or self.rows, inputs or self.columns)

    def dense(self, arrays: Arrays) -> Float[Array, "out in"]:
        q = arrays["q"].astype(jnp.float32)
        scales = arrays["scales"].astype(jnp.float32)
        if self.rows is None or self.columns is None:
            return q * jnp.repeat(scales, q.shape[1] // scales.shape[1], axis=1)
        if scales.shape[0] < q.shape[0]:  # otherwise each row has its own, as from `take_rows`
            scales = jnp.repeat(scales, self.rows, axis=0)[: q.shape[0]]
        return q * jnp.repeat(scales, self.columns, axis=1)[:, : q.shape[1]]

    def take_rows(self, arrays: Arrays, ids: Int[Array, " rows"]) -> dict[str, jax.Array]:
        return {"q": arrays["q"][ids], "scales": arrays["scales"][ids if self.rows is None else ids // self.rows]}


@dataclasses.dataclass(frozen=True)
class RoundedInputFloat8Format(Float8Format):
    """FP8 W8A8: FP8 numbers with a scale for each output, multiplied with inputs rounded to FP8, a scale per token.

    Only products of many rows round their inputs, see `float8_products`. Arrays: `q` float8_e4m3fn [out, in] and
    `scales` float [out, 1].
    """

    name: ClassVar[str] = "float8_w8a8"

    def __post_init__(self) -> None:
        if self.rows is not None or self.columns is not None:
            raise ValueError("inputs rounded to FP8 need weights with a scale for each output, not for blocks.")

    @property
    def weight_only(self) -> Float8Format:
        return Float8Format()


FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of FP4 (E2M1) by their code."""


@dataclasses.dataclass(frozen=True)
class LookupFormat(Format):
    """Indices into a table of 2^bits values: w = codebook[index], times 2^exponent or a scale where there are any.

    Arrays: `indices` uint4 or uint8 [out, in]; `codebook` float [tables, 2^bits], where each of the tables serves
    out / tables consecutive rows; `exponents` int8 [out, groups] if groups of inputs have a power of two, as in MXFP4,
    whose table has `FP4_VALUES`; `scales` float [out, groups] if they have a factor, as in NF4.

    Attributes:
      bits: bits of an index, 1 to 8.
    """

    name: ClassVar[str] = "lookup"
    bits: int

    @property
    def bits_of(self) -> Mapping[str, int]:
        return {"indices": self.bits, "exponents": 8}

    @property
    def dims_of(self) -> Mapping[str, tuple[str | None, ...]]:
        groups = ("out", "in")
        return {"indices": ("out", "in"), "codebook": (None, None), "exponents": groups, "scales": groups}

    def dense(self, arrays: Arrays) -> Float[Array, "out in"]:
        indices = arrays["indices"].astype(jnp.int32)
        codebook = arrays["codebook"].astype(jnp.float32)
        rows = indices.reshape(codebook.shape[0], -1)
        values = jnp.take_along_axis(codebook, rows, axis=1).reshape(indices.shape)
        if "exponents" not in arrays and "scales" not in arrays:
            return values
        scales = arrays["scales"] if "scales" in arrays else powers_of_two(arrays["exponents"])
        return values * jnp.repeat(scales, indices.shape[1] // scales.shape[1], axis=1)

    def take_rows(self, arrays: Arrays, ids: Int[Array, " rows"]) -> dict[str, jax.Array]:
        codebook = arrays["codebook"]
        rows = {name: array[ids] for name, array in arrays.items() if name != "codebook"}
        if codebook.shape[0] > 1:
            codebook = codebook[ids // (arrays["indices"].shape[0] // codebook.shape[0])]
        return {**rows, "codebook": codebook}


@dataclasses.dataclass(frozen=True)
class BlockFloatFormat(Format):
    """Block floating point: integers with one power of two for each block of inputs, w = q * 2^exponent.

    Arrays: `q` int4 or int8 [out, in]; `exponents` int8 [out, in / block].

    Attributes:
      grid: bits of an integer (its sign included), and inputs that share an exponent.
    """

    name: ClassVar[str] = "block_float"
    grid: Grid

    @property
    def bits_of(self) -> Mapping[str, int]:
        return {"q": self.grid.bits, "exponents": 8}

    @property
    def dims_of(self) -> Mapping[str, tuple[str | None, ...]]:
        return {"q": ("out", "in"), "exponents": ("out", "in")}

    def with_unit(self, outputs: int | None, inputs: int | None) -> "BlockFloatFormat":
        return self if inputs is None else BlockFloatFormat(Grid(self.grid.bits, inputs))

    def dense(self, arrays: Arrays) -> Float[Array, "out in"]:
        return self.grid.dequantize(arrays["q"].astype(jnp.int8), powers_of_two(arrays["exponents"]))


@dataclasses.dataclass(frozen=True)
class TileFloatFormat(Format):
    """Block floating point in two dims: integers with one power of two for each tile, w = q * 2^exponent.

    Arrays: `q` int4 or int8 [out, in]; `exponents` int8 [out / rows, in / columns] for tiles of rows x columns.

    Attributes:
      bits: bits of an integer, its sign included.
    """

    name: ClassVar[str] = "tile_float"
    bits: int

    @property
    def bits_of(self) -> Mapping[str, int]:
        return {"q": self.bits, "exponents": 8}

    @property
    def dims_of(self) -> Mapping[str, tuple[str | None, ...]]:
        return {"q": ("out", "in"), "exponents": ("out", "in")}

    def dense(self, arrays: Arrays) -> Float[Array, "out in"]:
        return arrays["q"].astype(jnp.float32) * self.scales(arrays)

    def scales(self, arrays: Arrays) -> Float[Array, "out in"]:
        """Return the power-of-two scale of each weight, float32 [out, in]."""
        q = arrays["q"]
        exponents = arrays["exponents"]
        rows = q.shape[0] // exponents.shape[0]
        columns = q.shape[1] // exponents.shape[1]
        return jnp.repeat(jnp.repeat(powers_of_two(exponents), rows, axis=0), columns, axis=1)

    def take_rows(self, arrays: Arrays, ids: Int[Array, " rows"]) -> dict[str, jax.Array]:
        q = arrays["q"]
        exponents = arrays["exponents"]
        return {"q": q[ids], "exponents": exponents[ids // (q.shape[0] // exponents.shape[0])]}


@dataclasses.dataclass(frozen=True)
class LowRankFormat(Format):
    """A product of two thin matrices: w = u @ v.

    Arrays: `u` float [out, rank]; `v` float [rank, in].
    """

    name: ClassVar[str] = "low_rank"

    @property
    def bits_of(self) -> Mapping[str, int]:
        return {}

    @property
    def dims_of(self) -> Mapping[str, tuple[str | None, ...]]:
        return {"u": ("out", None), "v": (None, "in")}

    def dense(self, arrays: Arrays) -> Float[Array, "out in"]:
        u = arrays["u"].astype(jnp.float32)
        v = arrays["v"].astype(jnp.float32)
        return jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST)

    def take_rows(self, arrays: Arrays, ids: Int[Array, " rows"]) -> dict[str, jax.Array]:
        return {"u": arrays["u"][ids], "v": arrays["v"]}


@dataclasses.dataclass(frozen=True)
class TwoOfFourFormat(Format):
    """2:4 sparsity: of every four consecutive inputs two have a stored value, and the others are zero.

    Arrays: `values` float [out, in / 2], those of each row in the order of their inputs; `kept` uint4 [out, in / 4],
    whose bit i tells whether input i of the four has a value.
    """

    name: ClassVar[str] = "two_of_four"
    divides_units: ClassVar[bool] = False
    numbers: ClassVar[str | None] = "values"

    @property
    def bits_of(self) -> Mapping[str, int]:
        return {"kept": 4}

    @property
    def dims_of(self) -> Mapping[str, tuple[str | None, ...]]:
        return {"values": ("out", "in"), "kept": ("out", "in")}

    def unit(self, arrays: Arrays) -> tuple[int, int]:
        return 1, 4

    def dense(self, arrays: Arrays) -> Float[Array, "out in"]:
        has_value = (arrays["kept"].astype(jnp.int32)[..., None] >> jnp.arange(4)) & 1
        values = arrays["values"].astype(jnp.float32).reshape(*arrays["kept"].shape, 2)
        first = jnp.cumsum(has_value, axis=-1) == 1
        chosen = jnp.where(first, values[..., :1], values[..., 1:])
        return jnp.where(has_value == 1, chosen, 0).reshape(len(values), -1)


def powers_of_two(exponents: Int[Array, "..."]) -> Float[Array, "..."]:
    """Return 2^exponent in float32, exactly, for exponents from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponents.astype(jnp.int32) + 127) << 23, jnp.float32)


FORMATS: dict[str, type[Format]] = {
    format.name: format
    for format in (
        IntegerFormat,
        RoundedInputFormat,
        Float8Format,
        RoundedInputFloat8Format,
        LookupFormat,
        BlockFloatFormat,
        TileFloatFormat,
        LowRankFormat,
        TwoOfFourFormat,
    )
}
"""Formats by name. A new one is added here."""
