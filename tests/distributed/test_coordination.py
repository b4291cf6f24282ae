"""Exchanges between processes: who is named if one does not answer, and whether it was late or has ended."""

import time
from types import SimpleNamespace

import pytest

from jaxstack.distributed import coordination
from jaxstack.errors import JaxstackError


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        (False, r"process 1 of 2, or the first one, has ended before it answered \(facts-\d+\); see its log"),
        (True, r"process 1 of 2 did not answer \(facts-\d+\) within 2 s; see its log"),
    ],
)
def test_a_process_that_does_not_answer_is_named(monkeypatch, waits, words):
    """JAX ends a wait at once when a process is gone, long before its time limit."""

    def get(key: str, milliseconds: int) -> str:
        if key.endswith("/0"):
            return "1"
        time.sleep(milliseconds / 1000 if waits else 0)
        raise RuntimeError("DEADLINE_EXCEEDED or UNAVAILABLE")

    client = SimpleNamespace(blocking_key_value_get=get, key_value_set=lambda *_, **__: None)
    monkeypatch.setattr(coordination, "_client", lambda: client)
    monkeypatch.setattr(coordination, "process_position", lambda: (0, 2))
    with pytest.raises(JaxstackError, match=words):
        coordination.all_gather("facts", 1, timeout_seconds=2)
