"""Fields that requests of several routes have in common, and the fields of other servers that ask for nothing."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Field

from jaxstack.config.base import Component

IGNORED = ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that are accepted and ignored, because they do not change the answer."""


class Truncation(NamedTuple):
    """Limit on the tokens of a prompt, and the side at which a longer one loses some."""

    most: int
    """Most tokens of the prompt."""
    side: Literal["left", "right"]
    """The end of the prompt that loses tokens: left, its beginning; right, its end."""

    def cut(self, tokens: list[int], opening: int = 0) -> list[int]:
        """Return the tokens that stay, of which the `opening` first ones always do, such as the document start."""
        if self.side == "right" or len(tokens) <= self.most:
            return tokens[: self.most]
        return tokens[:opening] + tokens[len(tokens) - self.most + opening :]


def _check_truncation(count: object) -> object:
    if count is not None and (type(count) is not int or count < -1 or count == 0):
        raise ValueError(f"it must be the number of tokens to keep, or -1: as many as there is room for; found {count}")
    return count


def _check_id(request_id: object) -> object:
    if request_id is not None and not re.fullmatch("[!-~]{1,256}", str(request_id)):
        raise ValueError("it must have 1 to 256 characters of ASCII and no spaces, as it is sent in a header")
    return request_id


RequestId: TypeAlias = Annotated[str | None, BeforeValidator(_check_id)]
"""An id that a client gives its request."""


class PromptRequest(Component):
    """Fields that the requests of all routes with prompts have in common."""

    model: str | None = None
    """Name of the model, as /v1/models gives it."""
    priority: int | None = None
    """Requests with a lower number start first, 0 by default, as vLLM has it."""
    truncate_prompt_tokens: Annotated[int | None, BeforeValidator(_check_truncation)] = None
    """Most tokens of a prompt, the others are left out; -1: as many as there is room for, as vLLM has it."""
    truncation_side: Literal["left", "right"] | None = None
    """The end of a prompt that loses tokens. left, the default for prompts that an answer continues: its beginning;
    right, the default for texts to embed or to score: its end."""
    request_id: RequestId = None
    """Text that the id of the response contains; the header X-Request-Id goes before."""
    cache_salt: str | None = Field(default=None, min_length=1)
    """Prompts share cached prefixes only with those of the same text here, as vLLM has it."""

    def truncation(self, room: int, side: Literal["left", "right"] = "left") -> Truncation | None:
        """Return how a prompt is cut; None: it is not.

        Args:
          room: most tokens that there is room for.
          side: the end of the prompt that loses tokens by default.
        """
        if self.truncate_prompt_tokens is None:
            return None
        most = max(1, room) if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        return Truncation(most, self.truncation_side or side)


def check_prompt(prompt: object) -> object:
    """Check that a prompt is a text, token ids, or a list of either; name the first wrong item only."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise ValueError("it must be a text, a list of token ids, or a list of texts or of lists of token ids")
    if not prompt:
        raise ValueError("it must have at least one text or token id")
    kind = type(prompt[0])
    for place, item in enumerate(prompt):
        ids = item if isinstance(item, list) else ()
        if kind not in (str, int, list) or type(item) is not kind or any(type(token) is not int for token in ids):
            raise ValueError(
                f"it must be a text, token ids (whole numbers), or a list of either; item {place} does not fit"
            )
    return prompt


def as_prompts(prompt: Any) -> Sequence[str | list[int]]:
    """Return the prompts in a value that `check_prompt` has checked, each a text or a list of token ids."""
    return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt


def drop_neutral(
    fields: object,
    neutral: Mapping[str, tuple[object, ...]],
    ignored: Sequence[str],
    reasons: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the fields of a body without those that ask for nothing, such as all that are null.

    Args:
      fields: the body.
      neutral: fields that are not supported, with the values that are accepted.
      ignored: fields that are accepted with any value.
      reasons: why fields are not supported, and the way out; by default the way out is to leave a field out.

    Raises:
      ValueError: it is no JSON object, or has a field that is not supported.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"it must be a JSON object; found a value of type {type(fields).__name__}")
    for name, known in neutral.items():
        if name in fields and not _is_one_of(fields[name], known):
            raise ValueError(f"{name} is not supported; {(reasons or {}).get(name, 'leave it out')}")
    # Clients that write out every field of their types send null for those that are not set.
    return {
        name: value
        for name, value in fields.items()
        if value is not None and name not in neutral and name not in ignored
    }


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """Return True if `value` is one of the `neutral` values, which change nothing; 0 and False differ here."""
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral)
