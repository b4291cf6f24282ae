"""Prompts of reinforcement learning: read from jsonl, encoded by the chat template, dealt in a fixed order."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxstack.data.chat_format import ChatError
from jaxstack.data.chat_turns import ChatTurns
from jaxstack.data.config import DataConfig, SourceConfig
from jaxstack.data.fingerprint import list_sources
from jaxstack.data.read_documents import Piece, read_records, split_score
from jaxstack.data.source_files import SourceFile, find_files
from jaxstack.data.streams import choose_tokenizer, import_chat
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.errors import ConfigError

if TYPE_CHECKING:  # it needs the optional dependency jinja2
    from jaxstack.data.chat_template import ChatTemplate

Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt that the model answers.

    Attributes:
      text: a text, or messages with `role` and `content`.
      ids: its token ids, up to where the answer begins.
      columns: the other keys of its record, for rewards.
      score: number in [0, 1) from a hash of the record, which decides if it is held out.
    """

    text: str | Sequence[Mapping[str, Any]]
    ids: tuple[int, ...]
    columns: Mapping[str, Any]
    score: float


class Prompts:
    """The prompts of a run: those to train on in a fixed order, and those that are held out; made by `open_prompts`.

    Args:
      encode: encodes a prompt that is made during the run.
      turns: reads answers and writes what follows them.
      stop_tokens: ids that end an answer.
      train, held_out: the prompts.
      seed: of the order.
      files: path of each source, with its files.
    """

    def __init__(
        self,
        encode: "_Encoder",
        turns: ChatTurns,
        stop_tokens: frozenset[int],
        train: Sequence[Prompt],
        held_out: Sequence[Prompt],
        seed: int,
        files: list[tuple[str, Sequence[SourceFile]]],
    ):
        self.tokenizer = encode.tokenizer
        self.encode = encode
        self.turns = turns
        self.stop_tokens = stop_tokens
        self.train = train
        self.held_out = held_out
        self._seed = seed
        self._files = files

    @property
    def vocab_size(self) -> int:
        """Vocabulary size that the model needs."""
        return self.tokenizer.vocab_size

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(len(prompt.ids) for prompt in (*self.train, *self.held_out))

    def columns(self) -> set[str]:
        """Return the columns that all records have."""
        return functools.reduce(set.intersection, ({*prompt.columns} for prompt in (*self.train, *self.held_out)))

    def deal(self, places: Iterable[int], *, spare: bool = False) -> list[Prompt]:
        """Return the prompts at these places, from 0, of an order in which each epoch goes through all prompts anew.

        `spare` returns those of another order, which may replace them.
        """
        size = len(self.train)
        found = [divmod(place, size) for place in places]
        stream = (1,) if spare else ()
        orders = {epoch: np.random.default_rng((self._seed, epoch, *stream)).permutation(size) for epoch, _ in found}
        return [self.train[orders[epoch][place]] for epoch, place in found]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Description of the prompts as plain JSON, equal if and only if the rollouts have the same."""
        digest = hashlib.sha256()
        for prompt in self.train:
            digest.update(json.dumps([prompt.ids, prompt.columns], sort_keys=True, default=str).encode())
        return {"prompts": len(self.train), "seed": self._seed, "content": digest.hexdigest()[:16]}

    @property
    def source_listing(self) -> list[dict[str, Any]]:
        """The files of the sources, to tell which of them changed."""
        return list_sources(self._files)

    def describe(self) -> str:
        """Return the numbers of prompts as text."""
        return f"{len(self.train):,} training and {len(self.held_out):,} held-out prompts"


def open_prompts(
    config: DataConfig,
    longest: int,
    seed: int,
    stop_tokens: frozenset[int],
    report: Report,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    texts: bool = False,
) -> Prompts:
    """Read and encode the prompts of a run.

    Args:
      config: sources of format `prompt`, tokenizer, chat template, split.
      longest: token limit of a prompt, which leaves room for its answer.
      seed: decides the order.
      stop_tokens: ids that end an answer, in addition to those of the chat template.
      report: called with a line of text when something deserves notice.
      tools: JSON schemas of the tools that answers may call, in place of those of the records.
      texts: messages of the user follow answers.

    Raises:
      ConfigError: a source that cannot be read as configured, a prompt that is too long, no prompt, or a template that
        cannot write tools or further turns.
    """
    everything = (*config.sources, *config.held_out)
    tokenizer = choose_tokenizer(config, everything, [], Path(), report)
    chats = import_chat().open_chats(config.chat, tokenizer)
    tokenizer.chat = chats.format
    if chats.warning is not None:
        report(chats.warning)
    encode = _Encoder(tokenizer, chats.template, tools)
    stop_tokens |= encode.stop_tokens
    turns = ChatTurns(tokenizer, chats.template, stop_tokens, tools, texts=texts)
    limit = _Limit(config.chat.too_long == "drop", longest)
    fraction = 0.0 if config.held_out else config.held_out_fraction
    found = [prompt for source in config.sources for prompt in limit.apply(source, _read(source, encode))]
    train = [prompt for prompt in found if prompt.score >= fraction]
    held_out = [prompt for prompt in found if prompt.score < fraction]
    held_out += [prompt for source in config.held_out for prompt in limit.apply(source, _read(source, encode))]
    if not train:
        raise ConfigError(
            f"no prompt is left to train on ({len(held_out):,} are held out); see data.held_out_fraction."
        )
    files: list[tuple[str, Sequence[SourceFile]]] = [(source.path, find_files(source.path)) for source in everything]
    return Prompts(encode, turns, stop_tokens, train, held_out, seed, files)


class _Encoder:
    """Encodes a prompt, a text or messages, by the chat template if there is one."""

    def __init__(self, tokenizer: Tokenizer, template: "ChatTemplate | None", tools: Sequence[Mapping[str, Any]]):
        self.tokenizer = tokenizer
        self._template = template
        self._tools = list(tools)
        self.stop_tokens = frozenset({tokenizer.document_start})
        """Ids that end an answer."""
        if template is not None:
            end = template.find_answer_end(tokenizer.special_tokens)
            if end not in tokenizer.special_tokens:
                raise ConfigError(
                    f"the chat template ends an answer with {end!r}, which is no special token of the tokenizer, so "
                    "that no token ends an answer; add it to the tokenizer, or give another data.chat.template."
                )
            self.stop_tokens |= {tokenizer.special_tokens[end]}

    def __call__(self, text: Any, tools: Any, where: str) -> tuple[int, ...]:
        """Return the token ids of a prompt, up to where its answer begins.

        Raises:
          ConfigError: it is neither a text nor messages, or contains a special token.
        """
        tokenizer = self.tokenizer
        shown = json.dumps(text, ensure_ascii=False)
        if special := next((token for token in tokenizer.special_tokens if token in shown), None):
            raise ConfigError(
                f"{where}: the prompt contains {special!r}, a special token, with which it could pass for another "
                "turn; leave the line out, or write that differently."
            )
        if self._template is None:
            if not isinstance(text, str):
                raise ConfigError(
                    f"{where}: without a chat template a prompt is a text; for messages set data.chat.template."
                )
            return (tokenizer.document_start, *map(int, tokenizer.encode(text)))
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        try:
            rendered = self._template.render(messages, self._tools or tools, prompt=True)
        except ChatError as error:
            raise ConfigError(f"{where}: {error}") from None
        return tuple(map(int, tokenizer.encode_marked([rendered])[0][0]))


def _read(source: SourceConfig, encode: _Encoder) -> Iterator[Prompt]:
    for file in find_files(source.path):
        for record, _, where in read_records(Piece("jsonl", file)):
            text = record.get("messages", record.get("prompt"))
            if not text or not isinstance(text, str | list):
                keys = ", ".join(map(repr, record)) or "none"
                raise ConfigError(f"{where}: a prompt is a record with a prompt or messages; its keys: {keys}.")
            columns = {name: value for name, value in record.items() if name not in ("prompt", "messages", "tools")}
            score = split_score(json.dumps(record, sort_keys=True).encode())
            yield Prompt(text, encode(text, record.get("tools"), where), columns, score)


@dataclasses.dataclass(frozen=True)
class _Limit:
    """Treatment of prompts that are too long: they are left out, or raise an error."""

    drops: bool
    longest: int

    def apply(self, source: SourceConfig, prompts: Iterator[Prompt]) -> list[Prompt]:
        found = list(prompts)
        long = [prompt for prompt in found if len(prompt.ids) > self.longest]
        if long and not self.drops:
            raise ConfigError(
                f"{len(long):,} of {len(found):,} prompts of {source.path!r} have more than train.sequence_length - "
                f"rollout.max_tokens ({self.longest}) tokens, the longest {max(len(x.ids) for x in long):,}: raise "
                "train.sequence_length, lower rollout.max_tokens, or leave them out with data.chat.too_long=drop."
            )
        return [prompt for prompt in found if len(prompt.ids) <= self.longest]
