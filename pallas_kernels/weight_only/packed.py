"""`PackedWeight`: a weight stored in few bits, as one pytree node."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.weight_only.formats import (
    BlockFloatFormat,
    Float8Format,
    Format,
    IntegerFormat,
    LookupFormat,
    LowRankFormat,
    RoundedInputFloat8Format,
    RoundedInputFormat,
    TileFloatFormat,
    TwoOfFourFormat,
    index_dtype,
    integer_dtype,
)
from pallas_kernels.weight_only.rounding_grid import Grid


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A weight of shape [*stack, *inputs, *outputs], stored in few bits as matrices [out, in].

    Attributes:
      arrays: the stored arrays, by the names that the format gives them, each with the dims of `stack` first.
      format: how they represent a matrix.
      inputs, outputs: the dims of the weight that a matrix flattens, contracted ones first.
      stack: dims that count matrices, such as those of the experts of a layer; () for one matrix.
    """

    arrays: dict[str, jax.Array]
    format: Format = dataclasses.field(metadata={"static": True})
    inputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    outputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    stack: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, [*stack, *inputs, *outputs]."""
        return (*self.stack, *self.inputs, *self.outputs)

    @property
    def ndim(self) -> int:
        """Number of dims of the weight."""
        return len(self.shape)

    @property
    def stored_bytes(self) -> int:
        """Size of the arrays on disk in bytes, where each integer takes exactly its number of bits.

        In memory integers of 2, 3 and 4 bits take half a byte, those of 5 to 8 bits one.
        """
        bits = self.format.bits_of
        return sum(-(-x.size * bits.get(k, 8 * x.dtype.itemsize) // 8) for k, x in self.arrays.items())

    def matrix(self) -> Float[Array, "*stack out in"]:
        """Dequantize the weight to a float32 matrix [out, in], or to a stack of them."""
        dense = self.format.dense
        for _ in self.stack:
            dense = jax.vmap(dense)
        return dense(self.arrays)

    def dense(self, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "..."]:
        """Dequantize the weight to a plain array [*stack, *inputs, *outputs]."""
        return self.matrix().swapaxes(-1, -2).reshape(self.shape).astype(dtype)

    def divisible(self, outputs: int, inputs: int) -> "PackedWeight":
        """Return the same weight, with scales repeated where parts of `outputs` x `inputs` values need their own.

        Parts, such as the shards of several devices, may then end within a group or block that had one scale. 0 stands
        for a dim that has no parts; its last block may be smaller than the others.
        """
        unit = self.format.unit(self.arrays)
        smaller = math.gcd(unit[0], outputs), math.gcd(unit[1], inputs)
        if smaller == unit or not self.format.divides_units:
            return self
        sizes = math.prod(self.outputs), math.prod(self.inputs)
        arrays = dict(self.arrays)
        for name, array in arrays.items():
            for axis, dim in enumerate(self.format.dims_of[name]):
                kind = ("out", "in").index(dim) if dim else 0
                place = len(self.stack) + axis
                if dim and 1 < array.shape[place] < sizes[kind]:
                    array = jnp.repeat(array, unit[kind] // smaller[kind], axis=place)
                    array = jax.lax.slice_in_dim(array, 0, -(-sizes[kind] // smaller[kind]), axis=place)
            arrays[name] = array
        changed = (new if new < old else None for new, old in zip(smaller, unit, strict=True))
        return dataclasses.replace(self, arrays=arrays, format=self.format.with_unit(*changed))

    def take(self, index: Int[Array, ""]) -> "PackedWeight":
        """Return the weight at an index of the first dim of `stack`, still packed, such as one expert's."""
        arrays = {name: jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for name, x in self.arrays.items()}
        return dataclasses.replace(self, arrays=arrays, stack=self.stack[1:])

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... in"]:
        """Dequantize rows `ids` of the matrix to float32, as an embedding lookup does."""
        taken = self.format.take_rows(self.arrays, ids.reshape(-1))
        return self.format.dense(taken).reshape(*ids.shape, -1)

    def with_dims(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> "PackedWeight":
        """Reshape the inputs and outputs, e.g. split outputs into heads and head dim; the matrix stays the same.

        Raises:
          ValueError: the sizes differ.
        """
        if (math.prod(inputs), math.prod(outputs)) != (math.prod(self.inputs), math.prod(self.outputs)):
            raise ValueError(f"{inputs} and {outputs} are not the dims of a weight {self.inputs} by {self.outputs}.")
        return dataclasses.replace(self, inputs=inputs, outputs=outputs)

    def with_numbers(self, dtype: jax.typing.DTypeLike) -> "PackedWeight":
        """Return the weight with the values that it holds as they are in another dtype, if its format has any."""
        name = self.format.numbers
        if name is None:
            return self
        return dataclasses.replace(self, arrays={**self.arrays, name: self.arrays[name].astype(dtype)})

    @property
    def device_bytes(self) -> int:
        """Size of the arrays in the memory of a device in bytes, where integers of up to 4 bits take half a byte."""
        return sum(map(device_bytes, self.arrays.values()))

    def astype(self, dtype: jax.typing.DTypeLike) -> "PackedWeight":
        """Return the weight unchanged: it is cast only when it is multiplied."""
        del dtype
        return self


def device_bytes(x: jax.Array) -> int:
    """Return the bytes of an array in the memory of its devices; `x.nbytes` counts a byte for int4 and uint4."""
    return -(-x.size // 2) if x.dtype in (jnp.int4, jnp.uint4) else x.nbytes


def is_packed(x: object) -> TypeGuard[PackedWeight]:
    """Return True if x is a weight in few bits, which functions over pytrees should take as one leaf (`is_leaf`)."""
    return isinstance(x, PackedWeight)


def concatenate_outputs(
    weights: Sequence[object],
    axis: int,
    concatenate: Callable[[Sequence[jax.Array]], jax.Array] = jnp.concatenate,
) -> PackedWeight | None:
    """Concatenate packed weights of the same inputs along an output dim; return None if they do not fit together.

    Args:
      axis: the dim, counted from the last (-1); the output dims before it must have size 1, or be none.
      concatenate: concatenates arrays along their first dim, whose rows it may put in another order, always the same.

    Returns:
      The weight whose matrix has the rows of all; None if one is not packed, if their formats or inputs differ, or if
      an array of the format does not have a row for each output.
    """
    packed = [weight for weight in weights if is_packed(weight)]
    place = len(packed[0].outputs) + axis if packed else -1
    if len(packed) < len(weights) or place < 0 or math.prod(packed[0].outputs[:place]) != 1:
        return None

    def described(weight: PackedWeight) -> tuple[object, ...]:
        rows = {name: (array.shape[1:], array.dtype) for name, array in weight.arrays.items()}
        return weight.format, weight.inputs, weight.outputs[:place], weight.outputs[place + 1 :], rows

    first = packed[0]
    if any(described(weight) != described(first) for weight in packed):
        return None
    whole = all(array.shape[0] == math.prod(weight.outputs) for weight in packed for array in weight.arrays.values())
    if first.stack or not whole or any(dims[0] != "out" for dims in first.format.dims_of.values()):
        return None
    outputs = (*first.outputs[:place], sum(weight.outputs[place] for weight in packed), *first.outputs[place + 1 :])
    arrays = {name: concatenate([weight.arrays[name] for weight in packed]) for name in first.arrays}
    return PackedWeight(arrays, first.format, first.inputs, outputs)


def stack_packed(weights: Sequence[PackedWeight | None]) -> PackedWeight | None:
    """Stack packed weights, such as those of experts, along a new first dim; None if one is None.

    None also if they differ in their format or the shapes of their arrays. Arrays of NumPy remain NumPy's. Inputs of a
    stack are not rounded (W8A8).
    """
    packed = [weight for weight in weights if weight is not None]
    described = [(w.format, w.inputs, w.outputs, {k: (x.shape, x.dtype) for k, x in w.arrays.items()}) for w in packed]
    if len(packed) < len(weights) or any(other != described[0] for other in described):
        return None
    first = packed[0]
    numpy = isinstance(next(iter(first.arrays.values())), np.ndarray)
    stack: Any = np.stack if numpy else jnp.stack
    arrays = {name: stack([weight.arrays[name] for weight in packed]) for name in first.arrays}
    return PackedWeight(arrays, first.format.weight_only, first.inputs, first.outputs, (len(packed), *first.stack))


def pack_integers(
    grid: Grid, q: Int[Array, "out in"], scales: Float[Array, "out groups"], *, round_inputs: bool = False
) -> PackedWeight:
    """Pack integers and their scales, from `Grid.quantize` or a solver such as GPTQ, as a weight in few bits.

    Args:
      grid: bits of an integer, and inputs that share a scale.
      q: the integers.
      scales: their scales.
      round_inputs: True multiplies the weight with inputs rounded to int8; the grid must have 8 bits and no groups.
    """
    format = RoundedInputFormat(grid) if round_inputs else IntegerFormat(grid)
    return _pack(format, {"q": q.astype(integer_dtype(grid.bits)), "scales": scales}, q.shape)


def pack_nearest(grid: Grid, w: Float[Array, "out in"], *, round_inputs: bool = False) -> PackedWeight:
    """Round a matrix to the nearest values of an integer grid, and pack it as `pack_integers` does."""
    scales = grid.scales(w)
    return pack_integers(grid, grid.quantize(w, scales), scales.astype(jnp.bfloat16), round_inputs=round_inputs)


def pack_float8(
    q: Float[Array, "out in"], scales: Float[Array, "out groups"], *, round_inputs: bool = False
) -> PackedWeight:
    """Pack FP8 numbers (e4m3) and their scales as a weight.

    Args:
      q: the numbers.
      scales: their scales; with `round_inputs` one for each output.
      round_inputs: True rounds the inputs of products of many rows to FP8 too.
    """
    format = RoundedInputFloat8Format() if round_inputs else Float8Format()
    return _pack(format, {"q": q.astype(jnp.float8_e4m3fn), "scales": scales}, q.shape)


def pack_lookup(
    bits: int,
    indices: Int[Array, "out in"],
    codebook: Float[Array, "tables entries"],
    *,
    exponents: Int[Array, "out groups"] | None = None,
    scales: Float[Array, "out groups"] | None = None,
) -> PackedWeight:
    """Pack indices and their codebook [tables, 2^bits] as a weight; each table serves out / tables consecutive rows.

    Args:
      bits: bits of an index.
      indices: the indices.
      codebook: the tables.
      exponents: of the powers of two that groups of inputs are multiplied by; None: there are none.
      scales: factors of groups of inputs; None: there are none.
    """
    arrays = {"indices": indices.astype(index_dtype(bits)), "codebook": codebook}
    if exponents is not None:
        arrays["exponents"] = exponents.astype(jnp.int8)
    if scales is not None:
        arrays["scales"] = scales
    return _pack(LookupFormat(bits), arrays, indices.shape)


def pack_block_float(grid: Grid, q: Int[Array, "out in"], exponents: Int[Array, "out blocks"]) -> PackedWeight:
    """Pack integers and a power-of-two exponent per block of inputs as a weight in block floating point."""
    arrays = {"q": q.astype(integer_dtype(grid.bits)), "exponents": exponents.astype(jnp.int8)}
    return _pack(BlockFloatFormat(grid), arrays, q.shape)


def pack_tile_float(bits: int, q: Int[Array, "out in"], exponents: Int[Array, "tiles_out tiles_in"]) -> PackedWeight:
    """Pack integers and a power-of-two exponent per tile as a weight in block floating point."""
    arrays = {"q": q.astype(integer_dtype(bits)), "exponents": exponents.astype(jnp.int8)}
    return _pack(TileFloatFormat(bits), arrays, q.shape)


def pack_low_rank(u: Float[Array, "out rank"], v: Float[Array, "rank in"]) -> PackedWeight:
    """Pack the factors u and v of a low-rank weight u @ v, without multiplying them."""
    return _pack(LowRankFormat(), {"u": u, "v": v}, (u.shape[0], v.shape[1]))


def pack_two_of_four(w: Float[Array, "out in"]) -> PackedWeight:
    """Pack a matrix, of whose every four consecutive inputs at most two are not zero, without the zeros.

    Args:
      w: the matrix, in any floating-point dtype, which the stored values keep; of three or four numbers that are not
        zero the last ones are lost.
    """
    groups = w.reshape(w.shape[0], -1, 4)
    filled = groups != 0
    # Every group stores two values: the first zeros take the places that are left.
    lacking = 2 - filled.sum(-1, keepdims=True)
    kept = filled & (jnp.cumsum(filled, -1) <= 2) | ~filled & (jnp.cumsum(~filled, -1) <= lacking)
    place = jnp.argsort(~kept, axis=-1, stable=True)[..., :2]
    values = jnp.take_along_axis(groups, place, axis=-1).reshape(w.shape[0], -1)
    mask = (kept << jnp.arange(4)).sum(-1).astype(jnp.uint4)
    return _pack(TwoOfFourFormat(), {"values": values, "kept": mask}, w.shape)


def _pack(format: Format, arrays: dict[str, jax.Array], shape: tuple[int, ...]) -> PackedWeight:
    return PackedWeight(arrays, format, inputs=(shape[1],), outputs=(shape[0],))
