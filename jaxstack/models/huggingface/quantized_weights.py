"""Quantized weights in checkpoint files, read and written in the formats of compressed-tensors, DeepSeek and gpt-oss.

The weight of a module `M` is a matrix [out, in]:

    pack-quantized                    M.weight_packed int32 [out, words], M.weight_shape [2]
    int-quantized, float-quantized    M.weight int8 or FP8 (e4m3) [out, in]
    all                               M.weight_scale [out, groups], [out, 1] or [1]; M.weight_zero_point

DeepSeek's FP8 files have M.weight FP8 (e4m3) [out, in] and M.weight_scale_inv [out / 128, in / 128], rounded up, which
the values are multiplied with.

gpt-oss stores the experts' matrices W [E, in, out] in MXFP4: W_blocks uint8 [E, out, in / 32, 16], two values in a
byte, the first in its low bits, and W_scales uint8 [E, out, in / 32], exponents of 2 with a bias of 127.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int8, Int32

from jaxstack.errors import ConfigError
from jaxstack.models.huggingface.files import WeightFiles
from jaxstack.models.huggingface.quantization_config import FP8, MXFP4, Quantization, Scheme, block_scheme
from jaxstack.models.huggingface.tensors import explicit_slices
from pallas_kernels import Grid, PackedWeight
from pallas_kernels.weight_only.bits import pack_bits, unpack_bits
from pallas_kernels.weight_only.formats import (
    FP4_VALUES,
    BlockFloatFormat,
    Float8Format,
    IntegerFormat,
    LookupFormat,
    RoundedInputFloat8Format,
    RoundedInputFormat,
    index_dtype,
    integer_dtype,
    powers_of_two,
)
from pallas_kernels.weight_only.integer_products import unsupported_inputs

_WORD = 32
"""Bits of a word of packed integers."""
_PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight",
)
_IGNORED = r".*\.(input_scale|input_zero_point|output_scale|output_zero_point|[kvq]_scale|[kvq]_zero_point)"
"""Regular expression of tensors with fixed scales of activations and the cache, which are not used here."""


def pack_words(values: Int8[np.ndarray, "rows n"], bits: int) -> Int32[np.ndarray, "rows words"]:
    """Pack signed integers of few bits into int32 words, row by row, as compressed-tensors does.

    Integer i of a row takes the bits i * bits to (i + 1) * bits - 1, as its value plus 2^(bits - 1).
    """
    rows, count = values.shape
    shifted = np.zeros((rows, -(-count // _WORD) * _WORD), np.uint8)  # a multiple of 32 integers fills whole words
    shifted[:, :count] = values.view(np.uint8) + np.uint8(1 << (bits - 1))
    words = pack_bits(shifted, bits).view("<i4").reshape(rows, -1)
    return np.ascontiguousarray(words[:, : _words(count, bits)])


def unpack_words(packed: Int32[np.ndarray, "rows words"], bits: int, count: int) -> Int8[np.ndarray, "rows n"]:
    """Unpack the first `count` integers of each row of words packed by `pack_words`."""
    stream = np.ascontiguousarray(packed).view(np.uint8)
    whole = 8 * stream.shape[1] // bits
    if stream.shape[1] * 8 % bits:  # the rest of a row is no integer: each row is a separate stream
        shifted = np.stack([unpack_bits(row, bits, (whole,), signed=False) for row in stream])
    else:
        shifted = unpack_bits(stream.reshape(-1), bits, (len(stream), whole), signed=False)
    return (shifted[:, :count] - np.uint8(1 << (bits - 1))).view(np.int8)


def _words(count: int, bits: int) -> int:
    return -(-count * bits // _WORD)


class QuantizedTensor:
    """A quantized weight [out, in] in checkpoint files; indexing it reads and returns a dequantized float32 slice.

    Attributes:
      shape: [out, in].
      scheme: how it is stored.

    Raises:
      ConfigError: a tensor is missing or does not fit the others.
    """

    def __init__(self, files: WeightFiles, module: str, scheme: Scheme):
        self._files = files
        self._module = module
        self.scheme = scheme
        self.shape = self._find_shape()
        self._check_scales()
        order = self._whole("weight_g_idx")
        self._order = None if order is None or np.any(order < 0) else order  # -1: the groups follow each other

    def __getitem__(self, index: Any) -> Float[np.ndarray, "rows columns"]:
        index = index if isinstance(index, tuple) else (index,)
        rows, columns = explicit_slices((*index, slice(None))[:2], self.shape)
        values = self._integers(rows)[:, columns].astype(np.float32)
        if (zeros := self._zeros(rows)) is not None:
            values -= self._by_column(zeros, rows)[:, columns]
        values *= self._by_column(self._scales(rows), rows)[:, columns]
        return values

    def pack(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> PackedWeight | None:
        """Return the weight, still quantized, in arrays of NumPy; None if no packed format represents it exactly.

        Args:
          inputs, outputs: the dims that the matrix flattens.
        """
        scheme = self.scheme
        rows = self.shape[0]
        integers = scheme.kind == "int" and (scheme.bits == 1 or scheme.block is not None)
        if integers or self._order is not None:
            return None
        everything = slice(0, rows)
        q: Any = self._integers(everything)
        scales: Any = self._scales(everything)
        zeros = self._zeros(everything)
        if scheme.block is not None:
            return PackedWeight({"q": q, "scales": scales}, Float8Format(*scheme.block), inputs, outputs)
        arrays: dict[str, Any] = {"q": q, "scales": np.broadcast_to(scales, (rows, scales.shape[1]))}
        if scheme.kind == "float":
            format = RoundedInputFloat8Format() if self._rounds_float8_inputs else Float8Format()
        else:
            format = self._integer_format()
            dtype = integer_dtype(scheme.bits)
            arrays["q"] = q.astype(dtype)
            if zeros is not None:
                arrays["zeros"] = np.broadcast_to(zeros, arrays["scales"].shape).astype(dtype)
        return PackedWeight(arrays, format, inputs, outputs)

    @property
    def _rounds_float8_inputs(self) -> bool:
        return self.scheme.rounds_inputs and self.scheme.strategy in ("tensor", "channel")

    def _integer_format(self) -> IntegerFormat:
        scheme = self.scheme
        grid = Grid(self.scheme.bits, self.scheme.group_size)
        if scheme.rounds_inputs and scheme.symmetric and grid == Grid(8) and not unsupported_inputs(self.shape[1]):
            return RoundedInputFormat()
        return IntegerFormat(grid)

    def _find_shape(self) -> tuple[int, int]:
        if self.scheme.format != "pack-quantized":
            shape = self._files.shapes.get(self._name("weight"), ())
        else:
            stored = self._whole("weight_shape")
            shape = () if stored is None else tuple(map(int, stored))
            packed = self._files.shapes.get(self._name("weight_packed"))
            if len(shape) == 2 and packed != (shape[0], _words(shape[1], self.scheme.bits)):
                raise ConfigError(
                    f"{self._name('weight_packed')} is {list(packed or ())}, but {list(shape)} integers of "
                    f"{self.scheme.bits} bits take {[shape[0], _words(shape[1], self.scheme.bits)]} words."
                )
        if len(shape) != 2:
            raise ConfigError(f"{self._module} is quantized and has no weight of two dims; found {list(shape)}.")
        return shape[0], shape[1]

    def _check_scales(self) -> None:
        outputs, inputs = self.shape
        scheme = self.scheme
        found = self._files.shapes[self._name(scheme.scales)]
        size = scheme.group_size or inputs
        if scheme.block is not None:
            wanted = (-(-outputs // scheme.block[0]), -(-inputs // scheme.block[1]))
        else:
            wanted = (1, 1) if scheme.strategy == "tensor" else (outputs, inputs // size)
        if math.prod(found) != math.prod(wanted) or inputs % size:
            raise ConfigError(
                f"{self._name(scheme.scales)} is {list(found)}, not {list(wanted)}, as its group in "
                f"config.json says (strategy {scheme.strategy}, group_size {scheme.group_size})."
            )
        if not scheme.symmetric and self._files.stored(self._name("weight_zero_point")) is None:
            raise ConfigError(f"{self._module} has no weight_zero_point, though its group is not symmetric.")

    def _name(self, part: str) -> str:
        return f"{self._module}.{part}"

    def _whole(self, part: str) -> np.ndarray | None:
        """Read all of the module's tensor named `part`, such as its scales; None if the files have no such tensor."""
        stored = self._files.stored(self._name(part))
        return None if stored is None else np.asarray(stored[...])

    def _integers(self, rows: slice) -> np.ndarray:
        """Read rows of the quantized values, not yet multiplied with their scales, as int8 or FP8."""
        packed = self.scheme.format == "pack-quantized"
        name = self._name("weight_packed" if packed else "weight")
        found = np.asarray(self._files.stored(name)[rows])
        wanted = np.int32 if packed else np.int8 if self.scheme.kind == "int" else jnp.float8_e4m3fn
        if found.dtype != wanted:
            raise ConfigError(f"{name} is {found.dtype}, not {np.dtype(wanted)} as {self.scheme.format} has it.")
        return unpack_words(found, self.scheme.bits, self.shape[1]) if packed else found

    def _rows(self, values: np.ndarray, rows: slice) -> np.ndarray:
        """Return the scales or zero points for `rows` of the weight as a 2-D array; for blocks, those of all rows."""
        if self.scheme.strategy == "tensor":
            return values.reshape(1, 1)
        if self.scheme.block is not None:
            return values
        return values.reshape(self.shape[0], -1)[rows]

    def _scales(self, rows: slice) -> np.ndarray:
        scales = self._whole(self.scheme.scales)
        assert scales is not None
        return self._rows(scales, rows)

    def _zeros(self, rows: slice) -> Int8[np.ndarray, "rows groups"] | None:
        zeros = None if self.scheme.symmetric else self._whole("weight_zero_point")
        if zeros is None:
            return None
        if zeros.dtype == np.int32:  # packed along the rows
            zeros = unpack_words(zeros.T, self.scheme.bits, self.shape[0]).T
        return self._rows(zeros.astype(np.int8), rows)

    def _by_column(self, values: np.ndarray, rows: slice) -> Float[np.ndarray, "rows in"]:
        """Expand scales or zero points of groups or blocks to one float32 value per weight, [rows, in]."""
        values = values.astype(np.float32)
        if self.scheme.block is not None:
            height, width = self.scheme.block
            values = np.repeat(values, height, axis=0)[rows]
            return np.repeat(values, width, axis=1)[:, : self.shape[1]]
        if self._order is not None:
            return values[:, self._order]
        return np.repeat(values, self.shape[1] // values.shape[1], axis=1)


class Mxfp4Experts:
    """Matrices of all experts of a layer in MXFP4; indexing it reads and returns a dequantized float32 slice.

    (OCP Microscaling Formats (MX) Specification 1.0, 2023: FP4 E2M1 with a power of 2 for each 32 values.)

    Attributes:
      shape: [E, in, out].
      scheme: how it is stored.

    Raises:
      ConfigError: the tensors do not fit each other.
    """

    scheme = Scheme("mxfp4", 4, "float", "group", 32)

    def __init__(self, files: WeightFiles, name: str):
        self._blocks = files.stored(f"{name}_blocks")
        self._scales = files.stored(f"{name}_scales")
        blocks, scales = (tuple(files.shapes.get(f"{name}_{part}", ())) for part in ("blocks", "scales"))
        if len(blocks) != 4 or blocks[3] != 16 or blocks[:3] != scales:
            raise ConfigError(
                f"{name}_blocks must be [E, out, in / 32, 16] and {name}_scales [E, out, in / 32]; found "
                f"{list(blocks)} and {list(scales)}."
            )
        self.shape = blocks[0], 32 * blocks[2], blocks[1]

    def __getitem__(self, index: Any) -> Float[np.ndarray, "experts inputs outputs"]:
        index = index if isinstance(index, tuple) else (index,)
        experts, inputs, outputs = explicit_slices((*index, slice(None), slice(None))[:3], self.shape)
        groups = slice(inputs.start // 32, -(-inputs.stop // 32))
        codes = np.asarray(self._blocks[experts, outputs, groups])
        exponents = np.asarray(self._scales[experts, outputs, groups]).astype(np.int32) - 127
        values = np.stack([FP4_VALUES[codes & 15], FP4_VALUES[codes >> 4]], axis=-1).reshape(*exponents.shape, 32)
        values = np.ldexp(values, exponents[..., None]).reshape(*exponents.shape[:2], -1)
        start = inputs.start - 32 * groups.start
        return values[..., start : start + inputs.stop - inputs.start].swapaxes(1, 2)

    def pack(self, outputs: slice) -> PackedWeight | None:
        """Return a part of the outputs of all experts, still quantized, in arrays of NumPy; None if a scale is NaN.

        Blocks whose scale is 2^-127 become 0.
        """
        experts, inputs, _ = self.shape
        codes = np.asarray(self._blocks[:])[:, outputs]
        scales = np.asarray(self._scales[:])[:, outputs]
        if np.any(scales == 255):
            return None
        indices = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape[:2], inputs)
        arrays: dict[str, Any] = {
            "indices": indices.astype(index_dtype(4)),
            "codebook": np.broadcast_to(FP4_VALUES, (experts, 1, 16)),
            "exponents": (scales.astype(np.int16) - 127).astype(np.int8),
        }
        return PackedWeight(arrays, LookupFormat(4), (inputs,), (scales.shape[1],), (experts,))


AnyQuantized = QuantizedTensor | Mxfp4Experts


def open_quantized(files: WeightFiles, quantization: Quantization) -> dict[str, AnyQuantized]:
    """Replace each quantized weight's tensors in `files` by one that reads them, `MODULE.weight`; return all by name.

    Raises:
      ConfigError: config.json has no scheme for a quantized weight, or its tensors do not fit.
    """
    scaled = re.compile(r"(.*)\.weight_scale(_inv)?")
    modules = [match[1] for name in sorted(files.shapes) if (match := scaled.fullmatch(name))]
    found: dict[str, QuantizedTensor] = {}
    for module in modules:
        scheme = quantization.scheme(module)
        if scheme is None:
            raise ConfigError(f"{module} is quantized, but no group of config.json has it among its targets.")
        found[f"{module}.weight"] = QuantizedTensor(files, module, scheme)
    for name in [name for name in files.shapes if re.fullmatch(_IGNORED, name)]:
        del files.shapes[name]
    for name, tensor in found.items():
        files.replace(name, tensor, [f"{name.removesuffix('.weight')}.{part}" for part in _PARTS])
    experts = [name.removesuffix("_blocks") for name in sorted(files.shapes) if name.endswith("_blocks")]
    opened = {name: Mxfp4Experts(files, name) for name in experts}
    for name, tensor in opened.items():
        files.replace(name, tensor, [f"{name}_blocks", f"{name}_scales"])
    return {**found, **opened}


def describe_quantization_differences(
    quantization: Quantization, found: Mapping[str, AnyQuantized], packed: Mapping[str, PackedWeight]
) -> list[str]:
    """Return warnings on how jaxstack's computation differs from that for which the checkpoint was quantized.

    Args:
      quantization: the schemes in config.json.
      found: the quantized weights by the names of their tensors.
      packed: the packed weights that are read from those of them that are not read as plain numbers.
    """
    lines = []
    if dense := len(found) - len(packed):
        lines.append(f"{dense} of {len(found)} quantized weights are read as plain float32 numbers")
    rounding = (RoundedInputFormat, RoundedInputFloat8Format)
    here = sum(isinstance(weight.format, rounding) for weight in packed.values())
    if rounded := sum(tensor.scheme.activations for tensor in found.values()) - here:
        lines.append(f"the inputs of {rounded} layers, which vLLM would round to few bits, are not rounded here")
    if quantization.kv_cache:
        lines.append("the cache of keys and values is not quantized as kv_cache_scheme says; see precision.kv_cache")
    return lines


def unsupported_reason(weight: PackedWeight, format: str) -> str | None:
    """Return why a packed weight cannot be written in a compressed-tensors format, or None if it can."""
    stored = weight.format
    if format == MXFP4:
        return None if _is_mxfp4(weight) else "it is not in MXFP4"
    blocks = isinstance(stored, Float8Format) and stored.rows is not None
    if blocks or format == FP8:
        return None if blocks and format == FP8 else f"it has {'a' if blocks else 'no'} scale for each block"
    if format == "float-quantized":
        return None if isinstance(stored, Float8Format) else "it is not in FP8"
    if not isinstance(stored, IntegerFormat | BlockFloatFormat):
        return f"it is stored as {stored.name}"
    if format == "int-quantized" and (stored.grid.bits != 8 or _scales(weight).shape[-1] > 1):
        return "it has no integers of 8 bits with one scale for each output"
    if format == "int-quantized" and "zeros" in weight.arrays:
        return "it has zero points"
    return None


def _is_mxfp4(weight: PackedWeight) -> bool:
    exponents = weight.arrays.get("exponents")
    if weight.format != LookupFormat(4) or exponents is None or 32 * exponents.shape[-1] != weight.inputs[0]:
        return False
    return bool(weight.stack) and bool(np.array_equal(weight.arrays["codebook"][0], FP4_VALUES[None]))


def store_mxfp4(weights: Sequence[PackedWeight]) -> dict[str, np.ndarray]:
    """Return the tensors of experts in MXFP4, by name suffix; the outputs of several weights take turns."""
    parts = [(np.asarray(w.arrays["indices"]), np.asarray(w.arrays["exponents"])) for w in weights]
    codes, exponents = (np.stack(arrays, axis=2) for arrays in zip(*parts, strict=True))
    codes = codes.astype(np.uint8).reshape(codes.shape[0], -1, exponents.shape[-1], 16, 2)
    scales = (exponents.astype(np.int16) + 127).astype(np.uint8).reshape(codes.shape[:3])
    return {"_blocks": codes[..., 0] | codes[..., 1] << 4, "_scales": scales}


def store(weight: PackedWeight, format: str) -> tuple[Scheme, dict[str, np.ndarray]]:
    """Convert a packed matrix to a format of `FORMATS` but MXFP4; return its scheme, and its tensors by name suffix."""
    q = weight.arrays["q"]
    scales = _scales(weight)
    if format == FP8 and isinstance(weight.format, Float8Format):
        block = (weight.format.rows or 1, weight.format.columns or 1)
        scheme = block_scheme(block)
        return scheme, {"weight": np.asarray(q), scheme.scales: np.asarray(scales)}
    size = None if format == "int-quantized" else _group_size(weight)
    scheme = Scheme(
        format=format,
        bits=8 if isinstance(weight.format, Float8Format) else weight.format.bits_of["q"],
        kind="float" if isinstance(weight.format, Float8Format) else "int",
        strategy="channel" if size is None else "group",
        group_size=size,
        symmetric="zeros" not in weight.arrays,
        activations=format != "pack-quantized",
        rounds_inputs=format in ("int-quantized", "float-quantized"),
    )
    tensors = {"weight_scale": np.asarray(scales)}
    if format != "pack-quantized":
        return scheme, {"weight": np.asarray(q), **tensors}
    tensors["weight_packed"] = pack_words(np.asarray(q.astype(jnp.int8)), scheme.bits)
    tensors["weight_shape"] = np.asarray(q.shape, np.int64)
    if not scheme.symmetric:
        zeros = np.asarray(weight.arrays["zeros"].astype(jnp.int8))
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_words(np.ascontiguousarray(zeros.T), scheme.bits).T)
    return scheme, tensors


def _group_size(weight: PackedWeight) -> int | None:
    """Return how many inputs of a packed weight share a scale; None if a whole row does."""
    if isinstance(weight.format, IntegerFormat | BlockFloatFormat):
        return weight.format.grid.group_size  # which may be all of a row, too
    groups = _scales(weight).shape[1]
    return None if groups == 1 else weight.arrays["q"].shape[1] // groups


def _scales(weight: PackedWeight) -> Float[jax.Array, "out groups"]:
    if isinstance(weight.format, BlockFloatFormat):
        return powers_of_two(weight.arrays["exponents"]).astype(jnp.bfloat16)  # exact
    return weight.arrays["scales"]
