"""Tokenizers: bytes, byte-level BPE, any tokenizer.json. Text never produces the document-start id.

Dimensions: V vocabulary. Ids are int32 arrays of one dim.
"""

import hashlib
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
    """Text to ids and back. `document_start` opens a document and, as a label, ends the one before it."""

    kind: str
    vocab_size: int
    """V: every id is below it, the document-start id included."""
    document_start: int
    chat: ChatFormat | None = None
    """How chats are written for it; no part of its hash."""
    writes_bytes = True
    """Whether a token stands for the same bytes wherever it stands, so that texts can be joined token by token."""

    @property
    def dtype(self) -> np.dtype:
        """The little-endian integer type in which shards keep these ids."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32, without a document-start id. Lone surrogates become U+FFFD."""
        return self.encode_documents([text])[0]

    @abstractmethod
    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of many texts at once, on all cores where the implementation can."""

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids [n] of each text, in which special tokens are written out, and the characters [n, 2] that they stand for.

        Raises:
          ConfigError: this kind of tokenizer has no text.
        """
        raise ConfigError(f"a {self.kind} tokenizer cannot write chats; set data.tokenizer.path to a tokenizer.json")

    @property
    def special_tokens(self) -> dict[str, int]:
        """Texts that `encode_marked` takes for one id, with that id."""
        return {}

    @abstractmethod
    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """The bytes that `ids` stand for; document-start and other special ids stand for none."""

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @property
    @abstractmethod
    def byte_lengths(self) -> np.ndarray:
        """[V] int64: the number of bytes that each id stands for (about, where the tokenizer is not
        byte-level).
        """

    @property
    def hash(self) -> str:
        """SHA-256 over everything that decides the ids."""
        digest = hashlib.sha256(json.dumps(self.description(), sort_keys=True).encode())
        digest.update((self.model_json() or "").encode())
        return digest.hexdigest()

    def description(self) -> dict:
        """What `save` writes beside the model."""
        return {
            "format": FORMAT,
            "version": 1,
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "document_start": self.document_start,
        }

    def model_json(self) -> str | None:
        """The text of tokenizer.json, or None where the kind needs none."""
        return None

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the tokenizer so that `load_tokenizer` gives an equal one."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        model = self.model_json()
        if model is not None:
            write_file(folder / MODEL_FILE, model.encode())
        description = {**self.description(), "sha256": self.hash}
        if self.chat is not None:
            write_file(folder / CHAT_CONFIG, self.chat.as_json().encode())
        write_file(folder / CONFIG_FILE, (json.dumps(description, indent=2) + "\n").encode())


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255; id 256 starts a document. Needs no files."""

    kind = "byte"
    vocab_size = 257
    document_start = 256

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(valid_unicode(t).encode(), np.uint8).astype(np.int32) for t in texts]

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        def places(text: str) -> np.ndarray:
            at = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
            return np.stack([at, at + 1], axis=1)

        texts = [valid_unicode(text) for text in texts]
        return [(ids, places(text)) for ids, text in zip(self.encode_documents(texts), texts, strict=True)]

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        array = checked_ids(ids, self.vocab_size)
        return array[array < 256].astype(np.uint8).tobytes()

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        return (np.arange(257) < 256).astype(np.int64)


class SyntheticTokenizer(Tokenizer):
    """The stand-in for random ids, which mean no text: encodes bytes modulo V, decodes to the numbers."""

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

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        return np.array([len(str(i)) + 1 for i in range(self.vocab_size)], np.int64)


def valid_unicode(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 cannot hold, as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    return text


def checked_ids(ids: Iterable[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """`ids` as an array of one dim, refused where one lies outside of the vocabulary."""
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids)).reshape(-1).astype(np.int64)
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        bad = array[(array < 0) | (array >= vocab_size)][0]
        raise JaxstackError(f"token id {bad} is outside of this tokenizer's vocabulary of {vocab_size} ids")
    return array


def chunks(text: str, limit: int = CHUNK_CHARACTERS) -> list[str]:
    """Cuts a long text after line ends (or spaces, or anywhere), so that its parts are encoded side by
    side.
    """
    parts = []
    start = 0
    while len(text) - start > limit:
        cut = text.rfind("\n", start + limit // 2, start + limit) + 1
        cut = cut or text.rfind(" ", start + limit // 2, start + limit) or -1
        cut = cut if cut > start else start + limit
        parts.append(text[start:cut])
        start = cut
    parts.append(text[start:])
    return parts
