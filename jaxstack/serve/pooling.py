"""Outputs of a model that are no text, in the forms of vLLM's routes /classify and /pooling."""

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import field_validator, model_validator

from jaxstack.serve.protocol import EmbeddingRequest, drop_neutral, encode_vector

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "truncate_prompt_tokens": (None,),
    "add_special_tokens": (True, None),
}
"""Fields of vLLM that are not supported here, with the values that are accepted: those that do nothing."""


class ClassifyRequest(EmbeddingRequest):
    """JSON body of a request to /classify."""

    use_activation: bool | None = None
    """False: scores as they are; otherwise they are mapped to 0 to 1 by the logistic function."""

    @model_validator(mode="before")
    @classmethod
    def _drop_more(cls, fields: object) -> object:
        return drop_neutral(fields, _NEUTRAL, ())


class PoolingRequest(ClassifyRequest):
    """JSON body of a request to /pooling."""

    task: Literal["embed", "classify"] | None = None
    """Result for each text: embed for its embedding, classify for its score. By default the score, if the model has a
    reward head, or else the embedding."""
    use_activation: bool | None = None
    """False: embeddings and scores as they are; otherwise vectors have the length 1, and scores are as of /classify."""

    @field_validator("task", mode="before")
    @classmethod
    def _is_of_whole_texts(cls, task: object) -> object:
        if isinstance(task, str) and task.startswith("token_"):
            raise ValueError(f"{task} asks for values of each token, but a text has one: use embed or classify")
        return task


def classify_body(model: str, scores: Sequence[float], tokens: int) -> dict[str, Any]:
    """Return the response to a request to /classify: the score of each text as that of its only label."""
    data = [{"index": i, "label": "LABEL_0", "probs": [score], "num_classes": 1} for i, score in enumerate(scores)]
    return _body("classify", model, data, tokens)


def pooling_body(model: str, found: Sequence[Any], tokens: int, *, base64: bool) -> dict[str, Any]:
    """Return the response to a request to /pooling.

    Args:
      model: its name.
      found: a vector for each text.
      tokens: number of their tokens.
      base64: write the bytes of the numbers in place of a list.
    """
    data = [
        {"index": i, "object": "pooling", "data": encode_vector(vector, base64=base64)}
        for i, vector in enumerate(found)
    ]
    return _body("pool", model, data, tokens)


def _body(kind: str, model: str, data: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    head = {"id": f"{kind}-{secrets.token_hex(12)}", "object": "list", "created": int(time.time()), "model": model}
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return {**head, "data": data, "usage": usage}
