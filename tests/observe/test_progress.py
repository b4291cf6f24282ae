"""Progress: plain lines in a pipe, a live line with messages above it on a terminal."""

import io
import os
import pty
import re
import select
import subprocess
import sys
import textwrap

import pytest

from jaxstack.observe.number_format import byte_size, duration, short_number
from jaxstack.observe.progress import Progress, progress_fields

VALUES = {
    "loss": 2.34567,
    "tokens_per_second": 12345.6,
    "model_tflops_per_device": 512.3,
    "mfu": 0.4123,
    "peak_memory_bytes": 3 * 2**30 // 2,
}


def test_fields():
    assert progress_fields(VALUES, 200) == [
        "loss 2.3457",
        "12.3k tok/s",
        "512 TFLOP/s",
        "MFU 41.2%",
        "mem 1.5 GiB",
        "ETA 3m20s",
    ]
    assert progress_fields({"loss": "NaN", "mfu": None, "tokens_per_second": 7}) == ["7 tok/s"]
    assert progress_fields({"loss": float("nan")}) == ["loss nan"]
    assert progress_fields({"loss": 0.5, "reward": -0.25}) == ["loss 0.5000", "reward -0.2500"]
    assert progress_fields({"accuracy": 1.0}) == ["accuracy 1.0000"]


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    with Progress(2000, stream=stream) as progress:
        progress.say("[bold]compiling[/bold] step")
        progress.update(100, VALUES, eta_seconds=200)
    assert stream.getvalue() == (
        "[bold]compiling[/bold] step\n"
        "step 100/2000 | loss 2.3457 | 12.3k tok/s | 512 TFLOP/s | MFU 41.2% | mem 1.5 GiB | ETA 3m20s\n"
    )


def test_disabled_prints_nothing():
    stream = io.StringIO()
    with Progress(10, enabled=False, stream=stream) as progress:
        progress.say("a")
        progress.update(1, VALUES)
    assert stream.getvalue() == ""


SCRIPT = """
    from jaxstack.observe.progress import Progress
    with Progress(200) as progress:
        progress.say("saved [checkpoint] 1")
        progress.update(100, {"loss": 2.5, "tokens_per_second": 1000.0}, 65)
        progress.say("saved [checkpoint] 2")
        progress.update(200, {"loss": 1.5, "tokens_per_second": 1000.0}, 0)
    import sys; assert "jax" not in sys.modules
"""


def _run_on_terminal(columns, **environment):
    main, terminal = pty.openpty()
    variables = os.environ | {"COLUMNS": str(columns), "TERM": "xterm-256color"} | environment
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], stdout=terminal, stderr=subprocess.PIPE, env=variables
    )
    os.close(terminal)
    output = b""
    while select.select([main], [], [], 20)[0]:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(main)
    errors = process.communicate()[1]
    assert process.returncode == 0, errors.decode()
    return output.decode()


def test_live_line_on_a_terminal():
    raw = _run_on_terminal(120)
    assert "\x1b[" in raw
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).strip() for line in re.split(r"[\r\n]+", raw)]
    assert "saved [checkpoint] 1" in lines and "saved [checkpoint] 2" in lines
    final = next(line for line in reversed(lines) if line)
    assert final.startswith("step 200/200") and final.endswith("loss 1.5000 | 1k tok/s | ETA 0s")


def test_narrow_terminal_drops_the_last_fields():
    raw = _run_on_terminal(34)
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).strip() for line in re.split(r"[\r\n]+", raw)]
    final = next(line for line in reversed(lines) if line)
    assert "loss 1.5000" in final and "ETA" not in final and len(final) <= 34


def test_the_time_that_is_left_is_dropped_late():
    final = _run_on_terminal(44)
    assert "loss 1.5000 | ETA 0s" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", final) and "starting, 0s" in final


def test_dumb_terminal_gets_plain_lines():
    raw = _run_on_terminal(120, TERM="dumb")
    assert "\x1b" not in raw
    assert "step 200/200 | loss 1.5000 | 1k tok/s | ETA 0s" in raw


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (12345.6, "12.3k"),
        (999, "999"),
        (999.9, "1k"),
        (1_050_000, "1.05M"),
        (0.00321, "0.00321"),
        (3e-7, "3e-7"),
        (-1500, "-1.5k"),
        (2.5e12, "2.5T"),
        (float("inf"), "inf"),
    ],
)
def test_short_numbers(value, text):
    assert short_number(value) == text


def test_durations_and_sizes():
    shown = [duration(seconds) for seconds in (0, 45, 59.6, 200, 7500, 277200)]
    assert shown == ["0s", "45s", "1m00s", "3m20s", "2h05m", "3d05h"]
    shown = [byte_size(count) for count in (0, 512, 1536, 80.25 * 2**30)]
    assert shown == ["0 B", "512 B", "1.5 KiB", "80.2 GiB"]
