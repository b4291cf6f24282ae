"""Packing against a slow reference written token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxstack.data.token_rows import make_batch, read_row, row_count

START = 9


class ListStream:
    def __init__(self, ids):
        self._ids = np.array(ids, np.uint16)
        self.tokens = len(ids)
        self.document_start = START
        self.hashes = []

    def read(self, start, count):
        return self._ids[start : start + count]

    def close(self):
        pass


def slow_row(ids, row, length):
    """One row by the definition, with Python lists only."""
    window = ids[row * length : row * length + length + 1]
    tokens = []
    labels = []
    segments = []
    positions = []
    segment = position = 0
    for t in range(length):
        token = window[t] if t < len(window) else START
        opens = token == START or t == 0
        segment, position = (segment + 1, 0) if opens else (segment, position + 1)
        tokens.append(token)
        labels.append(window[t + 1] if t + 1 < len(window) else -100)
        segments.append(segment)
        positions.append(position)
    return tokens, labels, segments, positions


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, START), min_size=2, max_size=60), st.integers(1, 17))
def test_equals_the_slow_reference(ids, length):
    ids = [START, *ids]
    rows = row_count(len(ids), length)
    stream = ListStream(ids)
    batch = make_batch([read_row(stream, r, length, len(ids)) for r in range(rows)], START, packing=True)
    expected = [slow_row(ids, r, length) for r in range(rows)]
    for i, key in enumerate(("tokens", "labels", "segment_ids", "positions")):
        np.testing.assert_array_equal(batch[key], [e[i] for e in expected])
        assert batch[key].dtype == np.int32


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 200), st.integers(1, 33))
def test_every_token_but_the_first_is_predicted_once(count, length):
    ids = [START, *[i % START for i in range(count - 1)]]
    stream = ListStream(ids)
    rows = [read_row(stream, r, length, count) for r in range(row_count(count, length))]
    labels = make_batch(rows, START, packing=False)["labels"].ravel()
    assert labels[labels != -100].tolist() == ids[1:]


def test_without_packing_there_are_no_segments():
    batch = make_batch([np.arange(5)], START, packing=False)
    assert sorted(batch) == ["labels", "tokens"]


def test_a_document_ends_with_the_document_start_label_and_restarts_positions():
    batch = make_batch([np.array([3, START, 1, 2, START, 4])], START, packing=True)
    assert batch["labels"].tolist() == [[START, 1, 2, START, 4]]
    assert batch["segment_ids"].tolist() == [[1, 2, 2, 2, 3]]
    assert batch["positions"].tolist() == [[0, 0, 1, 2, 0]]


@pytest.mark.parametrize(("tokens", "length", "rows"), [(0, 4, 0), (1, 4, 0), (2, 4, 1), (5, 4, 1), (6, 4, 2)])
def test_row_count(tokens, length, rows):
    assert row_count(tokens, length) == rows
