"""Overrides of a trained model's layout: which ones take the place of the layout that suits the devices."""

import pytest

from jaxstack.run.load import sets_layout


@pytest.mark.parametrize(
    ("overrides", "sets"),
    [
        (["parallel.tensor=2"], True),
        (["parallel={tensor: 2}"], True),
        (["parallel.overlap=never"], False),
        (["parallel=auto"], False),
        (["parallel.overlap=never", "parallel.tensor=2"], True),
        (["precision.compute=float32"], False),
    ],
)
def test_only_overlap_leaves_the_choice_of_degrees_to_the_devices(overrides, sets):
    assert sets_layout(overrides) is sets
