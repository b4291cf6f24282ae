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


NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP (the terminal was closed)"}


@pytest.mark.parametrize("signum", NAMES)
def test_a_signal_ends_with_one_line_before_jax_is_there(signum):
    """Also where Python's own handler would not come to run for long, or in a callback that forgets what it raises."""
    process = subprocess.Popen([sys.executable, "-c", HEARD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    text = f"a command: stopped by {NAMES[signum]} outside of the training steps; nothing is saved\n"
    assert said == text


def test_nohup_is_respected():
    """A process that was told to ignore SIGHUP goes on when the terminal closes."""
    code = HEARD.replace(
        "import ctypes, sys", "import ctypes, sys, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
