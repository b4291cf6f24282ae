"""The configuration of the data: sources, tokenizer, split, packing."""

import datetime
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from jaxstack.config.base import Component
from jaxstack.data.augmentations import AnyTextAugmentation


class TokenizerConfig(Component):
    """Configuration of the tokenizer. Every kind of tokenizer has a document-start id that no text can produce."""

    name: Literal["auto", "byte", "bpe", "file"] = "auto"
    """byte: 256 bytes; bpe: byte-level BPE trained on the training documents; file: a tokenizer.json.
    auto: the tokenizer of a prepared directory among the sources, `file` if a path is given, otherwise bpe."""
    vocab_size: Annotated[int, Field(ge=257, le=2**31 - 1)] = 4096
    """Number of ids of a trained BPE, including the document-start id (and of a synthetic source)."""
    path: str | None = None
    """A tokenizer.json, or a directory with one (name: file)."""
    document_start: str | None = None
    """The special token of a tokenizer.json that opens a document; default: its beginning-of-text token, else its
    end-of-text token, else one id more than the file has."""

    @model_validator(mode="after")
    def _path_belongs_to_file(self):
        if self.name == "file" and not self.path:
            raise ValueError("tokenizer name 'file' needs a path to a tokenizer.json")
        if self.name in ("byte", "bpe") and self.path:
            raise ValueError(
                f"tokenizer path {self.path!r} is only read with name: file, not {self.name}: set it to null"
            )
        return self


class SourceConfig(Component):
    """Configuration of one source of documents: its path, its format, and its weight in the mixture."""

    path: Annotated[str, Field(min_length=1)] = "stdlib"
    """`stdlib`, `synthetic`, a file, a directory, a glob (also with **), a URL, or a directory of prepared shards,
    which may also be a URL."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Share of the rows that comes from this source, relative to the other sources' weights."""
    format: Literal["auto", "text", "jsonl", "parquet", "tokens", "chat", "preference", "prompt"] = "auto"
    """auto decides by the name: .jsonl(.gz|.zst), .parquet, a directory with index.json is tokens, anything else
    text. chat: jsonl with `messages`, or `prompt` and `completion`, of which only the answers are trained on.
    preference: jsonl with `prompt` or `messages`, `chosen` and `rejected`, for `preference.loss`.
    prompt: jsonl with `prompt` or `messages`, and columns for rewards, for `jaxstack.reinforce`."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """The key (jsonl) or column (parquet) of the text."""


class ChatConfig(Component):
    """Configuration of sources of format chat and preference: the chat template, and which answers are trained on."""

    template: str = "auto"
    """auto: the tokenizer's own; chatml, llama3, gemma; a file with a Jinja template; none: plain prompt and
    completion, between document-start ids."""
    answers: Literal["all", "last"] = "all"
    """Answers of a chat that are trained on; of a preference it is always the last."""
    too_long: Literal["truncate", "drop", "refuse"] = "truncate"
    """Treatment of a chat of more than sequence_length tokens: cut its end, leave it out, or an error. Preferences are
    never cut: only drop leaves them out."""
    date: str = "2024-07-26"
    """The date of "today" in templates that write it; fixed, so that a run can be repeated."""

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, date: str) -> str:
        try:
            datetime.date.fromisoformat(date)
        except ValueError:
            raise ValueError(f"must be a day such as 2024-07-26; found {date!r}.") from None
        return date


class DataConfig(Component):
    """Configuration of the data for training and evaluation. The default source is Python's standard library."""

    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1)] = (SourceConfig(),)
    """The training mixture."""
    held_out: tuple[SourceConfig, ...] = ()
    """Sources for evaluation. Empty: a share of the training sources' documents is held out."""
    held_out_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of documents held out, chosen by a hash of their content. Ignored if held_out is given."""
    held_out_max_bytes: Annotated[int, Field(gt=0)] | None = None
    """Approximate limit on the bytes of held-out text that an evaluation reads; default: all of it."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """`byte`, `bpe`, `file`, or `auto`."""
    chat: ChatConfig = ChatConfig()
    """Settings for sources of `format: chat` and `preference`, see [Fine-tuning](finetuning.md#data)."""
    packing: bool = True
    """true: segment ids and positions restart at every document. false: one stream, with attention across documents.
    For chats: several in a row, or one."""
    shuffle: bool = True
    """Read rows in a new pseudo-random order every epoch; false: in the order of the stream."""
    cache_dir: str | None = None
    """Directory of tokens made from raw text; default ~/.cache/jaxstack/data (created with mode 0700)."""
    shard_cache: str | None = None
    """Local directory, such as one on an NVMe disk, into which the shards of remote prepared directories are copied
    while they are read over the network; null: they are always read over the network."""
    shard_tokens: Annotated[int, Field(ge=1024)] = 2**24
    """Tokens per shard file."""
    augmentations: tuple[AnyTextAugmentation, ...] = ()
    """Changes to the rows of training text, applied in this order; see [Data](data.md#augmentation)."""
    read_threads: Annotated[int, Field(ge=1, le=1024)] = 16
    """Threads that read, decode and pack, each a whole batch; in each reading process if there are such."""
    read_processes: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes that read instead of threads of this one; worth it only if decoding and augmentation keep a core
    busy for longer than a step. Each starts for several seconds."""
    read_ahead: Annotated[int, Field(ge=1, le=4096)] = 32
    """Batches that are read before they are needed; a file that stalls for fewer steps than that stops nothing."""

    @model_validator(mode="after")
    def _preferences_are_not_mixed(self):
        formats = {source.format for source in (*self.sources, *self.held_out)}
        found = next((name for name in ("preference", "prompt") if name in formats), None)
        if found is not None and len(formats) > 1:
            others = ", ".join(sorted(formats - {found}))
            raise ValueError(
                f"sources of format {found} are not mixed with others; found also {others}. Give all of "
                f"data.sources and data.held_out the format {found}, or none."
            )
        return self

    @property
    def pairs(self) -> bool:
        """True if the sources are of format preference."""
        return self.sources[0].format == "preference"

    @property
    def prompts(self) -> bool:
        """True if the sources are of format prompt."""
        return self.sources[0].format == "prompt"
