import pytest
from pydantic import ValidationError

from jaxstack.checkpoint.config import CheckpointConfig


def test_async_is_the_name_on_both_sides():
    config = CheckpointConfig.model_validate({"async": False, "every_steps": 10})
    assert config.asynchronous is False
    assert config.model_dump()["async"] is False
    assert CheckpointConfig.model_validate(config.model_dump()) == config
    assert "async" in CheckpointConfig.model_json_schema()["properties"]


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"every_steps": 0}, {"keep_every_steps": 0}, {"kep": 3}])
def test_refuses_what_makes_no_sense(wrong):
    with pytest.raises(ValidationError):
        CheckpointConfig.model_validate(wrong)
