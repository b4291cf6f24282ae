"""Layers are dealt to stages so that none is lost, in the model's order along the virtual stages."""

import numpy as np
import pytest

from jaxstack.errors import ConfigError
from jaxstack.parallel.pipeline.plan import StageLayout


@pytest.mark.parametrize("groups", [2, 3, 5, 7, 8, 13, 32])
@pytest.mark.parametrize("stages, chunks", [(2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (4, 2), (6, 1)])
def test_every_group_has_one_place_and_virtual_stages_follow_one_another(groups, stages, chunks):
    if groups < stages * chunks:
        with pytest.raises(ConfigError, match=rf"must not exceed the {groups} equal groups"):
            StageLayout(groups, stages, chunks)
        return
    layout = StageLayout(groups, stages, chunks)
    order = layout.order.reshape(stages, chunks, layout.most_groups)
    walked = [g for chunk in range(chunks) for stage in range(stages) for g in order[stage, chunk] if g >= 0]
    assert walked == list(range(groups))
    np.testing.assert_array_equal(layout.order.reshape(-1)[layout.places], np.arange(groups))
    np.testing.assert_array_equal((order >= 0).sum(-1), layout.counts)
    assert layout.counts.max() - layout.counts.min() == (0 if layout.is_even else 1)
    assert layout.is_canonical == (layout.is_even and chunks == 1)


def test_the_first_stages_take_what_is_left_over():
    assert StageLayout(13, 4).counts.tolist() == [[4], [3], [3], [3]]
    assert StageLayout(5, 2, 2).order.tolist() == [[0, 1, 3, -1], [2, -1, 4, -1]]
