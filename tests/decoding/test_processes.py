"""Text is the same on two processes with two devices each as on one process with four."""

import os
import subprocess
import sys

import pytest

from jaxstack.launch.supervisor import free_port

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "generate_in_process.py")


def generate(axis: str, processes: int) -> list[list[str]]:
    """The lines with tokens that each process prints; the library of the collectives prints others."""
    port = free_port()
    environment = os.environ | {"PYTHONPATH": ROOT, "JAX_NUM_CPU_DEVICES": str(4 // processes), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, axis, str(process), str(processes), str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for process in range(processes)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes
    return [[line for line in text.splitlines() if line.startswith("[[")] for text in said]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_processes_generate_the_text_of_one(axis):
    (alone,) = generate(axis, 1)
    assert len(alone) == 2 and alone[0] != alone[1]
    assert generate(axis, 2) == [alone, alone]
