"""When the weights of FSDP move: the schedule of a step compiled for four H200s, at the shapes of Llama 3 8B."""

import math
import re
from typing import NamedTuple

import pytest

from jaxstack.models import stack
from jaxstack.observe.hlo import Instruction, Module, parse_module
from tests.hopper import compile_step
from tests.small_runs import small_config

ROWS, LENGTH = 4, 8192
SHAPE = (
    "model.num_layers=3", "model.hidden_size=4096", "model.num_heads=32", "model.num_kv_heads=8", "model.head_dim=128",
    "model.intermediate_size=14336", "model.vocab_size=32000", "model.scan_layers=false", "model.remat=none",
    f"train.sequence_length={LENGTH}", f"train.global_batch_size={ROWS}", "parallel.fsdp=4",
)  # fmt: skip
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = .*?\b([a-z][a-z\-]+)\(")


def schedule_of_the_step() -> str:
    """The scheduled instructions of a step's main computation."""
    text = str(compile_step(small_config(*SHAPE))[1].as_text())
    return text[text.index("\nENTRY ") :]


def matmuls_meanwhile(schedule: str, kind: str) -> list[int]:
    """For each collective of this kind: how many matmuls and kernels stand between its start and its end."""
    begun: dict[str, int] = {}
    found, matmuls = [], 0
    for line in schedule.splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        name, operation = match.groups()
        call = operation == "custom-call" and any(word in line for word in ("cublas", "mosaic", "fmha"))
        matmuls += call or (operation == "fusion" and "gemm" in name)
        if operation == f"{kind}-start":
            begun[name] = matmuls
        elif operation == f"{kind}-done":
            source = re.search(r"-done\(%?([\w.\-]+)\)", line)
            assert source is not None
            found.append(matmuls - begun.pop(source[1]))
    return found


@pytest.mark.slow
def test_weights_are_gathered_while_matmuls_run():
    schedule = schedule_of_the_step()
    gathers = matmuls_meanwhile(schedule, "all-gather")
    # Seven matrices a layer, forward and again backward (XLA may combine small ones); embedding and head once.
    assert len(gathers) >= 2 * 3 * 6 + 1
    assert sum(count > 0 for count in gathers) >= 2 / 3 * len(gathers), gathers
    scatters = matmuls_meanwhile(schedule, "reduce-scatter")
    assert sum(count > 0 for count in scatters) >= 2 / 3 * len(scatters), scatters


# Five layers scanned: a turn of two, forward and backward, and what is peeled off.
SCANNED = (*SHAPE, "model.num_layers=5", "model.scan_layers=true", "precision.reduce=bfloat16")
LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
"""Weights of the matrices of a layer."""


class Moved(NamedTuple):
    """An asynchronous collective in a turn of a loop."""

    kind: str
    elements: int
    """Of the whole weights, or of their gradients."""
    matmuls: int
    """Matmuls and kernels that run between its start and its end."""
    kept: bool
    """Whether its results leave the turn as they are."""


def is_matmul(module: Module, instruction: Instruction) -> bool:
    inner = [i for name in instruction.computations("calls") for i in module.computations[name].values()]
    calls = [i for i in (instruction, *inner) if i.opcode == "custom-call"]
    return any(word in call.attributes for call in calls for word in ("cublas", "mosaic", "fmha"))


def turns(text: str) -> list[list[Moved]]:
    """The collectives of weights in a turn of each loop that gathers some."""
    module = parse_module(text)
    whiles = [i for part in module.computations.values() for i in part.values() if i.opcode == "while"]
    bodies = [module.computations[loop.computations("body")[0]] for loop in whiles]
    return [moved for body in bodies if "all-gather" in {m.kind for m in (moved := collectives_of(module, body))}]


def collectives_of(module: Module, body: dict[str, Instruction]) -> list[Moved]:
    found, begun, matmuls = [], {}, 0
    *_, root = body.values()
    passed = {"get-tuple-element": {i.operands[0] for i in body.values() if i.opcode == "get-tuple-element"}}
    leaving = {*root.operands, *(o for n in root.operands for o in body[n].operands if body[n].opcode in PASSING)}
    for name, instruction in body.items():
        matmuls += is_matmul(module, instruction)
        kind, _, end = instruction.opcode.rpartition("-")
        if kind not in ("all-gather", "reduce-scatter"):
            continue
        if end == "start":
            begun[name] = matmuls, sum(math.prod(a.dims) for o in instruction.operands for a in body[o].arrays)
        elif end == "done":
            before, given = begun.pop(instruction.operands[0])
            elements = sum(math.prod(a.dims) for a in instruction.arrays)
            found.append(Moved(kind, max(given, elements), matmuls - before, name in leaving))
    return found
