"""The longest sequence within a budget follows from two lengths, and is confirmed by a third."""

import pytest

from benchmarks.distributed.sequence_length import LAYOUTS, MODEL, STEP, longest
from jaxstack.run_config import load_config


def test_the_longest_length_is_within_the_budget():
    def bytes_at(length: int) -> int:
        return 1000 + 3 * length + (50 if length > 5 * STEP else 0)

    known = {length: bytes_at(length) for length in (2 * STEP, 4 * STEP)}
    budget = 1000 + 3 * 6 * STEP
    length, used, per_token = longest(bytes_at, budget, known)
    assert (length, per_token) == (5 * STEP, 3.0), "the compiler's rounding made six steps too large"
    assert used == bytes_at(length) <= budget < bytes_at(length + STEP)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_a_valid_configuration(layout):
    load_config(None, [*MODEL, *LAYOUTS[layout], f"train.sequence_length={STEP}"])
