"""Renamed keys: an error names the new one, and stored configurations are read under the former names."""

import pytest

from jaxstack.config.base import with_new_names
from jaxstack.errors import ConfigError
from jaxstack.run_config import load_config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("islands.every=3", "islands was renamed to local_sgd"),
        ("parallel.islands=2", r"parallel\.islands was renamed to parallel\.workers"),
        ("local_sgd={name: folder, folder: x, count: 2, island: 1}", r"island was renamed to local_sgd\.worker"),
    ],
)
def test_a_former_key_is_refused_with_its_new_name(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [override])


def test_a_stored_configuration_is_read_under_its_former_keys():
    former = {"parallel": {"islands": 2, "data": 1}, "islands": {"name": "folder", "island": 1}, "run": {"name": "x"}}
    assert with_new_names(former) == {
        "parallel": {"data": 1, "workers": 2},
        "local_sgd": {"name": "folder", "worker": 1},
        "run": {"name": "x"},
    }
    assert former["islands"]["island"] == 1
