"""When the weights of FSDP move: the schedule of a step compiled for four H200s, at the shapes of Llama 3 8B."""

import re

import pytest

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
