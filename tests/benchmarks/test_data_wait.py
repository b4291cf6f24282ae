"""The benchmark of slow readers: what it counts as waiting, and what it measures."""

import argparse

import pytest

from benchmarks.training.data_wait import WORKERS, WORKS, cases, wait_fractions


def test_waiting_is_counted_in_all_and_after_the_read_ahead_is_full():
    found = {"waits": [0.0, 4.0, 1.0, 1.0], "asked": [0.0, 1.0, 10.0, 12.0], "end": 20.0, "seconds": 20.0}
    assert wait_fractions(found, 2) == pytest.approx({"wait_fraction": 0.3, "filled_wait_fraction": 0.2})
    assert wait_fractions(found, 4)["filled_wait_fraction"] is None, "no batch is left"


def test_the_brief_form_measures_processes_only_where_python_is_the_slow_part():
    everything = cases(argparse.Namespace(only=None, brief=False))
    assert len(everything) == len(WORKS) * len(WORKERS)
    brief = cases(argparse.Namespace(only=None, brief=True))
    assert {work for work, _ in brief} == set(WORKS)
    assert [one for one in brief if "processes" in one[1]] == [
        ("decoding", "4 processes x 4 threads"), ("heavy decoding", "4 processes x 4 threads")
    ]  # fmt: skip
