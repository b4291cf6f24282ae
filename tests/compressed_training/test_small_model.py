"""A language model of two layers on real text: training with compressed weights beats compressing afterwards."""

import pytest

from benchmarks.compressed_training import RULES, Base, distil, measure, train_base, train_plainly
from jaxstack.compressed_training.distill import DistillConfig

pytestmark = pytest.mark.exhaustive
STEPS = 120


@pytest.fixture(scope="module")
def base() -> Base:
    return train_base(400)


@pytest.mark.parametrize("work", list(RULES))
def test_training_compressed_beats_compressing_what_was_trained_as_long(base: Base, work: str):
    found = measure(base, work, train_plainly(base, STEPS), STEPS)
    assert found["after"] < found["before"] and found["after"] < found["plain"], found


def test_a_student_beats_one_without_a_teacher_at_equal_tokens(base: Base):
    settings = DistillConfig(alpha=0.5, temperature=2.0)
    assert distil(base, 400, settings, seed=0) < distil(base, 400, None, seed=0)
