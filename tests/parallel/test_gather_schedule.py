"""When the weights of FSDP move: the schedule of a step compiled for four H200s, at the shapes of Llama 3 8B."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from jaxstack.observe.hlo import Instruction, Module, parse_module
from tests.hopper_steps import compile_step
from tests.small_runs import small_config

ROWS = 4
LENGTH = 8192
SHAPE = (
    "model.num_layers=3", "model.hidden_size=4096", "model.num_heads=32", "model.num_kv_heads=8", "model.head_dim=128",
    "model.intermediate_size=14336", "model.vocab_size=32000", "model.scan_layers=false", "model.remat=none",
    f"train.sequence_length={LENGTH}", f"train.global_batch_size={ROWS}", "parallel.fsdp=4",
)  # fmt: skip
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = .*?\b([a-z][a-z\-]+)\(")


def schedule_of_the_step(*overrides: str) -> str:
    """The scheduled instructions of a step's main computation."""
    text = str(compile_step(small_config(*SHAPE, *overrides))[1].as_text())
    return text[text.index("\nENTRY ") :]


def matmuls_meanwhile(schedule: str, kind: str) -> list[int]:
    """For each collective of this kind: how many matmuls and kernels stand between its start and its end."""
    begun: dict[str, int] = {}
    found = []
    matmuls = 0
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


@pytest.mark.exhaustive
def test_weights_are_gathered_while_matmuls_run():
    schedule = schedule_of_the_step("parallel.copy_engines=never")
    gathers = matmuls_meanwhile(schedule, "all-gather")
    # Seven matrices a layer, forward and again backward (XLA may combine small ones); embedding and head once.
    assert len(gathers) >= 2 * 3 * 6 + 1
    assert sum(count > 0 for count in gathers) >= 2 / 3 * len(gathers), gathers
    scatters = matmuls_meanwhile(schedule, "reduce-scatter")
    assert sum(count > 0 for count in scatters) >= 2 / 3 * len(scatters), scatters


@pytest.mark.exhaustive
def test_weights_are_copied_while_matmuls_run():
    schedule = schedule_of_the_step()
    assert not re.search("all-gather|reduce-scatter", schedule)
    copies = matmuls_meanwhile(schedule, "collective-permute")
    # To three other devices; what is gathered again in the backward pass, and gradients, beside that.
    assert len(copies) >= 3 * (3 * 3 * 4 + 3)
    assert sum(count > 0 for count in copies) >= 2 / 3 * len(copies), copies


SCANNED = (
    *SHAPE, "model.num_layers=6", "model.scan_layers=true", "model.remat=save_attention", "precision.reduce=bfloat16",
    "parallel.prefetch=true",
)  # fmt: skip
"""A turn of two layers, forward and backward, and what is peeled off."""
WEIGHTS = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
"""Of the matrices of a layer."""


class Moved(NamedTuple):
    """A collective in a turn of a loop."""

    kind: str
    weights: int
    """Whole weights that it gathers, or of which it scatters the gradients."""
    matmuls: int
    """Matmuls and kernels that run meanwhile."""
    carried: int
    """Weights that go to the next turn as they are."""


def is_matmul(module: Module, instruction: Instruction) -> bool:
    inner = [i for name in instruction.computations("calls") for i in module.computations[name].values()]
    calls = [i for i in (instruction, *inner) if i.opcode == "custom-call"]
    return any(word in call.attributes for call in calls for word in ("cublas", "mosaic", "fmha"))


def elements(body: dict[str, Instruction], names: Iterable[str]) -> int:
    return sum(math.prod(array.dims) for name in names for array in body[name].arrays)


def collectives_of(module: Module, body: dict[str, Instruction]) -> list[Moved]:
    """The gathers and scatters of a turn, synchronous ones among them."""
    found = []
    begun = {}
    matmuls = 0
    *_, root = body.values()
    for name, instruction in body.items():
        matmuls += is_matmul(module, instruction)
        if match := re.fullmatch("(all-gather|reduce-scatter)(-start|-done)?", instruction.opcode):
            kind, end = match.groups()
            if end != "-done":
                begun[name] = matmuls, elements(body, instruction.operands)
            if end == "-start":
                continue
            before, given = begun.pop(instruction.operands[0] if end else name)
            parts = [i for i in body.values() if i.opcode == "get-tuple-element" and i.operands == (name,)]
            leaving = [i.name for i in (instruction, *parts) if i.name in root.operands]
            most = max(given, elements(body, [name]))
            found.append(Moved(kind, most, matmuls - before, elements(body, leaving)))
    return found


def turns(text: str) -> list[list[Moved]]:
    """The collectives in a turn of each loop that gathers weights."""
    module = parse_module(text)
    whiles = [i for part in module.computations.values() for i in part.values() if i.opcode == "while"]
    bodies = [collectives_of(module, module.computations[loop.computations("body")[0]]) for loop in whiles]
    return [body for body in bodies if any(moved.kind == "all-gather" for moved in body)]


@pytest.mark.exhaustive
def test_a_scan_gathers_the_next_layer_while_this_one_runs():
    compiled = compile_step(small_config(*SCANNED))[1]
    forward, backward = turns(compiled.as_text())
    for body in (forward, backward):
        gathers = [moved for moved in body if moved.kind == "all-gather"]
        assert sum(moved.weights for moved in gathers) == 2 * WEIGHTS, "two layers' a turn"
        assert sum(moved.carried for moved in gathers) == WEIGHTS, "the second's are for the next turn"
    scatters = [moved for moved in backward if moved.kind == "reduce-scatter"]
    assert sum(moved.weights for moved in scatters) == 2 * WEIGHTS
    for body in (forward, backward):
        hidden = sum(moved.weights for moved in body if moved.matmuls)
        assert hidden >= 0.75 * sum(moved.weights for moved in body), body


@pytest.mark.exhaustive
def test_prefetching_holds_two_layers_weights_and_gradients():
    ahead = compile_step(small_config(*SCANNED))[1].memory_analysis()
    plain = compile_step(small_config(*SCANNED, "parallel.prefetch=false"))[1].memory_analysis()
    # In the plain scan at least one layer's weights and gradients exist at a time.
    assert ahead.temp_size_in_bytes <= plain.temp_size_in_bytes + 2 * 2 * 2 * WEIGHTS
