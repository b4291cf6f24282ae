"""Log-probabilities and ids of an answer's tokens, in the forms of OpenAI's and vLLM's APIs."""

import codecs
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.scores import TokenScore

_LEAST = -9999.0
"""Log-probability that stands for those below it: JSON has no infinity."""


@dataclasses.dataclass(frozen=True)
class Part:
    """New text of an answer with the tokens that were generated since the last part.

    Attributes:
      text: what the tokens add to the text.
      tokens: their ids, at the end with the stop token if there is one.
      scores: of each of these tokens; None for the first token of a prompt. Empty if the request asks for none.
      echoed: number of the first of these tokens that are the prompt's.
      before: number of the first of these tokens that are not of the text: those of the reasoning, and around it.
      after: number of the last of these tokens that are not of the text: those of calls, and the stop token.
      finish_reason: None until the answer ends.
      calls: tool calls in OpenAI's form, at the end of the answer.
      reasoning: what the tokens add to the reasoning before the text.
    """

    text: str
    tokens: Sequence[int] = ()
    scores: Sequence[TokenScore | None] = ()
    echoed: int = 0
    finish_reason: str | None = None
    calls: Sequence[Mapping[str, Any]] = ()
    reasoning: str = ""
    before: int = 0
    after: int = 0

    def __add__(self, other: "Part") -> "Part":
        tokens = (*self.tokens, *other.tokens)
        scores = (*self.scores, *other.scores)
        text = self.text + other.text
        calls = (*self.calls, *other.calls)
        reasoning = self.reasoning + other.reasoning
        echoed = self.echoed + other.echoed
        before = self.before + other.before
        after = self.after + other.after
        return Part(text, tokens, scores, echoed, other.finish_reason, calls, reasoning, before, after)


class TokenTexts:
    """Text and bytes of single tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._names = {token: name for name, token in tokenizer.special_tokens.items()}
        self._known = dict[int, bytes]()
        self._before = [] if tokenizer.writes_bytes else tokenizer.encode("a").tolist()
        """Tokens after which one is decoded whose text depends on those before it."""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token's text in UTF-8, of which it may have a part only; b"" for a special token."""
        if token not in self._known:
            self._known[token] = self._decode(token)
        return self._known[token]

    def text_of(self, token: int) -> str:
        r"""Return a token's text, or a special token's name; `bytes:\xe2` for bytes that are no text by themselves."""
        found = self.bytes_of(token)
        try:
            return found.decode() or self._names.get(token, "")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _decode(self, token: int) -> bytes:
        tokenizer = self._tokenizer
        if token >= tokenizer.vocab_size or token in self._names:
            return b""
        if tokenizer.writes_bytes:
            return tokenizer.decode_bytes([token])
        before = tokenizer.decode(self._before)
        text = tokenizer.decode([*self._before, token])[len(before) :]
        return tokenizer.fallback_byte(token) or text.encode()


class TokenDetails:
    """Fields of an answer that describe its tokens, part by part; none unless the request asks for them.

    Args:
      texts: the texts of tokens.
      chat: the form of /v1/chat/completions; otherwise that of /v1/completions.
      logprobs: number of likeliest tokens to name for each token of the answer; None: no log-probabilities.
      prompt_logprobs: the same for the prompt.
      ids: name the ids.
      named_by_id: name tokens `token_id:198` in place of their texts beside log-probabilities.
    """

    def __init__(
        self,
        texts: TokenTexts,
        *,
        chat: bool,
        logprobs: int | None,
        prompt_logprobs: int | None,
        ids: bool,
        named_by_id: bool = False,
    ):
        self._texts = texts
        self._name_of = "token_id:{}".format if named_by_id else texts.text_of
        self._chat = chat
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._ids = ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def describe(self, part: Part) -> dict[str, Any]:
        """Return the fields for the tokens of the answer's next part."""
        fields: dict[str, Any] = {"token_ids": list(part.tokens[part.echoed :])} if self._ids else {}
        if self._logprobs is not None:
            pairs = [*zip(part.tokens, part.scores, strict=True)]
            fields["logprobs"] = self._of_chat(pairs) if self._chat else self._of_completion(pairs)
        return fields

    def describe_text(self, part: Part) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens of a part's text, without those of its reasoning and calls."""
        if self._logprobs is None:
            return []
        own = slice(part.before, len(part.tokens) - part.after)
        return self._entries([*zip(part.tokens, part.scores, strict=True)][own])

    def describe_prompt(self, prompt: Sequence[int], scores: Sequence[TokenScore | None]) -> dict[str, Any]:
        """Return the fields for the tokens of a prompt, in vLLM's form; `scores` are those after its first token."""
        fields: dict[str, Any] = {"prompt_token_ids": list(prompt)} if self._ids else {}
        if self._prompt_logprobs is not None:
            pairs = zip(prompt[1:], scores, strict=True)
            fields["prompt_logprobs"] = [None, *(score and self._by_id(token, score) for token, score in pairs)]
        return fields

    def _of_chat(self, pairs: Sequence[tuple[int, TokenScore | None]]) -> dict[str, Any]:
        return {"content": self._entries(pairs), "refusal": None}

    def _entries(self, pairs: Sequence[tuple[int, TokenScore | None]]) -> list[dict[str, Any]]:
        content = []
        for token, score in pairs:
            assert score is not None
            best = [self._entry(other, value) for other, value in score.likeliest]
            content.append({**self._entry(token, score.log_probability), "top_logprobs": best})
        return content

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {
            "token": self._name_of(token),
            "logprob": max(value, _LEAST),
            "bytes": [*(self._texts.bytes_of(token) or self._texts.text_of(token).encode())],
        }

    def _of_completion(self, pairs: Sequence[tuple[int, TokenScore | None]]) -> dict[str, Any]:
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, score in pairs:
            best = score and _alternatives(token, score, self._logprobs)
            found["tokens"].append(self._name_of(token))
            found["token_logprobs"].append(score and max(score.log_probability, _LEAST))
            found["top_logprobs"].append(best and {self._name_of(other): value for other, value in best})
            found["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._texts.bytes_of(token)))
        return found

    def _by_id(self, token: int, score: TokenScore) -> dict[str, Any]:
        entries = {}
        for number, (other, value) in enumerate(_alternatives(token, score, self._prompt_logprobs), 1):
            rank = score.rank if other == token else number
            entries[str(other)] = {"logprob": value, "rank": rank, "decoded_token": self._texts.text_of(other)}
        return entries


def _alternatives(token: int, score: TokenScore, count: int | None) -> list[tuple[int, float]]:
    """Return the `count` likeliest tokens with their log-probabilities, and the token itself if it is none of them."""
    found = [*score.likeliest[:count]]
    if all(token != other for other, _ in found):
        found.append((token, score.log_probability))
    return [(other, max(value, _LEAST)) for other, value in found]
