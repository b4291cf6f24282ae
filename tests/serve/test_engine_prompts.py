"""Prompts that the engine refuses before it computes anything."""

from typing import Any, cast

import pytest

from jaxstack.decoding.request_limits import RequestLimits
from jaxstack.errors import ConfigError


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([1.5], "whole numbers; found 1.5"), ("abc", "encode a text"), (b"abc", "encode a text"), (["a"], "found 'a'")],
)
def test_a_prompt_that_is_no_token_ids_is_refused(prompt, message):
    nothing = cast(Any, None)  # the check comes before all that an engine has but its length
    with pytest.raises(ConfigError, match=message):
        RequestLimits(nothing, nothing, 100, 9).check_prompt(prompt, 1)
