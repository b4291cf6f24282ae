"""Reads tokenizers from directories that `Tokenizer.save` wrote, or from any tokenizer.json file."""

import json
import os
from pathlib import Path

from tokenizers import Tokenizer as Model

from jaxstack.data.chat_format import read_chat_format
from jaxstack.data.subword import SubwordTokenizer, file_vocab_size
from jaxstack.data.tokenizer import CONFIG_FILE, MODEL_FILE, ByteTokenizer, SyntheticTokenizer, Tokenizer
from jaxstack.errors import ConfigError, JaxstackError, nearest

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
        raise ConfigError(f"no tokenizer file {file}: give a tokenizer.json, or name: byte or bpe, which need none")
    model = _read_model(file, ConfigError)
    special = {t.content: i for i, t in model.get_added_tokens_decoder().items() if t.special}
    if document_start is not None and document_start not in special:
        known = nearest(document_start, special) if special else "it has no special tokens"
        raise ConfigError(f"{file} has no special token {document_start!r}; {known}")
    names = (document_start,) if document_start else DOCUMENT_STARTS
    chosen = next((special[n] for n in names if n in special), file_vocab_size(model))
    tokenizer = SubwordTokenizer(model, "file", chosen)
    tokenizer.chat = read_chat_format(file.parent)
    return tokenizer


def _read_model(file: Path, error: type[JaxstackError]) -> Model:
    try:
        return Model.from_file(str(file))
    except Exception as e:  # the library raises bare Exception
        raise error(f"{file} is not a tokenizer.json that the tokenizers library reads: {e}") from None
