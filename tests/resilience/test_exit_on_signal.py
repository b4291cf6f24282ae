"""SIGTERM and Ctrl-C outside of the training steps, from the first line of a command on."""

import signal
import subprocess
import sys

import pytest

HEARD = """
import ctypes, sys
from jaxstack.resilience.exit_on_signal import ExitOnSignal
import jaxstack.train
assert "jax" not in sys.modules and "numpy" not in sys.modules
with ExitOnSignal("a command"):
    print("ready", flush=True)
    while True:
        ctypes.CDLL(None).sleep(1000)  # as a compilation, which Python runs no handler in
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_with_one_line_before_jax_is_there(signum):
    """Also where Python's own handler would not come to run for long, or in a callback that forgets what it raises."""
    process = subprocess.Popen([sys.executable, "-c", HEARD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    text = f"a command: stopped by signal {signum:d} outside of the training steps; nothing new to save\n"
    assert said == text
