"""Reasons for which a test may be skipped where everything has to run: `python -m pytest --strict-skips`.

A reason that matches none of the allowed ones fails the session, so that nothing is left out in silence.
"""

import collections
import re

import pytest

TIME_IS_OVER = "the time of --stop-after is over"

ALLOWED = {
    TIME_IS_OVER: (
        "Exhaustive tests repeat at more cases what others show; `.ci/run` gives them what is left of its time."
    ),
    "our Hopper kernels need jax 0.11|refuses every call there|is refused there|XLA of jax 0.10 copies them": (
        "Python 3.11 has jax 0.10 at most; the main part, on Python 3.12, runs these tests."
    ),
    "has what the kernels need": "The counterpart: what is said where jax is too old; the part on Python 3.11 runs it.",
    "mutual TLS needs jax 0.11.2": "Python 3.11 has jax 0.10 at most; the main part runs these tests.",
    "could not import 'torch'": (
        "PyTorch's wheels for Python 3.12 bring CUDA, 3 GB; the part on Python 3.11 has it, and runs these tests."
    ),
    "could not import 'onnx": (
        "ONNX Runtime has no wheel for every new Python; the graph's tests run where it and the extra export are."
    ),
    "could not import 'anthropic'": "Another vendor's client; the route is tested without it too.",
    "no chromium installed": "A browser is no Python package; the pages' text is tested without it.",
    "no iverilog installed": "A simulator is no Python package; the circuit is evaluated in Python too.",
    "no curl installed": "The quick start of docs/serving.md asks with curl; tests of the routes ask without it.",
    "mounting a tmpfs needs root": "The outer machine decides who runs the tests.",
    "namespaces are not available here": "So too for containers; the sandbox's other isolation is attacked everywhere.",
    "--full|one process is tested in": "Faults at full length take an hour: `pytest tests/reliability --full`.",
    "needs (an NVIDIA GPU|two GPUs|a Hopper GPU|Hopper GPUs)": "`python -m pytest -m gpu` runs these on GPUs.",
}
"""Regular expression of a reason -> why a test may be skipped for it."""


class SkipReasons:
    """Pytest plugin that collects why tests were skipped, and with `--strict-skips` fails on a reason not allowed."""

    def __init__(self, config: pytest.Config):
        self.strict = config.getoption("--strict-skips")
        self.skipped: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.strict and self._not_allowed() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.strict:
            return
        refused = self._not_allowed()
        for reason, tests in sorted(self.skipped.items()):
            word = "NOT ALLOWED, see tests/skips.py" if reason in refused else "allowed"
            terminalreporter.write_line(f"skipped {len(tests)} ({word}): {reason}")
            for module, count in sorted(collections.Counter(test.split("::")[0] for test in tests).items()):
                terminalreporter.write_line(f"    {count} in {module}")

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid)

    def _not_allowed(self) -> list[str]:
        return [reason for reason in self.skipped if not any(re.match(allowed, reason) for allowed in ALLOWED)]
