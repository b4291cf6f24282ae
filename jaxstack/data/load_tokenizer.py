"""Trains subword tokenizers, and reads tokenizers from what `Tokenizer.save` wrote or from any tokenizer.json."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxstack.data.chat_format import read_chat_format
from jaxstack.data.tokenizer import (
    CONFIG_FILE,
    MODEL_FILE,
    ByteTokenizer,
    SyntheticTokenizer,
    Tokenizer,
    checked_ids,
    chunks,
    replace_lone_surrogates,
)
from jaxstack.errors import ConfigError, JaxstackError, nearest


class SubwordTokenizer(Tokenizer):
    """Tokenizer that runs a model of the `tokenizers` library, with a document-start id that no text can produce."""

    def __init__(self, model: Model, kind: str, document_start: int):
        model.encode_special_tokens = True  # "<s>" in a text is encoded as ordinary characters
        model.no_truncation()
        model.no_padding()
        self.kind = kind
        self._model = model
        self.document_start = document_start
        self._known = file_vocab_size(model)  # which makes a dict of all tokens
        self.vocab_size = max(self._known, document_start + 1)
        self._json = model.to_str()
        self.writes_bytes = is_byte_level(self._json)
        self._falls_back = falls_back_to_bytes(self._json)

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        parts = [chunks(t) if self.writes_bytes else [t] for t in map(replace_lone_surrogates, texts)]
        flat = [p for document in parts for p in document]
        encoded = iter(self._model.encode_batch_fast(flat, add_special_tokens=False))
        result = []
        for document in parts:
            pieces = [np.array(next(encoded).ids, np.int32) for _ in document]
            ids = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            if (ids == self.document_start).any():
                raise JaxstackError(
                    f"the tokenizer turns ordinary text into its document-start id {self.document_start}; "
                    "name another special token with tokenizer.document_start"
                )
            result.append(ids)
        return result

    @cached_property
    def _marked(self) -> Model:
        """Copy of the model for `encode_marked`: special tokens in text become single ids, and offsets are exact.

        The post-processor, which would trim the offsets, is left out.
        """
        model = Model.from_str(json.dumps({**json.loads(self._json), "post_processor": None}))
        model.encode_special_tokens = False
        return model

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        encoded = self._marked.encode_batch([replace_lone_surrogates(text) for text in texts], add_special_tokens=False)
        return [(np.array(e.ids, np.int32), np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encoded]

    @property
    def special_tokens(self) -> dict[str, int]:
        return self._special_tokens

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        return {t.content: i for i, t in self._model.get_added_tokens_decoder().items() if t.special}

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        array = checked_ids(ids, self.vocab_size)
        if self.writes_bytes:
            table = self._token_bytes
            return b"".join([table[i] for i in array])
        cuts = np.flatnonzero(array == self.document_start)
        documents = (d[d < self._known].tolist() for d in np.split(array, cuts))
        return "".join(self._model.decode(d, skip_special_tokens=True) for d in documents).encode()

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        """Bytes that each id represents, as a list of length V; empty for special and unused ids."""
        added = self._model.get_added_tokens_decoder()
        to_byte = {c: b for b, c in byte_alphabet().items()}
        table = [b""] * self.vocab_size
        for token, i in self._model.get_vocab(with_added_tokens=True).items():
            if i in added:
                table[i] = b"" if added[i].special else added[i].content.encode()
            elif self.writes_bytes and all(c in to_byte for c in token):
                table[i] = bytes(to_byte[c] for c in token)
            elif self._falls_back and _FALLBACK.fullmatch(token):
                table[i] = bytes([int(token[3:5], 16)])
            else:
                table[i] = token.replace("\u2581", " ").encode()
        table[self.document_start] = b""
        return table

    def fallback_byte(self, token: int) -> bytes | None:
        return self._fallback_bytes.get(token)

    @cached_property
    def _fallback_bytes(self) -> dict[int, bytes]:
        if not self._falls_back:
            return {}
        known = self._model.get_vocab(with_added_tokens=True)
        return {i: self._token_bytes[i] for token, i in known.items() if _FALLBACK.fullmatch(token)}

    @property
    def byte_lengths(self) -> np.ndarray:
        return self._byte_lengths

    @cached_property
    def _byte_lengths(self) -> np.ndarray:
        return np.array([len(b) for b in self._token_bytes], np.int64)

    def tokenizer_json(self) -> str:
        return self._json


def train_bpe(texts: Iterable[str], vocab_size: int) -> SubwordTokenizer:
    """Train byte-level BPE with at most `vocab_size` ids, including the document-start id, which is the last one.

    Merges as in Sennrich et al. 2016 (arXiv:1508.07909), over bytes as in GPT-2. The same texts in the same order give
    the same merges. A small text gives fewer ids than `vocab_size`.
    """
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    model.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(_training_chunks(texts), trainer)
    return SubwordTokenizer(model, "bpe", model.get_vocab_size())


def _training_chunks(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from chunks(replace_lone_surrogates(text))


def file_vocab_size(model: Model) -> int:
    """Return the vocabulary size of a tokenizer model: its largest id plus one, as ids may be unused."""
    return max(model.get_vocab(with_added_tokens=True).values(), default=-1) + 1


_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")
"""Tokens that represent a byte of a character without a token, in vocabularies with byte fallback (Llama 2, Gemma)."""


def is_byte_level(tokenizer_json: str) -> bool:
    """Return True if each id of this tokenizer.json represents fixed bytes (GPT-2, Llama 3, Qwen)."""
    return _decoder_steps(tokenizer_json) == ["ByteLevel"]


def falls_back_to_bytes(tokenizer_json: str) -> bool:
    """Return True if this tokenizer.json writes characters without a token as bytes `<0xE4>` (Llama 2, Gemma)."""
    return "ByteFallback" in _decoder_steps(tokenizer_json)


def _decoder_steps(tokenizer_json: str) -> list[str]:
    decoder = json.loads(tokenizer_json).get("decoder") or {}
    return [str(step.get("type")) for step in decoder.get("decoders") or [decoder]]


def byte_alphabet() -> dict[int, str]:
    """Return a dict from each byte to the printable character that represents it in byte-level vocabularies.

    Printable Latin-1 bytes represent themselves; the others, in order, are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


DOCUMENT_STARTS = (
    "<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<|beginoftext|>", "[BOS]",
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[CLS]",
)  # fmt: skip


def load_tokenizer(directory: str | os.PathLike) -> Tokenizer:
    """Load a tokenizer from a directory that `Tokenizer.save` wrote, and check its hash.

    Raises:
      JaxstackError: it is missing, unreadable, or does not have the hash that was saved with it.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        description = json.loads(path.read_text())
        tokenizer = _build(Path(directory), description)
    except FileNotFoundError as e:
        raise JaxstackError(f"no tokenizer in {directory}: {e.filename} does not exist; copy it again") from None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise JaxstackError(f"{path} does not describe a tokenizer: {type(e).__name__}: {e}") from None
    tokenizer.chat = read_chat_format(Path(directory))
    if description.get("sha256") != tokenizer.hash:
        raise JaxstackError(
            f"the tokenizer in {directory} is not the one that was saved (SHA-256 {tokenizer.hash[:12]}.., "
            f"expected {str(description.get('sha256'))[:12]}..): restore its files"
        )
    return tokenizer


def _build(folder: Path, description: dict) -> Tokenizer:
    kind = description["kind"]
    if kind == "byte":
        return ByteTokenizer()
    if kind == "synthetic":
        return SyntheticTokenizer(int(description["vocab_size"]))
    if kind in ("bpe", "file"):
        model = _read_model(folder / MODEL_FILE, JaxstackError)
        return SubwordTokenizer(model, kind, int(description["document_start"]))
    raise JaxstackError(f"{folder}: unknown kind of tokenizer {kind!r}")


def read_tokenizer_file(path: str, document_start: str | None = None) -> Tokenizer:
    """Read a tokenizer from a tokenizer.json, a directory with one, or a directory that `Tokenizer.save` wrote.

    Raises:
      ConfigError: no such file, not a tokenizer, or no special token `document_start` in it.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        if (file / CONFIG_FILE).is_file() and document_start is None:
            return load_tokenizer(file)
        file = file / MODEL_FILE
    if not file.is_file():
        folder = file.parent / "tokenizer"
        if folder.is_dir():
            raise ConfigError(
                f"no tokenizer file {file}: {file.parent} keeps its tokenizer in {folder}; give that folder"
            )
        raise ConfigError(f"no tokenizer file {file}: give a tokenizer.json, or name: byte or bpe, which need none")
    model = _read_model(file, ConfigError)
    special = {t.content: i for i, t in model.get_added_tokens_decoder().items() if t.special}
    if document_start is not None and document_start not in special:
        known = nearest(document_start, special) if special else "it has no special tokens"
        raise ConfigError(f"{file} has no special token {document_start!r}; {known}")
    chat = read_chat_format(file.parent)
    # The names that the files themselves give come first; what the name of a token suggests is a guess.
    own = [chat.tokens.get("bos_token"), *DOCUMENT_STARTS, chat.tokens.get("eos_token")]
    names = (document_start,) if document_start else own
    chosen = next((special[n] for n in names if n in special), file_vocab_size(model))
    tokenizer = SubwordTokenizer(model, "file", chosen)
    tokenizer.chat = chat
    return tokenizer


def _read_model(file: Path, error: type[JaxstackError]) -> Model:
    try:
        return Model.from_file(str(file))
    except Exception as e:  # the library raises bare Exception
        raise error(f"{file} is not a tokenizer.json that the tokenizers library reads: {e}") from None
