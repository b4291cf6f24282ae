"""Subword tokenizers of the `tokenizers` library: byte-level BPE trained here, or any tokenizer.json."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxstack.data.tokenizer import Tokenizer, checked_ids, chunks, replace_lone_surrogates
from jaxstack.errors import JaxstackError


class SubwordTokenizer(Tokenizer):
    """Tokenizer that runs a model of the `tokenizers` library, with a document-start id that no text can produce."""

    def __init__(self, model: Model, kind: str, document_start: int):
        model.encode_special_tokens = True  # "<s>" in a text is encoded as ordinary characters
        model.no_truncation()
        model.no_padding()
        self.kind = kind
        self._model = model
        self.document_start = document_start
        self.vocab_size = max(file_vocab_size(model), document_start + 1)
        self._json = model.to_str()
        self.writes_bytes = is_byte_level(self._json)

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
        known = file_vocab_size(self._model)
        documents = (d[d < known].tolist() for d in np.split(array, cuts))
        return "".join(self._model.decode(d, skip_special_tokens=True) for d in documents).encode()

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        """Bytes that each id stands for, as a list of length V; empty for special and unused ids."""
        added = self._model.get_added_tokens_decoder()
        to_byte = {c: b for b, c in byte_alphabet().items()}
        table = [b""] * self.vocab_size
        for token, i in self._model.get_vocab(with_added_tokens=True).items():
            if i in added:
                table[i] = b"" if added[i].special else added[i].content.encode()
            elif self.writes_bytes and all(c in to_byte for c in token):
                table[i] = bytes(to_byte[c] for c in token)
            else:
                table[i] = token.replace("\u2581", " ").encode()
        table[self.document_start] = b""
        return table

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


def is_byte_level(tokenizer_json: str) -> bool:
    """Return True if each id of this tokenizer.json stands for fixed bytes (GPT-2, Llama 3, Qwen)."""
    decoder = json.loads(tokenizer_json).get("decoder") or {}
    steps = decoder.get("decoders") or [decoder]
    return [s.get("type") for s in steps] == ["ByteLevel"]


def byte_alphabet() -> dict[int, str]:
    """Return a dict from each byte to the printable character that stands for it in byte-level vocabularies.

    Printable Latin-1 bytes stand for themselves; the others, in order, are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}
