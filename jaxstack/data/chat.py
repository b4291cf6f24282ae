"""Tokenizes chats and prompt-completion pairs, and marks the tokens of answers, the only ones to be trained on.

Each is tokenized once, as one text, and cached: its ids, and for each id whether it is part of an answer. A preference
is two chats, one after the other: the prompt with the chosen answer, and with the rejected one.
"""

import dataclasses
import datetime
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxstack.data.chat_format import ChatFormat
from jaxstack.data.chat_template import ChatError, ChatTemplate, Span, choose_template
from jaxstack.data.config import ChatConfig, SourceConfig
from jaxstack.data.read_documents import Piece, Split, read_records, split_score
from jaxstack.data.source_files import find_files
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.files import exclusive, write_file, write_json, writing_to

_VERSION = 3
_INDEX = "index.json"
_SIDES = ("chosen", "rejected")
_BATCH = 512
"""Number of chats that are tokenized together, on all cores."""
_ARRAYS = ("ids", "answers", "ends", "margins")
_DTYPES = (np.int32, np.bool_, np.int64, np.float32)


@dataclass(frozen=True)
class Examples:
    """Tokenized chats of one source and split, concatenated into arrays, with a mask of the answer tokens.

    Dimensions: E examples, N tokens.
    """

    ids: np.ndarray
    """[N] int32."""
    answers: np.ndarray
    """[N] bool: True for tokens of answers, which are trained on."""
    ends: np.ndarray
    """[E] int64: position after the last id of each example."""
    margins: np.ndarray
    """[E / 2] float32: `margin` of each preference, 0 without one; [0] for chats."""
    hashes: list[str]
    """SHA-256 of each array."""
    pairs: bool = False
    """True for preferences: examples 2i and 2i + 1 have the chosen and the rejected answer of one prompt."""

    @property
    def tokens(self) -> int:
        """Total number of tokens in all examples, N."""
        return self.ids.size

    def close(self) -> None:
        """Do nothing; exists so that examples can be closed like a stream of token files."""


@dataclass(frozen=True)
class Chats:
    """Settings for encoding chats: tokenizer, chat template (None: prompt-completion pairs) and configuration."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    config: ChatConfig

    @property
    def format(self) -> ChatFormat | None:
        """Chat template and special tokens, to be saved with the tokenizer in the run's directory."""
        if self.template is None:
            return self.tokenizer.chat
        return ChatFormat(self.template.source, self.template.tokens, self.template.named)

    @property
    def warning(self) -> str | None:
        """Warning text if the chat template writes markers that are not special tokens of this tokenizer; else None."""
        written = [] if self.template is None else self.template.written_tokens
        lacking = [text for text in written if text not in self.tokenizer.special_tokens]
        if not lacking:
            return None
        count = max(len(ids) for ids, _ in self.tokenizer.encode_marked(lacking))
        return (
            f"the chat template writes {', '.join(lacking)}, no special tokens of this tokenizer: each takes up to "
            f"{count} tokens, and a text that contains them can pass for another turn"
        )

    @property
    def identity(self) -> str:
        """All settings that determine the token ids of chats, as a string for the cache key."""
        template = self.template and [self.template.source, self.template.tokens, self.template.named]
        return json.dumps([_VERSION, self.tokenizer.hash, template, self.config.answers, self.config.date])


def open_chats(config: ChatConfig, tokenizer: Tokenizer) -> Chats:
    """Return a `Chats`: tokenizer, chat template and configuration, with which a run's chats are encoded.

    Raises:
      ConfigError: the template does not exist.
    """
    if config.template == "none":
        return Chats(tokenizer, None, config)
    date = datetime.date.fromisoformat(config.date)
    return Chats(tokenizer, choose_template(config.template, tokenizer.chat, date), config)


def encode_answer(prompt: str | Sequence[Mapping[str, Any]], answer: str, chats: Chats) -> np.ndarray:
    """Return the ids [n] int32 of a prompt with its answer, as in training, to the token that ends the answer.

    Raises:
      ConfigError: it is no prompt, the answer is empty, or one of them contains special tokens.
      JaxstackError: the template refuses it.
    """
    record = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "completion": answer}
    [example] = _encoded(_Reader(chats).read(record, "the answer"), chats)
    return example.ids[: np.flatnonzero(example.answers)[-1] + 1]


def open_examples(
    source: SourceConfig, chats: Chats, held_out_fraction: float, folder: Path, report: Callable[[str], None]
) -> dict[Split, Examples]:
    """Return the tokenized chats of a source for each split, from the cache in `folder` or tokenized now.

    Args:
      source: chats, prompts with completions, or preferences, in jsonl files.
      chats: template and tokenizer.
      held_out_fraction: share of the examples that is held out, chosen by a hash of their content.
      folder: the cache directory.
      report: called with a line of text when something takes time.

    Raises:
      ConfigError: no such file, or a line that is not an example; the message names it.
      JaxstackError: the template refuses a chat, or the cache is damaged.
    """
    files = find_files(source.path)
    pairs = source.format == "preference"
    identity = [chats.identity, pairs, held_out_fraction, *(file.identity() for file in files)]
    place = folder / "chats" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
    if not (place / _INDEX).is_file():
        waiting = "waiting for another process that prepares the chats"
        with writing_to(place.parent), exclusive(place.with_suffix(".lock"), lambda: report(waiting)):
            if not (place / _INDEX).is_file():
                report(f"tokenizing the chats of {source.path}")
                place.mkdir(exist_ok=True)
                records = (r for file in files for r in read_records(Piece("jsonl", file)))
                _write(place, _tokenized(records, _Reader(chats, pairs)), held_out_fraction, source)
    return _read(place, pairs)


def _write(place: Path, examples: Iterator["_Example"], fraction: float, source: SourceConfig) -> None:
    parts: dict[Split, list[_Example]] = {"train": [], "held_out": []}
    for example in examples:
        parts["held_out" if example.text.score < fraction else "train"].append(example)
    if not any(parts.values()):
        raise ConfigError(f"{source.path} contains no {source.format}")
    index = {}
    for split, found in parts.items():
        ids = np.concatenate([[], *(example.ids for example in found)])
        answers = np.concatenate([[], *(example.answers for example in found)])
        ends = np.cumsum([len(example.ids) for example in found])
        margins = [example.text.margin for example in found if example.text.margin is not None]
        index[split] = {}
        for name, dtype, values in zip(_ARRAYS, _DTYPES, (ids, answers, ends, margins), strict=True):
            content = np.asarray(values, dtype).tobytes()
            write_file(place / f"{split}.{name}", content)
            index[split][name] = hashlib.sha256(content).hexdigest()
    write_json(place / _INDEX, index)


def _read(place: Path, pairs: bool) -> dict[Split, Examples]:
    index = json.loads((place / _INDEX).read_bytes())
    found = {}
    for split, hashes in index.items():
        arrays = []
        for name, dtype in zip(_ARRAYS, _DTYPES, strict=True):
            content = (place / f"{split}.{name}").read_bytes()
            if hashlib.sha256(content).hexdigest() != hashes[name]:
                raise JaxstackError(f"{place}/{split}.{name} is damaged: delete {place}; it is made again")
            arrays.append(np.frombuffer(content, dtype))
        found[split] = Examples(*arrays, hashes=list(hashes.values()), pairs=pairs)
    return found


@dataclass(frozen=True)
class _Text:
    """Text of a chat, with the spans of its answers, its file and line, and the hash that decides if it is held out."""

    text: str
    spans: Sequence[Span]
    where: str
    score: float
    margin: float | None = None
    """Margin of a preference, at its chosen answer; None elsewhere."""


@dataclass(frozen=True)
class _Example:
    """A tokenized chat: its text, ids [n] and answer mask [n]."""

    text: _Text
    ids: np.ndarray
    answers: np.ndarray


def _tokenized(records: Iterator[tuple[dict, int, str]], reader: "_Reader") -> Iterator[_Example]:
    """Tokenize records of chats or preferences, a batch at a time."""
    batch: list[_Text] = []
    for record, _, where in records:
        batch += reader.read(record, where)
        if len(batch) >= _BATCH:
            yield from _encoded(batch, reader.chats)
            batch = []
    yield from _encoded(batch, reader.chats)


def _encoded(batch: list[_Text], chats: Chats) -> Iterator[_Example]:
    tokenizer = chats.tokenizer
    found = tokenizer.encode_marked([example.text for example in batch])
    for example, (ids, places) in zip(batch, found, strict=True):
        answers = _answer_mask(example, places)
        if chats.template is None and example.spans:
            start = np.array([tokenizer.document_start], np.int32)
            ids = np.concatenate([start, ids, start])
            answers = np.concatenate([[False], answers, [True]])
        yield _Example(example, ids, answers)


def _answer_mask(example: _Text, places: np.ndarray) -> np.ndarray:
    """Return a mask [n] of a chat's tokens that belong to an answer.

    Args:
      example: the text and the spans of its answers.
      places: [n, 2] first and last (exclusive) character of each token.

    Raises:
      ConfigError: a token is part of an answer and of the text around it.
    """
    begins = places[:, 0]
    ends = places[:, 1]
    mask = np.zeros(len(places), np.bool_)
    for first, last in example.spans:
        for border in (first, last):
            across = np.flatnonzero((begins < border) & (border < ends))
            if across.size:
                token = example.text[begins[across[0]] : ends[across[0]]]
                raise ConfigError(
                    f"{example.where}: the token {token!r} spans the border between the answer and the text "
                    f"{'before' if border == first else 'after'} it; move white space from the prompt's end to the "
                    "beginning of the answer, or use another template"
                )
        mask |= (begins >= first) & (ends <= last) & (begins < ends)
    return mask


class _Reader:
    """Turns records of chats, prompts or preferences (`pairs`) into texts, with the spans of their answers."""

    def __init__(self, chats: Chats, pairs: bool = False):
        self.chats = chats
        self._pairs = pairs
        special = chats.tokenizer.special_tokens
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self._ending = _answer_ending(chats)
        """Special token that ends an answer; "" if there is none."""

    def read(self, record: dict, where: str) -> list[_Text]:
        """Return the text of a chat, or the two texts of a preference, with the spans of the answers in them.

        Raises:
          ConfigError: it is no chat, prompt with its completion, or preference; or its text contains special tokens.
          JaxstackError: the template refuses it.
        """
        score = split_score(json.dumps(record, sort_keys=True).encode())
        if not self._pairs:
            return [self._text(record, where, score, last=self.chats.config.answers == "last")]
        margin = _margin(record, where)
        least = 1 if "label" in record else 2
        sides = _sides(_as_pair(record, where), where, plain=self.chats.template is None, least=least)
        chosen, rejected = (
            _Text("", [], where, score) if side is None else self._text(side, f"{where}, {name}", score, last=True)
            for side, name in zip(sides, _SIDES, strict=True)
        )
        return [dataclasses.replace(chosen, margin=margin), rejected]

    def _text(self, record: dict, where: str, score: float, *, last: bool) -> _Text:
        """Return the text of a chat, or of a prompt with its completion, and the spans of the answers in it."""
        template = self.chats.template
        if template is None:
            prompt, completion = _pair(record, where)
            self._check(f"{prompt}\n{completion}", where)
            text = prompt + completion
            return _Text(text, [(len(prompt), len(text))], where, score)
        messages = _messages(record, where)
        self._check(json.dumps([messages, record.get("tools")], ensure_ascii=False), where)
        try:
            text, spans = template.split(messages, record.get("tools"), last=last)
        except ChatError as error:
            raise ConfigError(f"{where}: {error}") from None
        return _Text(text, [(first, self._end(text, last)) for first, last in spans], where, score)

    def _check(self, text: str, where: str) -> None:
        found = self._special.search(text) if self._special else None
        if found:
            raise ConfigError(
                f"{where}: its text contains {found[0]!r}, a special token, with which the text could pass for another "
                "turn; leave the line out, or write that differently"
            )

    def _end(self, text: str, end: int) -> int:
        """Return an answer's end position: after its end token, and before any white space that follows that.

        Generation stops at this token, so that it is part of the answer even if the template's marks leave it out.
        """
        bare = text[:end].rstrip()
        if any(bare.endswith(token) for token in self.chats.tokenizer.special_tokens):
            return len(bare)
        after = text[end:].lstrip()
        follows = bool(self._ending) and after.startswith(self._ending)
        return len(text) - len(after) + len(self._ending) if follows else end


def _answer_ending(chats: Chats) -> str:
    special = chats.tokenizer.special_tokens
    try:
        found = "" if chats.template is None else chats.template.find_answer_end(special)
    except ChatError:  # a template that needs more than the example has
        return ""
    return found if found in special else ""


def _pair(record: dict, where: str) -> tuple[str, str]:
    prompt = record.get("prompt")
    completion = record.get("completion")
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ConfigError(
            f"{where}: without a chat template an example has a prompt and a completion, both texts; its keys: "
            f"{_keys(record)}; for messages set data.chat.template"
        )
    if not completion:
        raise ConfigError(f"{where}: the completion is empty, so that there is nothing to learn")
    return prompt, completion


def _as_pair(record: dict, where: str) -> dict:
    """Return a preference with a chosen or a rejected answer, given one with a completion and a label."""
    if "label" not in record:
        return record
    if not isinstance(record["label"], bool) or "completion" not in record:
        raise ConfigError(
            f"{where}: an answer with a label has prompt, completion and a label, true if it is good; found label "
            f"{_shown(record['label'])} and the keys {_keys(record)}"
        )
    side = _SIDES[0 if record["label"] else 1]
    return {
        **{name: x for name, x in record.items() if name not in ("label", "completion")},
        side: record["completion"],
    }


def _sides(record: dict, where: str, *, plain: bool, least: int) -> list[dict | None]:
    """Return a preference as two records: the prompt with the chosen answer, and with the rejected one, or None.

    Args:
      record: the preference.
      where: its file and line.
      plain: there is no chat template, so that all of it must be texts.
      least: fewest answers.

    Raises:
      ConfigError: it is no preference, or an answer is empty.
    """
    prompt = record.get("messages", record.get("prompt"))
    answers = {side: record[side] for side in _SIDES if record.get(side) is not None}
    if prompt is None or len(answers) < least:
        raise ConfigError(
            f"{where}: a preference has a prompt or messages, a chosen and a rejected answer; its keys: {_keys(record)}"
        )
    if plain and not all(isinstance(part, str) for part in (prompt, *answers.values())):
        raise ConfigError(
            f"{where}: without a chat template prompt, chosen and rejected are texts; for messages set "
            "data.chat.template"
        )
    for side, answer in answers.items():
        turns = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
        if (
            not turns
            or not isinstance(turns[-1], dict)
            or not (turns[-1].get("content") or turns[-1].get("tool_calls"))
        ):
            raise ConfigError(f"{where}: the {side} answer is empty, so that there is nothing to compare")
        if not isinstance(turns[0], dict) or turns[0].get("role") != "assistant":
            raise ConfigError(
                f"{where}: {side} is the answer, a text or messages that begin with the role assistant; found "
                f"{_shown(turns[0])}; put the messages before it into prompt"
            )
    tools = record.get("tools")
    return [
        {"prompt": prompt, "completion": answers[side], "tools": tools} if side in answers else None for side in _SIDES
    ]


def _margin(record: dict, where: str) -> float:
    margin = record.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ConfigError(f"{where}: margin is a number; found {_shown(margin)}")
    return float(margin)


def _messages(record: dict, where: str) -> list[dict[str, Any]]:
    """Return a record's messages up to the last answer; prompt and completion become user and assistant messages."""
    if "messages" in record:
        messages = record["messages"]
    elif "prompt" in record and "completion" in record:
        sides = [("user", record["prompt"]), ("assistant", record["completion"])]
        turns = [x if isinstance(x, list) else [{"role": role, "content": x}] for role, x in sides]
        messages = [*turns[0], *turns[1]]
    else:
        raise ConfigError(f"{where} has neither messages nor a prompt and a completion; its keys: {_keys(record)}")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages must be a list of messages; found {_shown(messages)}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{where}: message {number} must have a role and a content; found {_shown(message)}")
        content = message.get("content")
        if not isinstance(content, str | list) and not message.get("tool_calls"):
            found = _shown(content) if "content" in message else f"no content; its keys: {_keys(message)}"
            raise ConfigError(f"{where}: the content of message {number} must be a text; found {found}")
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        roles = ", ".join(sorted({message["role"] for message in messages}))
        raise ConfigError(
            f"{where} has no message of the role assistant, so that there is nothing to learn; roles: {roles}"
        )
    return messages[: answers[-1] + 1]


def _keys(record: dict) -> str:
    return ", ".join(map(repr, record)) or "none"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
