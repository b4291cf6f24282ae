"""Scores of pairs of texts, and documents ranked by them, in the forms of vLLM's and Jina's APIs."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float
from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from jaxstack.serve.request_fields import PromptRequest, drop_neutral

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "encoding_format": ("float", None),
    "instruction": ("", None),
}
"""Fields of other servers that are not supported here, with the values that are accepted: those that do nothing."""
_IGNORED = ("user",)


@dataclasses.dataclass(frozen=True)
class Classifier:
    """The head of a sequence classifier with one label, such as a reward model, and the form of its texts.

    Attributes:
      weights: map the final hidden state of a text's last token to its score.
      encode: returns the token ids of a pair of texts.
    """

    weights: Float[np.ndarray, " D"]
    encode: Callable[[str, str], list[int]]


def _as_texts(given: object) -> object:
    """Check that it is a text or a list of texts; return the list, and name the first wrong item only."""
    texts = given if isinstance(given, list) else [given]
    if not texts:
        raise ValueError("it must have at least one text")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"it must be a text or a list of texts; item {place} is no text")
    return texts


def _as_documents(given: object) -> object:
    """Check that it is a list of texts, or of objects with a text."""
    if not isinstance(given, list):
        raise ValueError(f"it must be a list of texts; found a value of type {type(given).__name__}")
    return _as_texts([item["text"] if isinstance(item, dict) and item.keys() == {"text"} else item for item in given])


class _PairRequest(PromptRequest):
    """Fields that requests for scores of pairs have in common."""

    use_activation: bool | None = None
    """False: scores of a sequence classifier as they are; otherwise they are mapped to 0 to 1 by the logistic function.
    Cosines of embeddings are always as they are."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        return drop_neutral(fields, _NEUTRAL, _IGNORED)


class ScoreRequest(_PairRequest):
    """JSON body of a request to /v1/score."""

    text_1: Annotated[
        list[str],
        BeforeValidator(_as_texts),
        Field(validation_alias=AliasChoices("text_1", "queries", "data_1")),
    ]
    """The first text of each pair, or one for all; also `queries` or `data_1`."""
    text_2: Annotated[
        list[str],
        BeforeValidator(_as_texts),
        Field(validation_alias=AliasChoices("text_2", "documents", "data_2")),
    ]
    """The second text of each pair; also `documents` or `data_2`."""

    @model_validator(mode="after")
    def _texts_are_pairs(self) -> "ScoreRequest":
        if len(self.text_1) not in (1, len(self.text_2)):
            raise ValueError(
                f"text_1 must be one text, or as many as text_2; found {len(self.text_1)} and {len(self.text_2)}"
            )
        return self


class RerankRequest(_PairRequest):
    """JSON body of a request to /v1/rerank."""

    query: str
    """The text that documents are compared with."""
    documents: Annotated[list[str], BeforeValidator(_as_documents)]
    """Texts, or objects with a `text`."""
    top_n: int | None = Field(default=None, ge=0)
    """Number of documents to return, the best first; null or 0: all."""
    return_documents: bool | None = None
    """False: return their numbers and scores only."""


def cosines(first: Sequence[Float[np.ndarray, " D"]], second: Sequence[Float[np.ndarray, " D"]]) -> list[float]:
    """Return the cosine of each pair of vectors of length 1; a single first one is paired with all second ones."""
    return (np.stack(first) * np.stack(second)).sum(-1).tolist()


def classify(
    classifier: Classifier, states: Sequence[Float[np.ndarray, " D"]], use_activation: bool | None
) -> list[float]:
    """Return the scores of texts, given the final hidden state of the last token of each."""
    scores = np.stack(states) @ classifier.weights
    return (scores if use_activation is False else 0.5 * (1 + np.tanh(scores / 2))).tolist()


def score_body(model: str, request_id: str, scores: Sequence[float], tokens: int) -> dict[str, Any]:
    """Return the response to a request for scores: one of each pair, and the number of their tokens."""
    data = [{"index": number, "object": "score", "score": score} for number, score in enumerate(scores)]
    head = {"id": f"score-{request_id}", "object": "list", "created": int(time.time()), "model": model}
    return {**head, "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def rerank_body(
    model: str, request_id: str, request: RerankRequest, scores: Sequence[float], tokens: int
) -> dict[str, Any]:
    """Return the response to a request to rank documents: the best first, with their scores."""
    order = sorted(range(len(scores)), key=lambda number: -scores[number])[: request.top_n or None]
    results = [
        {"index": number, "relevance_score": scores[number]}
        | ({} if request.return_documents is False else {"document": {"text": request.documents[number]}})
        for number in order
    ]
    head = {"id": f"rerank-{request_id}", "model": model}
    return {**head, "results": results, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
