"""Request types of vLLM's routes /tokenize and /detokenize: texts and chats as the token ids of a prompt, and back."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from jaxstack.config.base import Component
from jaxstack.config.loader import build_component
from jaxstack.serve.chat_request import ChatRequest, Message
from jaxstack.serve.request_fields import drop_neutral
from jaxstack.serve.tools import Tool

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "chat_template": (None,),
    "mm_processor_kwargs": (None,),
}
"""Fields of vLLM that are not supported here, with the values that are accepted: those that do nothing."""
_OF_CHATS = ("tools", "reasoning_effort", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""Fields beside `messages` that a chat may have."""


class TokenizeRequest(Component):
    """JSON body of a request to /tokenize: a text, or a chat with the fields of the chat route."""

    model: str | None = None
    """Name of the model, as /v1/models gives it."""
    prompt: str | None = None
    """A text."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)] | None = None
    """A chat, in place of a text."""
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    """Tools of the chat."""
    reasoning_effort: str | None = None
    """Effort of the reasoning, as in a request to the chat route."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    add_generation_prompt: bool | None = None
    """False: the prompt ends after the last message, as in a request to the chat route."""
    continue_final_message: bool | None = None
    """The answer continues the last message, as in a request to the chat route."""
    add_special_tokens: bool | None = None
    """False: leave out the document start before the text, which /v1/completions puts there (`server.document_start`).
    Only for texts: the chat template writes what opens a chat."""
    return_token_strs: bool | None = None
    """Return the text of each token too."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        return drop_neutral(fields, _NEUTRAL, ())

    @model_validator(mode="after")
    def _is_a_text_or_a_chat(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a text as prompt, or a chat as messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens is for a prompt: the chat template writes what opens a chat")
        of_chat = next((name for name in _OF_CHATS if getattr(self, name) is not None), None)
        if self.messages is None and of_chat is not None:
            raise ValueError(f"{of_chat} is for a chat: give messages in place of a prompt")
        return self

    @property
    def as_chat_request(self) -> ChatRequest:
        """The chat as a request to the chat route.

        Raises:
          ConfigError: a field is wrong.
        """
        fields = self.model_dump(include={"messages", *_OF_CHATS}, exclude_none=True)
        return build_component(ChatRequest, fields, "the request")


class DetokenizeRequest(Component):
    """JSON body of a request to /detokenize."""

    model: str | None = None
    """Name of the model, as /v1/models gives it."""
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
    """Token ids."""


def tokenize_body(tokens: list[int], context: int, texts: list[str] | None) -> dict[str, Any]:
    """Return the response to a request to tokenize: ids, their number, the context, and the tokens' texts if asked."""
    return {"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": texts}
