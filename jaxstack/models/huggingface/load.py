"""Import of Hugging Face checkpoints: each device reads only its shards of the parameters from the files.

`ModelParts` reads single layers, and rows of embedding tables.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float, Int

from jaxstack.errors import ConfigError
from jaxstack.models.config import MOST_PREDICTION_LAYERS, ModelConfig
from jaxstack.models.huggingface.direct_storage import ByteReader, Device, read_by_kvikio, why_unavailable
from jaxstack.models.huggingface.families import check_model, describe
from jaxstack.models.huggingface.family import Family
from jaxstack.models.huggingface.files import CONFIG, WeightFiles, read_json
from jaxstack.models.huggingface.quantization_config import Quantization, read_quantization
from jaxstack.models.huggingface.quantized_weights import (
    AnyQuantized,
    Mxfp4Experts,
    QuantizedTensor,
    describe_quantization_differences,
    open_quantized,
)
from jaxstack.models.huggingface.tensors import Leaf, explicit_slices, find_leaves, whole
from jaxstack.models.transformer import Transformer
from jaxstack.parallel import AxisRules, make_rules
from jaxstack.parallel.packed_weights import place_packed
from jaxstack.parallel.transfers import Transfers
from jaxstack.parameter_paths import nest
from pallas_kernels import PackedWeight
from pallas_kernels.weight_only.packed import stack_packed

Arrays = dict[str, jax.Array | PackedWeight]
_HEAD = "lm_head.weight"
_NOT_DIRECT = "GPUDirect Storage is not used, weights are read through host memory"
_CHUNK_BYTES = 2**29
"""Bytes assembled in host memory before they are copied to a device, unless a single tensor is larger.

As many again may be on their way to devices.
"""


def from_huggingface(
    directory: str | Path,
    *,
    config: ModelConfig | None = None,
    mesh: Mesh | AxisRules | None = None,
    dtype: Any = jnp.float32,
    ignore: Collection[str] = (),
    report: Callable[[str], None] = warnings.warn,
) -> Transformer:
    """Load a Transformer from a Hugging Face checkpoint: a directory with config.json and safetensors files.

    Weights are read a slice at a time: host memory holds at most about a gibibyte, or one layer's largest tensor.
    Quantized ones (compressed-tensors) become plain numbers.

    Args:
      config: configuration of the model, which may differ from config.json only in settings that do not change the
        function, such as `scan_layers`, `remat`, `dropout`; default: `read_model_config(directory)`.
      mesh: devices that the weights are sharded over, as in training; default: one device.
      dtype: dtype of the computation; weights are float32.
      ignore: unknown keys of config.json that are allowed.
      report: called with each line on what a quantized checkpoint would compute otherwise.

    Raises:
      ConfigError: a key of config.json is not supported, tensors are missing, not known or of another shape, files
        are damaged, or `config` computes something else; the message names which.
    """
    family, described = describe(directory, ignore)
    config = config or described
    check_model(config, described, str(directory))
    rules = make_rules(mesh) if isinstance(mesh, Mesh) else mesh
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dtype=dtype)))

    def place(leaf: Leaf) -> jax.sharding.Sharding | None:
        axes = leaf.variable.get_metadata().get("logical_axes")
        return None if rules is None else rules.sharding(rules.parameter_spec(axes, leaf.shape))

    found = _read(Path(directory), family, config, place, report)
    flat = [(path, v.replace(found["/".join(map(str, path))])) for path, v in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def read_parameters(
    directory: str | Path,
    config: ModelConfig,
    shardings: Any,
    ignore: Collection[str] = (),
    *,
    packed: bool = False,
    direct_storage: bool = False,
    report: Callable[[str], None] = warnings.warn,
) -> Any:
    """Load a Transformer's parameters from a Hugging Face checkpoint as nested dicts, sharded as `shardings`.

    Args:
      directory, config, ignore, report: as in `from_huggingface`.
      shardings: the layout of each plain parameter.
      packed: True returns quantized weights as `PackedWeight` where a parameter is one tensor, or one for each expert,
        as those of unrolled layers are, and one of its formats stores the same; otherwise all are plain numbers. Host
        memory then holds a whole packed parameter at a time.
      direct_storage: True reads plain parameters by GPUDirect Storage where this machine has it, and reports whether.

    Raises:
      ConfigError: as `from_huggingface`.
    """
    read = None
    if direct_storage:
        reason = why_unavailable()
        report("weights are read by GPUDirect Storage" if reason is None else f"{_NOT_DIRECT}: {reason}")
        read = None if reason else read_by_kvikio
    family, described = describe(directory, ignore)
    check_model(config, described, str(directory))

    def place(leaf: Leaf) -> jax.sharding.Sharding:
        branch = shardings
        for key in leaf.path.split("/"):
            branch = branch[key]
        return branch

    return nest(_read(Path(directory), family, config, place, report, packed, read).items())


def _read(
    directory: Path,
    family: Family,
    config: ModelConfig,
    place: Callable[[Leaf], jax.sharding.Sharding | None],
    report: Callable[[str], None],
    packed: bool = False,
    read: ByteReader | None = None,
) -> Arrays:
    quantization = read_quantization(read_json(directory / CONFIG))
    files = WeightFiles(directory)
    leaves = find_leaves(config, family.tensors_in(files.shapes), family.prediction_prefix)
    quantized = check_files(files, family, config, leaves, quantization)
    transfers = Transfers(_CHUNK_BYTES)
    found: Arrays = {}
    kept: dict[str, PackedWeight] = {}
    for leaf in leaves:
        weight = _pack(quantized, leaf) if packed else None
        if weight is None:
            found[leaf.path] = _read_leaf(files, leaf, place(leaf), read, transfers)
        else:
            found[leaf.path] = weight = place_packed(weight, place(leaf), transposed=leaf.is_table)
            for array in weight.arrays.values():
                transfers.add(array)
            kept |= dict.fromkeys(leaf.names, weight)
    if quantization is not None:
        for line in describe_quantization_differences(quantization, quantized, kept):
            report(f"{directory}: {line}")
    return found


def _pack(quantized: Mapping[str, AnyQuantized], leaf: Leaf) -> PackedWeight | None:
    """Return a parameter, still quantized, in host memory; None if it is not, or no packed format stores the same."""
    tensors = [quantized.get(name) for name in leaf.names]
    if leaf.is_matrices:
        return tensors[0].pack(leaf.outputs) if isinstance(tensors[0], Mxfp4Experts) else None
    if not leaf.is_matrix:
        return None
    outputs, inputs = (tuple(leaf.piece[dim] for dim in dims) for dims in leaf.row.order)
    packed = [tensor.pack(inputs, outputs) if isinstance(tensor, QuantizedTensor) else None for tensor in tensors]
    return stack_packed(packed) if leaf.leading_dims else packed[0]


def check_files(
    files: WeightFiles, family: Family, config: ModelConfig, leaves: Sequence[Leaf], quantization: Quantization | None
) -> dict[str, AnyQuantized]:
    """Check that a checkpoint has the tensors that the model needs; return its quantized weights by name.

    Raises:
      ConfigError: tensors are missing, not known or of another shape.
    """
    wanted = {name: leaf.tensor_shape for leaf in leaves for name in leaf.names}
    files.rename(family.prefix, _HEAD, family.nested)
    quantized = {} if quantization is None else open_quantized(files, quantization)
    tied = config.tie_word_embeddings
    others = family.buffers
    if family.copies:  # and layers for multi-token prediction that the model is to do without
        numbers = "|".join(str(config.num_layers + index) for index in range(MOST_PREDICTION_LAYERS))
        others += rf"|{family.prefix}layers\.({numbers})\..*"
    files.check(wanted, f"{others}|{_HEAD}" if tied else others)
    if tied and _HEAD in files.shapes:
        _check_tied(files, next(leaf for leaf in leaves if leaf.path == "embedding/table").names[0])
    return quantized


def _check_tied(files: WeightFiles, table: str) -> None:
    """Check that an output head stored in addition to a tied embedding table equals that table."""
    head = files.slices(_HEAD)
    embedding = files.slices(table)
    rows = files.shapes[table][0]
    step = max(1, rows // 64)
    parts = (slice(start, min(start + step, rows)) for start in range(0, rows, step))
    equal = files.shapes[_HEAD] == files.shapes[table]
    if not equal or any(np.any(np.asarray(head[part]) != np.asarray(embedding[part])) for part in parts):
        raise ConfigError(f"{files.directory}: tie_word_embeddings is true, but {_HEAD} is not {table}.")


def _read_leaf(
    files: WeightFiles,
    leaf: Leaf,
    sharding: jax.sharding.Sharding | None,
    read: ByteReader | None,
    transfers: Transfers,
) -> jax.Array:
    if sharding is None:
        return _read_part(files, leaf, whole(leaf.shape), None, transfers)
    places: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        cut = explicit_slices(index or (), leaf.shape) if index else whole(leaf.shape)
        places.setdefault(tuple((c.start, c.stop) for c in cut), []).append(device)
    parts = []
    for cut, devices in places.items():
        index = [slice(*ends) for ends in cut]
        direct = None if read is None else _read_onto_device(files, leaf, index, devices[0], read)
        first = _read_part(files, leaf, index, devices[0], transfers) if direct is None else direct
        parts += [first, *(jax.device_put(first, device) for device in devices[1:])]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _read_part(files: WeightFiles, leaf: Leaf, index: Sequence[slice], device: Any, transfers: Transfers) -> jax.Array:
    """Read one shard of a parameter from the files, as float32, onto a device."""
    chunks = [transfers.add(jax.device_put(chunk, device)) for chunk in read_chunks(files, leaf, index)]
    return chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks)


def _read_onto_device(
    files: WeightFiles, leaf: Leaf, index: Sequence[slice], device: Device, read: ByteReader
) -> jax.Array | None:
    """Read one shard of a parameter onto a device without host memory, as float32; None if it is not stored plainly."""
    pieces = []
    for _, name in leaf.pieces(index):
        source = files.on_device(name, device, read)
        if source is None:
            return None
        piece = leaf.read(source, index, on_device=True)
        pieces.append(piece.astype(jnp.float32))
    shape = [cut.stop - cut.start for cut in index]
    return jax.device_put(jnp.stack(pieces).reshape(shape), device)


def read_chunks(files: WeightFiles, leaf: Leaf, index: Sequence[slice]) -> Iterator[np.ndarray]:
    """Read a slice of a parameter as float32; yield it whole, or in chunks if it stacks layers or experts."""
    shape = [cut.stop - cut.start for cut in index]
    row = 4 * math.prod(shape[1:])
    step = max(1, _CHUNK_BYTES // max(row, 1)) if leaf.leading_dims else shape[0]
    for start in range(index[0].start, index[0].stop, step):
        first = slice(start, min(start + step, index[0].stop))
        chunk = np.empty((first.stop - first.start, *shape[1:]), np.float32)
        for at, name in leaf.pieces((first, *index[1:])):
            chunk[at] = leaf.read(files.slices(name), index)
        yield chunk


class ModelParts:
    """Parameters of a Hugging Face checkpoint, read from its files only when they are asked for.

    Args:
      directory: directory with config.json and safetensors.
      config: configuration of the model, with unrolled layers.

    Raises:
      ConfigError: as `from_huggingface`.
    """

    def __init__(self, directory: str | Path, config: ModelConfig):
        family, described = describe(directory)
        check_model(config, described, str(directory))
        self._files = WeightFiles(Path(directory))
        leaves = find_leaves(config, family.tensors_in(self._files.shapes), family.prediction_prefix)
        check_files(self._files, family, config, leaves, None)
        self._leaves = {leaf.path: leaf for leaf in leaves}

    def read(self, path: str, dtypes: Any) -> Any:
        """Read the parameters below a path such as `decoder/layers/3`, as nested dicts of NumPy arrays.

        Args:
          path: keys joined by `/`.
          dtypes: for each of these parameters something that has its dtype.
        """
        if isinstance(dtypes, dict):
            return {key: self.read(f"{path}/{key}", inner) for key, inner in dtypes.items()}
        leaf = self._leaves[path]
        chunks = [chunk.astype(dtypes.dtype, copy=False) for chunk in read_chunks(self._files, leaf, whole(leaf.shape))]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def rows(self, path: str, numbers: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N D"]:
        """Read the rows `numbers` of a table such as `embedding/table`, as float32."""
        leaf = self._leaves[path]
        columns = slice(0, leaf.shape[1])
        found = [next(read_chunks(self._files, leaf, (slice(n, n + 1), columns))) for n in numbers.tolist()]
        return np.concatenate(found)
