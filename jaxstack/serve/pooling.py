"""Outputs of a model that are no text: OpenAI's embeddings, and vLLM's routes /classify and /pooling."""

import time
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float
from pydantic import BeforeValidator, field_validator, model_validator

from jaxstack.serve.request_fields import IGNORED, PromptRequest, as_prompts, check_prompt, drop_neutral

_NEUTRAL: dict[str, tuple[object, ...]] = {"add_special_tokens": (True, None)}
"""Fields of vLLM that are not supported here, with the values that are accepted: those that do nothing."""


class EmbeddingRequest(PromptRequest):
    """JSON body of a request to /v1/embeddings."""

    input: Annotated[Any, BeforeValidator(check_prompt)]
    """A text or its token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or the bytes of little-endian float32 in Base64."""
    dimensions: int | None = None
    """Only the model's hidden size."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        return drop_neutral(fields, {}, IGNORED)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The texts of the request, each a text or a list of token ids."""
        return as_prompts(self.input)


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


def encode_vector(vector: Float[np.ndarray, " D"], *, base64: bool) -> str | list[float]:
    """Return a vector for JSON: its numbers, or their bytes as little-endian float32 in Base64."""
    return b64encode(vector.astype("<f4").tobytes()).decode() if base64 else vector.tolist()


def embedding_body(
    model: str, vectors: Sequence[Float[np.ndarray, " D"]], tokens: int, *, base64: bool
) -> dict[str, Any]:
    """Return the response to a request for embeddings: a vector for each text, and the number of their tokens."""
    written = [encode_vector(vector, base64=base64) for vector in vectors]
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(written)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def classify_body(model: str, request_id: str, scores: Sequence[float], tokens: int) -> dict[str, Any]:
    """Return the response to a request to /classify: the score of each text as that of its only label."""
    data = [{"index": i, "label": "LABEL_0", "probs": [score], "num_classes": 1} for i, score in enumerate(scores)]
    return _body(f"classify-{request_id}", model, data, tokens)


def pooling_body(model: str, request_id: str, found: Sequence[Any], tokens: int, *, base64: bool) -> dict[str, Any]:
    """Return the response to a request to /pooling.

    Args:
      model: its name.
      request_id: id of the request.
      found: a vector for each text.
      tokens: number of their tokens.
      base64: write the bytes of the numbers in place of a list.
    """
    data = [
        {"index": i, "object": "pooling", "data": encode_vector(vector, base64=base64)}
        for i, vector in enumerate(found)
    ]
    return _body(f"pool-{request_id}", model, data, tokens)


def _body(name: str, model: str, data: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return {**head, "data": data, "usage": usage}
