"""One process that is asked to stop, once or more often."""

import os
import signal
import threading

import pytest

from jaxstack.resilience import stop_request
from jaxstack.resilience.stop_request import StopRequest


def test_a_signal_that_comes_twice_is_one_request(monkeypatch):
    """`scancel --signal=INT` reaches a process by itself and through its launcher."""
    with StopRequest() as stop:
        assert not stop.reached()
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.reached() and stop.signum == signal.SIGINT
        monkeypatch.setattr(stop_request, "SAME_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.quick
def test_training_in_a_thread_leaves_the_signals_alone():
    """Python refuses a handler there; a notebook or a server may train in a thread."""
    before = signal.getsignal(signal.SIGTERM)
    failed = []

    def enter() -> None:
        try:
            with StopRequest() as stop:
                assert not stop.reached()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not failed and signal.getsignal(signal.SIGTERM) is before
