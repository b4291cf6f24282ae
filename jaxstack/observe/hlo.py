"""Parses the text of a compiled XLA module: its instructions, and how often each of them runs."""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_NAME = re.compile(r"%([\w.\-]+)")
_LONGEST = 20_000
"""Longer attributes of an instruction are cut before `backend_config`, which may hold a kernel's code."""


class ArrayType(NamedTuple):
    """Dtype and dims of an array in an HLO program."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the array in bytes; sub-byte types are packed, tokens and opaque values have none."""
        return -(-_bits(self.dtype) * math.prod(self.dims) // 8)


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    width = re.match(r"(?:bf|[a-z])(\d+)", dtype)  # s32, bf16, f8e4m3fn, c64
    return int(width[1]) if width else 0


@dataclass(frozen=True)
class Instruction:
    """An HLO instruction, which is one line of a computation."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def arrays(self) -> tuple[ArrayType, ...]:
        """Arrays of the instruction's result, with tuples flattened and layouts removed."""
        return _arrays(self.type)

    @property
    def op_name(self) -> str:
        """Path of the jax operation that the instruction comes from, or an empty string."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int | None:
        """Number of iterations of this while loop, if the compiler knows it."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    def computations(self, *attributes: str) -> list[str]:
        """Return the names of the computations to which the given attributes (`calls`, `body`, ...) refer."""
        names = []
        for attribute in attributes:
            found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes)
            names += _NAME.findall(found[1]) if found else []
        return names


@functools.lru_cache(maxsize=4096)
def _arrays(text: str) -> tuple[ArrayType, ...]:
    return tuple(
        ArrayType(dtype, tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(_COMMENT.sub("", text))
    )


@dataclass(frozen=True)
class Execution:
    """An HLO instruction as the program executes it: how often, and inside which loop or wrapper."""

    instruction: Instruction
    computation: dict[str, Instruction]
    calls: int = 1
    """Number of times that it runs in one run of the program: the product of the trip counts of the loops around it."""
    exact: bool = True
    """False inside a conditional, or a loop of unknown trip count (which counts once)."""
    in_loop: bool = False
    asynchronous: bool = False
    """True inside a wrapper that the scheduler starts and awaits by separate instructions."""
    wrapper: Instruction | None = None

    @property
    def operand_arrays(self) -> tuple[ArrayType, ...]:
        """Arrays that the instruction reads, in order."""
        inputs = (self.computation.get(name) for name in self.instruction.operands)
        return tuple(array for input_ in inputs if input_ for array in input_.arrays)


@dataclass(frozen=True)
class Module:
    """A compiled XLA module: its computations, each with its instructions in the order of the schedule."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    num_devices: int

    @functools.cached_property
    def executions(self) -> tuple[Execution, ...]:
        """Every instruction that a run of the program executes, including those inside fusions and async wrappers."""
        return tuple(self._walk(self.entry, Execution(_NOTHING, {})))

    def _walk(self, name: str, context: Execution) -> Iterator[Execution]:
        computation = self.computations.get(name, {})
        for instruction in computation.values():
            here = replace(context, instruction=instruction, computation=computation)
            yield here
            for callee, inside in _callees(here):
                yield from self._walk(callee, inside)


_NOTHING = Instruction("", "", "", (), "")


def _callees(here: Execution) -> Iterator[tuple[str, Execution]]:
    """Yield the computations that an instruction calls, each with how often and where its instructions then run."""
    instruction = here.instruction
    if instruction.opcode == "while":
        trips = instruction.trip_count
        inside = replace(
            here,
            calls=here.calls * (1 if trips is None else trips),
            exact=here.exact and trips is not None,
            in_loop=True,
        )
        for name in instruction.computations("body", "condition"):
            yield name, inside
    elif instruction.opcode == "conditional":
        for name in instruction.computations("branch_computations", "true_computation", "false_computation"):
            yield name, replace(here, exact=False)
    elif instruction.opcode == "call":
        for name in instruction.computations("to_apply"):
            yield name, here
    elif not instruction.opcode.endswith(("-done", "-update")):  # these name the computation of their start again
        for name in instruction.computations("calls"):
            started = instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes
            yield name, replace(here, asynchronous=here.asynchronous or started, wrapper=instruction)


def parse_module(text: str) -> Module:
    """Parse the HLO text of a compiled XLA module, as `compiled.as_text()` returns it.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry = None
    current = None
    for line in text.splitlines():
        if current is None:
            if header := _HEADER.match(line):
                current = computations.setdefault(header[2], {})
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif instruction := _parse_instruction(line):
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("not the text of an XLA module: it has no ENTRY computation")
    counts = [re.search(rf"{key}=(\d+)", text) for key in ("num_partitions", "replica_count")]
    return Module(computations, entry, math.prod(int(count[1]) for count in counts if count))


def _parse_instruction(line: str) -> Instruction | None:
    """Parse an HLO instruction, `ROOT %name = type opcode(operands), attributes`; None for a line of another form."""
    name, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    if not equals:
        return None
    end = _bracket_end(rest, 0) if rest.startswith("(") else rest.index(" ")
    type_ = rest[:end]
    rest = rest[end:].lstrip()
    opening = rest.index("(")
    opcode = rest[:opening]
    end = _bracket_end(rest, opening)
    literal = opcode in ("constant", "parameter")
    operands = () if literal else tuple(_NAME.findall(_COMMENT.sub("", rest[opening:end])))
    attributes = rest[end:]
    if len(attributes) > _LONGEST:
        attributes = attributes.partition(", backend_config=")[0]  # half a megabyte of a kernel's code
    return Instruction(name.lstrip("%"), type_, opcode, operands, attributes)


def _bracket_end(text: str, start: int) -> int:
    """Return the index after the bracket that closes the one at `start`; brackets in quotes are skipped."""
    depth = 0
    quoted = False
    for index in range(start, len(text)):
        character = text[index]
        if character == '"' and text[index - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return index + 1
    return len(text)
