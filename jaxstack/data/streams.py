"""Opens the configured data sources, synthetic ones included, as streams of token ids that share one tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxstack.data.build_shards import BuildOptions
from jaxstack.data.config import DataConfig, SourceConfig
from jaxstack.data.prepared_folders import (
    LocalFolder,
    PreparedFolder,
    cache_folder,
    ensure_tokenizer,
    ensure_tokens,
    is_prepared,
    open_folder,
    plan_source,
)
from jaxstack.data.read_documents import Split
from jaxstack.data.seeds import source_seed
from jaxstack.data.shards import INDEX, describe_altered_inputs
from jaxstack.data.source_files import EXTRA, SourceFile, find_files
from jaxstack.data.token_rows import ExampleSet, Stream
from jaxstack.data.tokenization_plan import TokenizationPlan
from jaxstack.data.tokenizer import ByteTokenizer, SyntheticTokenizer, Tokenizer
from jaxstack.errors import ConfigError

TRAIN_TOKENS = 2**31
HELD_OUT_TOKENS = 2**16


class SyntheticStream:
    """Stream of random token ids computed from (seed, position); a `TokenStream` that stores nothing.

    The function is SplitMix64's finaliser (Steele, Lea, Flood 2014) of the position plus a seeded offset.
    """

    def __init__(self, vocab_size: int, document_start: int, seed: int, tokens: int):
        self._choices = vocab_size - 1
        self.document_start = document_start
        self.tokens = tokens
        self._seed = seed
        self._offset = np.uint64(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))

    @property
    def hashes(self) -> list[str]:
        return [f"synthetic-{self._choices}-{self._seed}-{self.tokens}"]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the `count` ids from position `start` on, fewer at the end of the stream, int64."""
        x = np.arange(start, min(start + count, self.tokens), dtype=np.uint64)
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + self._offset
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        ids = ((x ^ (x >> np.uint64(31))) % np.uint64(self._choices)).astype(np.int64)
        return ids + (ids >= self.document_start)

    def close(self) -> None:
        """Do nothing; exists because other token streams have files to close."""


Report = Callable[[str], None]


@dataclass(frozen=True)
class Streams:
    """Opened data sources: the tokenizer, and a training stream and a held-out stream for each source."""

    tokenizer: Tokenizer
    train: list[Stream | ExampleSet]
    held_out: list[Stream | ExampleSet]
    files: list[tuple[str, Sequence[SourceFile]]]
    """Path of each source, the held-out ones last, with its files."""


def open_streams(config: DataConfig, seed: int, options: BuildOptions) -> Streams:
    """Tokenize data sources that are not token shards yet, verify all shards, and open them as streams.

    Raises:
      ConfigError: sources that cannot be read, or that were prepared with different tokenizers.
      JaxstackError: damaged shards; the message names the file.
    """
    if config.prompts:
        raise ConfigError("prompts have no answers to learn; train on them with python -m jaxstack.reinforce.")
    fraction = 0.0 if config.held_out else config.held_out_fraction
    everything = (*config.sources, *config.held_out)
    is_raw = {s: not is_chat(s) and not is_prepared_source(s) and s.path != "synthetic" for s in everything}
    plans = {(s, False): plan_source(s, fraction) for s in config.sources if is_raw[s]}
    plans |= {(s, True): plan_source(s, 1.0) for s in config.held_out if is_raw[s]}
    with_chats = any(map(is_chat, everything))
    folder = cache_folder(config.cache_dir) if plans or with_chats else Path()
    training = [plans[s, False] for s in config.sources if is_raw[s]]
    tokenizer = choose_tokenizer(config, everything, training, folder, options.report)
    opener = _Opener(tokenizer, plans, folder, options, seed, fraction, config.shard_cache)
    if with_chats:
        opener.chats = import_chat().open_chats(config.chat, tokenizer)
        tokenizer.chat = opener.chats.format
        if opener.chats.warning is not None:
            options.report(opener.chats.warning)
    train = [opener.open(s, "train", False, i) for i, s in enumerate(config.sources)]
    if config.held_out:
        held_out = [opener.open(s, "held_out", True, i) for i, s in enumerate(config.held_out)]
    elif fraction:
        held_out = [opener.open(s, "held_out", False, i) for i, s in enumerate(config.sources)]
    else:
        held_out = []
    files = [
        (s.path, opener.files(s, whole))
        for whole in (False, True)
        for s in (config.held_out if whole else config.sources)
    ]
    return Streams(tokenizer, train, [s for s in held_out if s.tokens > 1], files)


def is_chat(source: SourceConfig) -> bool:
    """Return True if a data source consists of chats, of preferences, which are pairs of chats, or of prompts."""
    return source.format in ("chat", "preference", "prompt")


def import_chat():
    """Import the module that tokenizes chats, which needs the optional dependency jinja2.

    Raises:
      ConfigError: jinja2 is not installed; the message has the command that installs it.
    """
    try:
        from jaxstack.data import chat
    except ImportError:
        raise ConfigError(f"reading chats needs jinja2: {EXTRA}") from None
    return chat


def is_prepared_source(source: SourceConfig) -> bool:
    """Return True if a data source is a directory of token shards rather than text.

    Raises:
      ConfigError: its format is tokens, but it is not such a directory.
    """
    if source.format == "tokens" and not is_prepared(source.path):
        raise ConfigError(
            f"the data source {source.path!r} has format tokens, but there is no {INDEX} in it: "
            "write one with python -m jaxstack.prepare"
        )
    return source.format in ("auto", "tokens") and is_prepared(source.path)


def choose_tokenizer(
    config: DataConfig, sources: Sequence[SourceConfig], plans: list[TokenizationPlan], folder: Path, report: Report
) -> Tokenizer:
    """Return the tokenizer that sources share: that of prepared ones, the configured one, or one trained on `plans`.

    Args:
      config: the configuration of the data.
      sources: all sources.
      plans: how raw text among them is read.
      folder: the cache directory, where trained tokenizers are kept.
      report: called with a line that names the tokenizer of prepared sources.

    Raises:
      ConfigError: the tokenizers differ, or there is none.
    """
    wanted = config.tokenizer
    made = [(s.path, open_folder(s.path, None).tokenizer()) for s in sources if is_prepared_source(s)]
    for path, tokenizer in made[1:]:
        if tokenizer.hash != made[0][1].hash:
            raise ConfigError(f"{made[0][0]} and {path} were prepared with different tokenizers: use the same")
    if made and not wanted.path and wanted.name != "byte":
        path, tokenizer = made[0]
        if wanted.name == "bpe" and tokenizer.kind != "bpe":
            raise ConfigError(_mismatch(path, tokenizer, "bpe"))
        report(f"the tokenizer is that of {path}: {tokenizer.kind}, {tokenizer.vocab_size} ids")
        return tokenizer
    if any(map(is_chat, sources)) and not plans and not made and not wanted.path and wanted.name != "byte":
        raise ConfigError(
            "chats need the tokenizer of the model that they train: set run.init_from to a model that has one, or "
            "data.tokenizer.path to a tokenizer.json"
        )
    if not plans and not made and not wanted.path and wanted.name != "byte":
        return SyntheticTokenizer(wanted.vocab_size)
    if not plans and not wanted.path:
        chosen: Tokenizer = ByteTokenizer()
    else:
        chosen = ensure_tokenizer(wanted, plans, folder, report)
    if made and chosen.hash != made[0][1].hash:
        raise ConfigError(_mismatch(made[0][0], made[0][1], wanted.path or wanted.name))
    return chosen


def _mismatch(path: str, tokenizer: Tokenizer, wanted: str) -> str:
    return (
        f"{path} was prepared with a {tokenizer.kind} tokenizer of {tokenizer.vocab_size} ids, the "
        f"configuration asks for {wanted}: set tokenizer.name to auto, or prepare the data again"
    )


@dataclass
class _Opener:
    tokenizer: Tokenizer
    plans: dict[tuple[SourceConfig, bool], TokenizationPlan]
    folder: Path
    options: BuildOptions
    seed: int
    fraction: float
    shard_cache: str | None
    chats: Any = None

    def open(self, source: SourceConfig, split: Split, whole: bool, number: int) -> Stream | ExampleSet:
        """Open the training or held-out stream of one source.

        Args:
          source: the source.
          split: the side.
          whole: use all of the source, which was given as held-out source, even if a prepared directory has no
            held-out side.
          number: number of the source among the training or the held-out sources.
        """
        if source.path == "synthetic":
            tokens = TRAIN_TOKENS if split == "train" else HELD_OUT_TOKENS
            seed = source_seed(self.seed, f"synthetic {split} {number}")
            return SyntheticStream(self.tokenizer.vocab_size, self.tokenizer.document_start, seed, tokens)
        if is_chat(source):
            fraction = 1.0 if whole else self.fraction
            return import_chat().open_examples(source, self.chats, fraction, self.folder, self.options.report)[split]
        place = self._prepared(source, whole)
        index = place.read_index()
        for note in describe_altered_inputs(index) if split == "train" else ():
            self.options.report(f"{source.path}: {note}")
        if whole and not index["splits"]["held_out"]["tokens"]:
            split = "train"
        return place.open_split(split)

    def _prepared(self, source: SourceConfig, whole: bool) -> PreparedFolder:
        """Return the directory of a source's token shards, after tokenizing raw text into the cache if necessary."""
        plan = self.plans.get((source, whole))
        if plan is None:
            return open_folder(source.path, self.shard_cache)
        return LocalFolder(ensure_tokens(plan, self.tokenizer, self.folder, self.options))

    def files(self, source: SourceConfig, whole: bool) -> Sequence[SourceFile]:
        """Return a source's files (for token shards with their SHA-256 as version), for messages about changed data."""
        if source.path == "synthetic":
            return ()
        if is_chat(source):
            return find_files(source.path)
        if (plan := self.plans.get((source, whole))) is not None:
            return plan.files
        place = open_folder(source.path, None)
        index = place.read_index()
        shards = (shard for split in index["splits"].values() for shard in split["shards"])
        width = 2 if index["dtype"] == "uint16" else 4
        return [SourceFile(place.path_of(s["name"]), s["name"], s["tokens"] * width, s["sha256"]) for s in shards]
