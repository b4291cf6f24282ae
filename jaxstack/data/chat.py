"""Tokenizes chats and prompt-completion pairs, and marks the tokens of answers, the only ones to be trained on.

Each is tokenized once, as one text, and cached: its ids, and for each id whether it is part of an answer.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
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

_VERSION = 2
_INDEX = "index.json"
_BATCH = 512
"""Number of chats that are tokenized together, on all cores."""
_ARRAYS = ("ids", "answers", "ends")


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
    hashes: list[str]
    """SHA-256 of each array."""

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


def open_examples(
    source: SourceConfig, chats: Chats, held_out_fraction: float, folder: Path, report: Callable[[str], None]
) -> dict[Split, Examples]:
    """Return the tokenized chats of a source for each split, from the cache in `folder` or tokenized now.

    Args:
      source: chats, or prompts with completions, in jsonl files.
      chats: template and tokenizer.
      held_out_fraction: share of the examples that is held out, chosen by a hash of their content.
      folder: the cache directory.
      report: called with a line of text when something takes time.

    Raises:
      ConfigError: no such file, or a line that is not an example; the message names it.
      JaxstackError: the template refuses a chat, or the cache is damaged.
    """
    files = find_files(source.path)
    identity = [chats.identity, held_out_fraction, *(file.identity() for file in files)]
    place = folder / "chats" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
    if not (place / _INDEX).is_file():
        waiting = "waiting for another process that prepares the chats"
        with writing_to(place.parent), exclusive(place.with_suffix(".lock"), lambda: report(waiting)):
            if not (place / _INDEX).is_file():
                report(f"tokenizing the chats of {source.path}")
                place.mkdir(exist_ok=True)
                records = (r for file in files for r in read_records(Piece("jsonl", file)))
                _write(place, _tokenized(records, chats), held_out_fraction, source.path)
    return _read(place)


def _write(place: Path, examples: Iterator[tuple[float, np.ndarray, np.ndarray]], fraction: float, path: str) -> None:
    parts: dict[Split, list[tuple[np.ndarray, np.ndarray]]] = {"train": [], "held_out": []}
    for score, ids, answers in examples:
        parts["held_out" if score < fraction else "train"].append((ids, answers))
    if not any(parts.values()):
        raise ConfigError(f"{path} contains no chat")
    index = {}
    for split, found in parts.items():
        ids, answers = (np.concatenate([[], *column]) for column in zip(*found, strict=True)) if found else ([], [])
        ends = np.cumsum([len(x) for x, _ in found])
        arrays = np.asarray(ids, np.int32), np.asarray(answers, np.bool_), np.asarray(ends, np.int64)
        index[split] = {}
        for name, array in zip(_ARRAYS, arrays, strict=True):
            content = array.tobytes()
            write_file(place / f"{split}.{name}", content)
            index[split][name] = hashlib.sha256(content).hexdigest()
    write_json(place / _INDEX, index)


def _read(place: Path) -> dict[Split, Examples]:
    index = json.loads((place / _INDEX).read_bytes())
    dtypes = (np.int32, np.bool_, np.int64)
    found = {}
    for split, hashes in index.items():
        arrays = []
        for name, dtype in zip(_ARRAYS, dtypes, strict=True):
            content = (place / f"{split}.{name}").read_bytes()
            if hashlib.sha256(content).hexdigest() != hashes[name]:
                raise JaxstackError(f"{place}/{split}.{name} is damaged: delete {place}; it is made again")
            arrays.append(np.frombuffer(content, dtype))
        found[split] = Examples(*arrays, hashes=list(hashes.values()))
    return found


@dataclass(frozen=True)
class _Text:
    """Text of a chat, with the spans of its answers, its file and line, and the hash that decides if it is held out."""

    text: str
    spans: Sequence[Span]
    where: str
    score: float


def _tokenized(
    records: Iterator[tuple[dict, int, str]], chats: Chats
) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
    """Tokenize records of chats; yield (score for the held-out split, ids [n], answer mask [n]) of each."""
    batch: list[_Text] = []
    reader = _Reader(chats)
    for record, _, where in records:
        batch.append(reader.read(record, where))
        if len(batch) == _BATCH:
            yield from _encoded(batch, chats)
            batch = []
    yield from _encoded(batch, chats)


def _encoded(batch: list[_Text], chats: Chats) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
    tokenizer = chats.tokenizer
    found = tokenizer.encode_marked([example.text for example in batch])
    for example, (ids, places) in zip(batch, found, strict=True):
        answers = _answer_mask(example, places)
        if chats.template is None:
            start = np.array([tokenizer.document_start], np.int32)
            ids = np.concatenate([start, ids, start])
            answers = np.concatenate([[False], answers, [True]])
        yield example.score, ids, answers


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
    """Turns records of chats or prompts into text, with the spans of their answers."""

    def __init__(self, chats: Chats):
        self._chats = chats
        special = chats.tokenizer.special_tokens
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self._ending = _answer_ending(chats)
        """Special token that ends an answer; "" if there is none."""

    def read(self, record: dict, where: str) -> _Text:
        """Return the text of a chat, or of a prompt with its completion, and the spans of the answers in it.

        Raises:
          ConfigError: it is neither a chat nor a prompt with its completion, or its text contains special tokens.
          JaxstackError: the template refuses it.
        """
        score = split_score(json.dumps(record, sort_keys=True).encode())
        template = self._chats.template
        if template is None:
            prompt, completion = _pair(record, where)
            self._check(f"{prompt}\n{completion}", where)
            text = prompt + completion
            return _Text(text, [(len(prompt), len(text))], where, score)
        messages = _messages(record, where)
        self._check(json.dumps([messages, record.get("tools")], ensure_ascii=False), where)
        try:
            text, spans = template.split(messages, record.get("tools"), last=self._chats.config.answers == "last")
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
        if any(bare.endswith(token) for token in self._chats.tokenizer.special_tokens):
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
            raise ConfigError(f"{where}: the content of message {number} must be a text; found {_shown(content)}")
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
