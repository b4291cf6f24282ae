"""Prompts that the engine refuses before it computes anything."""

import pytest

from jaxstack.decoding.engine import Engine
from jaxstack.errors import ConfigError


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([1.5], "whole numbers; found 1.5"), ("abc", "encode a text"), (b"abc", "encode a text"), (["a"], "found 'a'")],
)
def test_a_prompt_that_is_no_token_ids_is_refused(prompt, message):
    engine = object.__new__(Engine)  # the check comes before all that an engine has but its length
    engine.context = 100
    with pytest.raises(ConfigError, match=message):
        engine.check_prompt(prompt, 1)
