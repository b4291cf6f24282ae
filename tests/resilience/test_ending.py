"""SIGTERM outside of the training steps, from the first line of a command on."""

import signal
import subprocess
import sys

HEARD = """
import ctypes, sys
from jaxstack.resilience.ending import EndAtOnce
import jaxstack.train
assert "jax" not in sys.modules and "numpy" not in sys.modules
with EndAtOnce("a command"):
    print("ready", flush=True)
    while True:
        ctypes.CDLL(None).sleep(1000)  # as a compilation, which Python runs no handler in
"""


def test_sigterm_ends_with_one_line_before_jax_is_there():
    process = subprocess.Popen([sys.executable, "-c", HEARD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert said == "a command: stopped by signal 15 outside of the training steps; nothing new to save\n"
