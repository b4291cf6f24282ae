"""Checks between processes before a run: what differs is told by its key, with both values."""

import pytest

from jaxstack.distributed import coordination
from jaxstack.errors import ConfigError
from jaxstack.resilience import preflight


def test_the_key_that_differs_is_told(monkeypatch):
    """Of the first process with another configuration, three of four being the same."""
    own = {"optimizer": {"learning_rate": 0.01}, "run": {"name": "a"}}
    other = {"optimizer": {"learning_rate": 0.02}, "run": {"name": "a"}}

    def all_gather(name, value, timeout_seconds):
        if name == "settings":
            return [own, own, other, own]
        return [value, value, {**value, "configuration": "another"}, value]

    monkeypatch.setattr(coordination, "barrier", lambda *_: None)
    monkeypatch.setattr(coordination, "all_gather", all_gather)
    monkeypatch.setattr(coordination, "is_first", lambda: False)
    with pytest.raises(ConfigError, match="the processes of the run differ") as refused:
        preflight.check_program(own)
    assert "optimizer.learning_rate is 0.01 on process 0 and 0.02 on process 2" in str(refused.value)
