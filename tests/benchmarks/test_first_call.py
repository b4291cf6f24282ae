"""The measurement of first calls: what a work means, and that the parts add up."""

import pytest

from benchmarks.attention import first_call


def test_a_work_is_parsed_or_refused_with_an_example():
    assert first_call.parse("2 x 5000, heads 32/8 x 128") == (2, 5000, 32, 8, 128)
    with pytest.raises(SystemExit, match="written like '2 x 5000, heads 32/8 x 128'; found '2 x 5000'"):
        first_call.parse("2 x 5000")


def test_of_several_starts_the_fastest_counts(monkeypatch):
    seconds = iter((3.0, 2.0, 5.0, 4.0))
    monkeypatch.setattr(
        first_call, "start", lambda *_: {"device": "NVIDIA H200, absent", "first_call_cpu_seconds": next(seconds)}
    )
    rows = first_call.measure("1 x 256, heads 2/1 x 64", "label", 2, 1.0)
    assert [(row["variant"], row["first_call_cpu_seconds"], row["starts"]) for row in rows] == [
        ("forward, label", 2.0, 2),
        ("forward and backward, label", 4.0, 2),
    ]


def test_the_clock_counts_from_its_last_reading():
    clock = first_call.Clock()
    own, children, wall = clock.read()
    assert own >= 0 and children == 0 and wall >= 0
