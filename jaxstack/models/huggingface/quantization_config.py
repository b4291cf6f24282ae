"""Reads and writes `quantization_config` in config.json, in the forms of compressed-tensors, DeepSeek and gpt-oss."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from jaxstack.errors import ConfigError
from jaxstack.models.huggingface.files import CONFIG, read_json

KEY = "quantization_config"
"""Key of config.json."""
_WRITTEN = ("pack-quantized", "int-quantized", "float-quantized")
_READ = (*_WRITTEN, "naive-quantized")
_METHOD = "compressed-tensors"
FP8 = "fp8"
"""The `quant_method` of DeepSeek, with a scale for each block of a matrix, and the name of this format."""
MXFP4 = "mxfp4"
"""The `quant_method` of gpt-oss, without schemes: its tensors are found by their names."""
FORMATS = (*_WRITTEN, FP8, MXFP4)
"""Formats that are written."""
_DENSE_OF_GPT_OSS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
_PER_TOKEN = {"symmetric": True, "strategy": "token", "dynamic": True}
"""Settings of inputs that are rounded with a scale for each token, computed from the token itself."""


class WeightArguments(BaseModel):
    """Entry `weights` of a compressed-tensors quantization group: bits, number type, and what shares a scale."""

    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "block", "tensor_group"] | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The quantization of a module's weight in a compressed-tensors format: bits, number type, and what shares a scale.

    Attributes:
      format: name of the format, such as `pack-quantized`.
      bits: bits of a value.
      kind: integers, or floating-point numbers (FP8, e4m3).
      strategy: what shares a scale: the whole tensor, a row (`channel`), a group of inputs of a row, or a block.
      group_size: inputs of a group.
      block: rows and columns of a block.
      symmetric: False if the integers have zero points.
      activations: True if the inputs or outputs of the module are quantized too.
      scales: name of the tensor with the scales, which the values are multiplied with.
      rounds_inputs: True if only the inputs are quantized, to symmetric 8-bit numbers of the same kind with a dynamic
        scale for each token; jaxstack rounds them too where the weight stays packed.
    """

    format: str
    bits: int
    kind: Literal["int", "float"] = "int"
    strategy: str = "channel"
    group_size: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    activations: bool = False
    rounds_inputs: bool = False
    scales: str = "weight_scale"

    def as_group(self, targets: list[str]) -> dict[str, Any]:
        """Return the entry of config.json's `config_groups` that gives this scheme to the modules in `targets`."""
        shared = {"num_bits": self.bits, "type": self.kind, "symmetric": self.symmetric}
        weights = {**shared, "strategy": self.strategy, "group_size": self.group_size, "dynamic": False}
        rounded = {**_PER_TOKEN, "num_bits": self.bits, "type": self.kind, "group_size": None}
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": rounded if self.activations else None,
            "output_activations": None,
        }


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Quantization schemes of a compressed-tensors checkpoint, by groups of modules.

    Attributes:
      groups: targets (names of modules, `re:` and a regular expression, or classes) and the scheme of each group.
      kv_cache: True if other programs quantize the cache of keys and values.
    """

    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    kv_cache: bool = False

    def scheme(self, module: str) -> Scheme | None:
        """Look up the quantization scheme of a module by its name; None if it is not quantized."""
        for names in (True, False):  # a name goes before a class
            for targets, scheme in self.groups:
                if any(_matches(target, module) if names else target in _classes(module) for target in targets):
                    return scheme
        return None


def is_quantized(directory: str | Path) -> bool:
    """Return True if the config.json in a directory declares quantized weights."""
    path = Path(directory) / CONFIG
    return path.is_file() and bool(read_json(path).get(KEY))


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Read the quantization schemes from a config.json; None if its weights are not quantized.

    Raises:
      ConfigError: the weights are stored in a way that is not supported; the message names it.
    """
    said = config.get(KEY)
    if not said:
        return None
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if method == MXFP4:
        return Quantization(())
    if method == FP8 and isinstance(said, Mapping):
        return _read_fp8(said)
    if method != _METHOD:
        raise ConfigError(
            f"config.json: {KEY} has quant_method {method!r}; these are read: {_METHOD}, which llm-compressor writes, "
            f"{MXFP4} (gpt-oss) and {FP8} (DeepSeek)."
        )
    for key in ("sparsity_config", "transform_config"):
        other = said.get(key) or {}
        if (other.get("format") or "dense") != "dense" or (key == "transform_config" and other):
            what = other.get("format") or ", ".join(other)
            raise _refused(f"{key} ({what})", "Decompress the checkpoint with the program that wrote it")
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"config.json: {KEY} has no config_groups.")
    found = tuple(_read_group(name, group, said.get("format")) for name, group in groups.items())
    return Quantization(found, kv_cache=bool(said.get("kv_cache_scheme")))


def _read_fp8(said: Mapping[str, Any]) -> Quantization:
    """Read the scheme of DeepSeek's FP8 files (arXiv:2412.19437, section 3.3): a scale for each block of a matrix."""
    block = said.get("weight_block_size")
    if said.get("fmt", "e4m3") != "e4m3" or not isinstance(block, list) or len(block) != 2:
        raise _refused(f"fmt {said.get('fmt')!r} with weight_block_size {block!r}", "FP8 (e4m3) in blocks is read")
    return Quantization(((("Linear",), block_scheme((block[0], block[1]))),))


def block_scheme(block: tuple[int, int]) -> Scheme:
    """Return the scheme of matrices in DeepSeek's FP8, given the rows and columns of a block."""
    name = "weight_scale_inv"
    return Scheme("float-quantized", 8, "float", "block", block=block, activations=True, scales=name)


def make_quantization_config(schemes: Mapping[str, Scheme], dense: Iterable[str], format: str) -> dict[str, Any]:
    """Create the `quantization_config` entry of config.json for a quantized checkpoint.

    Args:
      schemes: scheme of each quantized module, by name.
      dense: names of the linear modules that are not quantized; with FP8 without routers.
      format: format of all schemes.

    Raises:
      ConfigError: they have blocks of several sizes, where the format has one for all.
    """
    if format == MXFP4:
        return {"quant_method": MXFP4, "modules_to_not_convert": _DENSE_OF_GPT_OSS}
    if format == FP8:
        return _write_fp8(set(schemes.values()), sorted(set(dense) - {"lm_head"}))
    modules: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        modules.setdefault(scheme, []).append(name)
    # One scheme is that of the class; several need the names of their modules.
    groups = [scheme.as_group(names if len(modules) > 1 else ["Linear"]) for scheme, names in modules.items()]
    return {
        "quant_method": _METHOD,
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": sorted(dense),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _write_fp8(schemes: set[Scheme], dense: list[str]) -> dict[str, Any]:
    if len(blocks := sorted({scheme.block or () for scheme in schemes})) > 1:
        raise ConfigError(f"weights with blocks of several sizes ({blocks}) cannot be written in the format {FP8}.")
    said = {"quant_method": FP8, "fmt": "e4m3", "weight_block_size": list(blocks[0]), "activation_scheme": "dynamic"}
    return {**said, "modules_to_not_convert": dense} if dense else said


def _read_group(name: str, group: object, default: object) -> tuple[tuple[str, ...], Scheme]:
    where = f"config_groups.{name}"
    if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
        raise _refused(f"{where}, a preset without its settings", "Write the group's settings into config.json")
    format = group.get("format") or default
    if format not in _READ:
        raise _refused(f"format {format!r} ({where})", f"These formats are read: {', '.join(_READ)}")
    try:
        weights = WeightArguments.model_validate(group.get("weights") or {})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise _refused(f"{where}.weights.{key} {first['input']!r}", first["msg"]) from None
    size = weights.group_size
    strategy = weights.strategy
    grouped = size is not None and size > 0
    strategy = strategy or ("group" if grouped else "channel" if size == -1 else "tensor")
    wrong = (
        strategy == "tensor_group"
        or (strategy == "group") != grouped
        or (strategy == "block") != bool(weights.block_structure)
    )
    if wrong or weights.num_bits not in (range(1, 9) if weights.type == "int" else (8,)):
        shown = weights.model_dump(exclude_none=True)
        raise _refused(f"{where}.weights {shown}", "Integers of 1 to 8 bits and FP8 (e4m3) are read")
    inputs = group.get("input_activations")
    outputs = group.get("output_activations")
    scheme = Scheme(
        format=str(format),
        bits=weights.num_bits,
        kind=weights.type,
        strategy=strategy,
        group_size=size if grouped else None,
        block=weights.block_structure,
        symmetric=weights.symmetric,
        activations=bool(inputs or outputs),
        rounds_inputs=not outputs and _are_tokens(inputs, weights.type),
    )
    return tuple(map(str, group["targets"])), scheme


def _are_tokens(inputs: object, kind: str) -> bool:
    """Return True if an entry `input_activations` asks for 8 bits of a kind of number, with a scale for each token."""
    if not isinstance(inputs, Mapping):
        return False
    wanted = {**_PER_TOKEN, "num_bits": 8, "type": kind}
    defaults = {"num_bits": 8, "type": "int", "symmetric": True}
    return {key: {**defaults, **inputs}.get(key) for key in wanted} == wanted


def _refused(what: str, way_out: str) -> ConfigError:
    return ConfigError(f"config.json: {KEY} has {what}, which is not supported. {way_out}.")


def _matches(target: str, module: str) -> bool:
    return re.match(target[3:], module) is not None if target.startswith("re:") else target == module


def _classes(module: str) -> tuple[str, ...]:
    return ("Embedding",) if module.endswith("embed_tokens") else ("Linear",)
