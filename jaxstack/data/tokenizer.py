"""Tokenizers: bytes, byte-level BPE, any tokenizer.json. No text produces the document-start id.

Dimensions: V vocabulary. Ids are int32 arrays with one dim.
"""

import hashlib
import itertools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxstack.data.chat_format import CONFIG as CHAT_CONFIG
from jaxstack.data.chat_format import ChatFormat
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.files import write_file

FORMAT = "jaxstack-tokenizer"
CONFIG_FILE = "jaxstack_tokenizer.json"
MODEL_FILE = "tokenizer.json"
CHUNK_CHARACTERS = 2**17


class Tokenizer(ABC):
    """Converts text to token ids and back. The id `document_start` opens a document; no text produces it.

    As a label, `document_start` ends the document before it.
    """

    kind: str
    vocab_size: int
    """V: all ids are below it, including the document-start id."""
    document_start: int
    chat: ChatFormat | None = None
    """The chat template and its special tokens; not part of the tokenizer's hash."""
    writes_bytes = True
    """True if an id represents the same bytes in every context, so that texts can be joined id by id."""

    @property
    def dtype(self) -> np.dtype:
        """Little-endian integer type in which shard files store the ids."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, int32, without a document-start id. Lone surrogates become U+FFFD."""
        return self.encode_documents([text])[0]

    @abstractmethod
    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32, as `encode` does, using all cores if the implementation can."""

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encode texts that contain special tokens such as `<|im_end|>`, which become one id each.

        Returns:
          The ids [n] of each text, and [n, 2], the first and last (exclusive) character of each id.

        Raises:
          ConfigError: this kind of tokenizer has no special tokens in text.
        """
        raise ConfigError(f"a {self.kind} tokenizer cannot write chats; set data.tokenizer.path to a tokenizer.json")

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens that `encode_marked` recognizes in text, with their ids."""
        return {}

    @abstractmethod
    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """Return the bytes that `ids` represent; document-start and other special ids represent none."""

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_marked(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` with the special tokens that `encode_marked` recognizes."""
        marks = {i: text for text, i in self.special_tokens.items()}
        parts = itertools.groupby(ids, marks.get)
        return "".join(self.decode(part) if mark is None else mark * len([*part]) for mark, part in parts)

    def fallback_byte(self, token: int) -> bytes | None:
        """Return the byte that an id of a byte-fallback vocabulary represents; None for every other id."""
        del token
        return None

    @property
    @abstractmethod
    def byte_lengths(self) -> np.ndarray:
        """Number of bytes that each id represents, [V] int64; approximate if the tokenizer is not byte-level."""

    @property
    def hash(self) -> str:
        """SHA-256 of everything that determines how this tokenizer maps text to ids."""
        digest = hashlib.sha256(json.dumps(self.description(), sort_keys=True).encode())
        digest.update((self.tokenizer_json() or "").encode())
        return digest.hexdigest()

    def description(self) -> dict:
        """Return the tokenizer's kind and sizes as plain JSON, which `save` writes next to the model."""
        return {
            "format": FORMAT,
            "version": 1,
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "document_start": self.document_start,
        }

    def tokenizer_json(self) -> str | None:
        """Return the content of tokenizer.json; None if this kind of tokenizer needs none."""
        return None

    def save(self, directory: str | os.PathLike) -> None:
        """Write the tokenizer to a directory, from which `load_tokenizer` returns an equal one."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        model = self.tokenizer_json()
        if model is not None:
            write_file(folder / MODEL_FILE, model.encode())
        description = {**self.description(), "sha256": self.hash}
        if self.chat is not None:
            write_file(folder / CHAT_CONFIG, self.chat.as_json().encode())
        write_file(folder / CONFIG_FILE, (json.dumps(description, indent=2) + "\n").encode())


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255; id 256 opens a document. Needs no files."""

    kind = "byte"
    vocab_size = 257
    document_start = 256

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(replace_lone_surrogates(t).encode(), np.uint8).astype(np.int32) for t in texts]

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        def places(text: str) -> np.ndarray:
            at = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
            return np.stack([at, at + 1], axis=1)

        texts = [replace_lone_surrogates(text) for text in texts]
        return [(ids, places(text)) for ids, text in zip(self.encode_documents(texts), texts, strict=True)]

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        array = checked_ids(ids, self.vocab_size)
        return array[array < 256].astype(np.uint8).tobytes()

    @property
    def byte_lengths(self) -> np.ndarray:
        return self._byte_lengths

    @cached_property
    def _byte_lengths(self) -> np.ndarray:
        return (np.arange(257) < 256).astype(np.int64)


class SyntheticTokenizer(Tokenizer):
    """Placeholder tokenizer for random token ids in benchmarks: encodes bytes modulo V, decodes ids to numbers."""

    kind = "synthetic"
    writes_bytes = False

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.document_start = vocab_size - 1

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        raw = ByteTokenizer().encode_documents(texts)
        return [ids % self.document_start for ids in raw]

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        array = checked_ids(ids, self.vocab_size)
        return " ".join(map(str, array[array != self.document_start])).encode()

    @property
    def byte_lengths(self) -> np.ndarray:
        return self._byte_lengths

    @cached_property
    def _byte_lengths(self) -> np.ndarray:
        return np.array([len(str(i)) + 1 for i in range(self.vocab_size)], np.int64)


def replace_lone_surrogates(text: str) -> str:
    """Return `text` with U+FFFD in place of lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    return text


def checked_ids(ids: Iterable[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Convert token ids to an int64 array with one dim, and check that all are in the vocabulary.

    Raises:
      JaxstackError: an id is outside of the vocabulary.
    """
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids)).reshape(-1).astype(np.int64)
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        bad = array[(array < 0) | (array >= vocab_size)][0]
        raise JaxstackError(f"token id {bad} is outside of this tokenizer's vocabulary of {vocab_size} ids")
    return array


def chunks(text: str) -> list[str]:
    """Cut a long text into pieces, preferably at line ends, that can be tokenized in parallel."""
    parts = []
    start = 0
    while len(text) - start > CHUNK_CHARACTERS:
        half = start + CHUNK_CHARACTERS // 2
        end = start + CHUNK_CHARACTERS
        cut = text.rfind("\n", half, end) + 1
        cut = cut or text.rfind(" ", half, end) or -1
        cut = cut if cut > start else end
        parts.append(text[start:cut])
        start = cut
    parts.append(text[start:])
    return parts
