"""The section `observe` of a configuration."""

import pytest

from jaxstack.errors import ConfigError
from jaxstack.observe.config import ObserveConfig
from jaxstack.observe.trackers import TRACKERS


def test_defaults():
    config = ObserveConfig()
    assert (config.log_every, config.trackers, config.profile_steps) == (10, ("jsonl", "tensorboard"), None)
    assert config.progress and not config.fail_on_fallback


def test_every_tracker_can_be_chosen():
    assert set(ObserveConfig(trackers=tuple(TRACKERS)).trackers) == set(TRACKERS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"profile_steps": (5, 3)}, "1 <= first <= last"),
        ({"profile_steps": (0, 3)}, "counted from 1"),
        ({"trackers": ("jsonl", "jsonl")}, "twice"),
        ({"trackers": ("json",)}, "tensorboard"),
        ({"log_every": 0}, "greater than or equal to 1"),
        ({"log_every": True}, "valid integer"),
    ],
)
def test_wrong_values_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        ObserveConfig(**values)
