"""Counts the collectives (in bytes per device) and matmuls of a compiled XLA module, from its text.

Each of these forms in a scheduled GPU module counts as one collective:

- `all-gather-start` with its `all-gather-done` (likewise for the other kinds): asynchronous;
- a plain `all-gather`, or a start with `"is_sync":true`: the scheduler found nothing to overlap it with;
- `async-start ... calls=%wrapped`, the long form of the first, with the collective in the wrapped computation;
- `fusion ... calls=%dynamic-slice-fusion` and `fusion-start ... calls=%fused_all-reduce`, with the collective in the
  fusion.

The CPU backend prints all-reduce + slice for a reduce-scatter and widens bfloat16 to float32: check bytes on text that
was compiled for the GPU.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxstack.observe.hlo import Execution, Instruction, Module, parse_module

Groups = tuple[tuple[int, ...], ...]
_SPELLINGS = re.compile(r"replica_groups=(mesh\[.*?\].*?\{.*?\}|\[.*?\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{\{.*?\}\})")


def replica_groups(attributes: str, num_devices: int) -> Groups:
    """Return the groups of device ids that a collective connects, parsed from its attributes; default: all in one.

    There are four spellings: `{{0,1},{2,3}}`, `[2,2]<=[4]T(1,0)` (an iota, reshaped and transposed), `mesh['a'=2,'b'=2]
    {'a'}` (mesh axes, or pieces of them as `'a':(offset)size`) and `{}`. For the `source_target_pairs` of a permute, a
    group is a set of devices that the pairs connect.
    """
    if "source_target_pairs=" in attributes:
        return _connected(permute_pairs(attributes))
    found = _SPELLINGS.search(attributes)
    if not found:
        return (tuple(range(num_devices)),)
    text = found[1]
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        return _rows(_iota(text))
    return tuple(tuple(int(i) for i in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", text))


def permute_pairs(attributes: str) -> list[tuple[int, int]]:
    """Return the (source, target) device ids of a collective-permute or send, without pairs of equal ids."""
    found = re.search(r'source_target_pairs="?\{(.*?)\}\}', attributes)
    pairs = re.findall(r"(\d+),(\d+)", found[1]) if found else []
    return [(int(a), int(b)) for a, b in pairs if a != b]


def mesh_axes_of(groups: Sequence[Sequence[int]], mesh_axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a collective's groups differ; `mesh_axes` is name -> size."""
    sizes = tuple(mesh_axes.values())
    if any(max(group, default=0) >= math.prod(sizes) for group in groups):
        raise ValueError(f"device ids of {groups} do not fit a mesh of {dict(mesh_axes)}")
    varying: set[str] = set()
    for group in groups:
        coordinates = np.array(np.unravel_index(np.array(group, int), sizes))
        spread = coordinates.max(axis=1) != coordinates.min(axis=1)
        varying |= {name for name, varies in zip(mesh_axes, spread, strict=True) if varies}
    return tuple(name for name in mesh_axes if name in varying)


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in array)


def _iota(text: str) -> np.ndarray:
    """Expand XLA's short form of device ids: `[2,4]<=[4,2]T(1,0)` counts to 8, reshapes, transposes, reshapes."""
    found = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert found, text
    shape, source, order = ([int(i) for i in part.split(",")] if part else None for part in found.groups())
    assert shape and source
    return np.arange(math.prod(source)).reshape(source).transpose(order or range(len(source))).reshape(shape)


def _mesh_groups(text: str) -> Groups:
    """Parse device groups given as mesh axes in braces: each group spans these axes, at one index of the other axes."""
    mesh_text = text[: text.rindex("{")]
    axes_text = text[text.rindex("{") :]
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh_text)}
    ids = _mesh_ids(mesh_text, math.prod(sizes.values()))
    pieces: list[tuple[str, int, int]] = []  # for every axis, in order: name, start, size
    chosen: dict[tuple[str, int], int] = {}  # (name, start) -> position in the group's order
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in sizes.items()}
    for place, (name, start, size) in enumerate(re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes_text)):
        first = int(start or 1)
        length = int(size or sizes[name])
        cuts[name] |= {first, first * length}
        chosen[name, first] = place
    for name, edges in cuts.items():
        ordered = sorted(edges)
        pieces += [(name, a, b // a) for a, b in zip(ordered, ordered[1:], strict=False)]
    grid = ids.reshape([size for _, _, size in pieces])
    inside = sorted((i for i, p in enumerate(pieces) if p[:2] in chosen), key=lambda i: chosen[pieces[i][:2]])
    outside = [i for i in range(len(pieces)) if i not in inside]
    members = math.prod(pieces[i][2] for i in inside)
    return _rows(grid.transpose(outside + inside).reshape(-1, members))


def _mesh_ids(text: str, count: int) -> np.ndarray:
    """Return the device ids of a mesh in row-major order: 0, 1, ... unless `text` lists them in `device_ids=(...)`."""
    found = re.search(r"device_ids=\((.*)\)", text)
    if not found:
        return np.arange(count)
    # `[2,4]T(1,0)`: count up to 8, reshape to [2,4], transpose
    if compact := re.fullmatch(r"\[([\d,]+)\](T\([\d,]+\))?", found[1]):
        return _iota(f"[{count}]<=[{compact[1]}]{compact[2] or ''}").reshape(-1)
    if "<=" in found[1]:
        return _iota(found[1] if found[1].startswith("[") else f"[{count}]{found[1]}").reshape(-1)
    return np.array([int(i) for i in re.findall(r"\d+", found[1])])


def _connected(pairs: Sequence[tuple[int, int]]) -> Groups:
    groups: list[set[int]] = []
    for pair in pairs:
        touched = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touched] + [set(pair).union(*touched)]
    return tuple(sorted(tuple(sorted(group)) for group in groups))


# Bytes that one device sends with a ring, as a multiple of (n - 1) / n of the payload.
_RING_PASSES = {
    "all-reduce": 2,
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 1,
    "ragged-all-to-all": 1,
    "collective-broadcast": 1,
}
_MATMUL_CALL = re.compile(
    r'custom_call_target="(__cublas\$(gemm|lt\$\w*[mM]atmul)|__cudnn\$blockScaledDot|__onednn\$matmul)'
)
KINDS = (*_RING_PASSES, "collective-permute", "send")


@dataclass(frozen=True)
class Collective:
    """A collective operation of a compiled module: its kind, bytes, devices, and how often it runs."""

    kind: str
    """An element of `KINDS`."""
    dtype: str
    """XLA's name of the element type; several joined by `+` if one instruction combines them."""
    payload_bytes: int
    """Size of the tensor, unsharded over the group: the result of an all-gather, the operand of a reduce-scatter."""
    wire_bytes: int
    """Bytes that one device sends with a ring; for a ragged all-to-all an upper bound."""
    group_size: int
    device_ids: tuple[int, ...]
    """The first group: positions in the mesh, row-major."""
    axes: tuple[str, ...]
    """Mesh axes along which a group varies; empty if no mesh was given."""
    asynchronous: bool
    """True if it is started and awaited by separate instructions, so that other work can overlap."""
    calls: int
    """Number of times that one run of the program executes it: the product of the trip counts of its loops."""
    exact: bool
    """False if `calls` is a guess: in a conditional, or in a loop of unknown length, which counts once."""
    in_loop: bool
    name: str
    op_name: str
    """The jax path of its origin, e.g. `jit(step)/while/body/psum`."""


def collectives(text: str | Module, mesh_axes: Mapping[str, int] | None = None) -> list[Collective]:
    """Return the collective operations of a compiled module, in the order in which the compiler scheduled them.

    Args:
      text: `compiled.as_text()`, or the result of `parse_module`.
      mesh_axes: name -> size of the mesh that the program was compiled for, in the mesh's order (`mesh.shape`).

    Raises:
      ValueError: the text is not an XLA module, or its device ids do not fit `mesh_axes`.
    """
    module = _module(text)
    return [
        _collective(execution, module.num_devices, mesh_axes)
        for execution in module.executions
        if _kind(execution) in KINDS
    ]


def _module(text: str | Module) -> Module:
    return text if isinstance(text, Module) else parse_module(text)


def _kind(execution: Execution) -> str:
    return execution.instruction.opcode.removesuffix("-start")


def _collective(execution: Execution, num_devices: int, mesh_axes: Mapping[str, int] | None) -> Collective:
    instruction = execution.instruction
    kind = _kind(execution)
    arrays = execution.operand_arrays
    if kind in ("ragged-all-to-all", "send"):
        arrays = arrays[:1]  # the others are the output buffer, offsets and sizes, or a token
    groups = replica_groups(instruction.attributes, num_devices)
    first = groups[0] if groups else ()
    size = max(len(first), 1)
    payload = sum(array.bytes for array in arrays) * (size if kind == "all-gather" else 1)
    passes = _RING_PASSES.get(kind)
    once = payload if groups else 0
    wire = once if passes is None else passes * payload * (size - 1) // size
    axes_groups = permute_pairs(instruction.attributes) if kind not in _RING_PASSES else groups
    wrapper_name = execution.wrapper.op_name if execution.wrapper else ""
    return Collective(
        kind=kind,
        dtype="+".join(sorted({array.dtype for array in arrays})),
        payload_bytes=payload,
        wire_bytes=wire,
        group_size=size,
        device_ids=first,
        axes=mesh_axes_of(axes_groups, mesh_axes) if mesh_axes else (),
        asynchronous=_is_asynchronous(execution),
        calls=execution.calls,
        exact=execution.exact,
        in_loop=execution.in_loop,
        name=instruction.name,
        op_name=instruction.op_name or wrapper_name,
    )


def _is_asynchronous(execution: Execution) -> bool:
    instruction = execution.instruction
    if instruction.opcode == "send":
        return True
    started = instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes
    return started or execution.asynchronous


def bytes_over_axis(text: str | Module, mesh_axes: Mapping[str, int], axis: str) -> int:
    """Return how many bytes each device sends over a mesh axis when a program runs once.

    Args:
      text, mesh_axes: as in `collectives`.
      axis: name of the mesh axis; transfers over several axes count if it is one of them.
    """
    return sum(row.wire_bytes * row.calls for row in collectives(text, mesh_axes) if axis in row.axes)


def summarise(rows: Iterable[Collective]) -> list[dict[str, Any]]:
    """Summarise collectives in a table, grouped by kind, dtype, mesh axes, loop and asynchrony; most wire bytes first.

    Each row has `kind, dtype, axes` ("data+fsdp", or "n devices" without a mesh), `in_loop, asynchronous,
    instructions, calls, payload_bytes, wire_bytes` (both over all calls of one run of the program, per device) and
    `exact`.
    """
    table: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        axes = "+".join(row.axes) or f"{row.group_size} devices"
        key = (row.kind, row.dtype, axes, row.in_loop, row.asynchronous)
        entry = table.setdefault(
            key,
            dict(zip(("kind", "dtype", "axes", "in_loop", "asynchronous"), key, strict=True))
            | {"instructions": 0, "calls": 0, "payload_bytes": 0, "wire_bytes": 0, "exact": True},
        )
        entry["instructions"] += 1
        entry["calls"] += row.calls
        entry["payload_bytes"] += row.payload_bytes * row.calls
        entry["wire_bytes"] += row.wire_bytes * row.calls
        entry["exact"] = entry["exact"] and row.exact
    return sorted(table.values(), key=lambda entry: (-entry["wire_bytes"], entry["kind"]))


def matmuls(text: str | Module) -> int:
    """Return the number of matmuls in one run of a compiled module: dots and cuBLAS calls, times loop iterations.

    Of the kernels only the FP8 one counts: the matmuls inside other kernels are not visible.
    """
    return sum(execution.calls for execution in _module(text).executions if _is_matmul(execution))


def fp8_matmuls(text: str | Module) -> int:
    """Return how many of the matmuls that a run of a compiled module executes are in FP8.

    These are cuBLAS calls, calls of our kernel, and dots of two FP8 operands.
    """
    executions = _module(text).executions
    return sum(execution.calls for execution in executions if _is_matmul(execution) and _is_fp8(execution))


def _is_matmul(execution: Execution) -> bool:
    instruction = execution.instruction
    if instruction.opcode == "custom-call":
        return bool(_MATMUL_CALL.search(instruction.attributes)) or _is_our_fp8(instruction)
    return instruction.opcode in ("dot", "scaled-dot", "ragged-dot")


def _is_fp8(execution: Execution) -> bool:
    instruction = execution.instruction
    if instruction.opcode == "custom-call":
        return 'custom_call_target="__cublas$lt$matmul$f8"' in instruction.attributes or _is_our_fp8(instruction)
    return all(array.dtype.startswith("f8") for array in execution.operand_arrays[:2])


def _is_our_fp8(instruction: Instruction) -> bool:
    """Return True if an instruction calls one of our FP8 matmul kernels, dense or grouped."""
    ours = 'custom_call_target="mosaic_gpu' in instruction.attributes
    return ours and re.search(r"/fp8_(block_product|grouped_product|grouped_weights)/", instruction.op_name) is not None
