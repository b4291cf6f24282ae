"""Hugging Face checkpoints of random models whose tokens are words: w1, w2, ..., with <s> before a text."""

import shutil
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

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


def as_words(ids) -> str:
    return " ".join(f"w{i}" for i in ids)
