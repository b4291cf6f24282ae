"""Hugging Face checkpoints of random models whose tokens are words (w1, w2, ..., or a test's own) or bytes."""

import json
import shutil
import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FIXTURES = Path(__file__).parent / "models" / "huggingface"


def make_word_model(family: str, folder: Path, words: int = 64) -> Path:
    """The fixture of a family in `folder`, with a tokenizer of so many ids."""
    shutil.copytree(FIXTURES / family, folder)
    ids = {"<s>": 0, **{f"w{i}": i for i in range(1, words)}}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_byte_model(family: str, folder: Path) -> Path:
    """The fixture of a family in `folder`, with ids for the document start, ASCII letters and digits, and a space."""
    shutil.copytree(FIXTURES / family, folder)
    ids = {symbol: i for i, symbol in enumerate(["<s>", *string.ascii_letters, *string.digits, "\u0120"])}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_chat_model(folder: Path, words: Sequence[str], **settings: str) -> Path:
    """The fixture of Qwen3 in `folder`, with a tokenizer of these words and of ChatML's marks.

    Args:
      settings: further keys of tokenizer_config.json.
    """
    shutil.copytree(FIXTURES / "qwen3", folder)
    ids = {word: i for i, word in enumerate(["<unk>", "user", "assistant", *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **settings}))
    return folder


def as_words(ids) -> str:
    return " ".join(f"w{i}" for i in ids)
