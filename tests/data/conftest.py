"""A small corpus of many short texts, and a shared cache, for the tests of the data part."""

import random
from pathlib import Path

import pytest

from jaxstack.data.config import DataConfig, SourceConfig, TokenizerConfig

TEXT = "the model reads a token and guesses the next one while attention looks back over every row"
WORDS = TEXT.split()


def write_corpus(folder: Path, documents: int, seed: int = 0) -> list[str]:
    """`documents` text files with a few lines of words; returns their texts in the order of their names."""
    generator = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for i in range(documents):
        lines = [" ".join(generator.choices(WORDS, k=8)) for _ in range(generator.randint(1, 6))]
        texts.append(f"document {i} of {seed}: caf\u00e9\n" + "\n".join(lines) + "\n")
        (folder / f"{i:04d}.txt").write_text(texts[-1], encoding="utf-8")
    return texts


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, 240)
    return folder


@pytest.fixture(scope="session")
def other_corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    write_corpus(folder, 200, seed=1)
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def byte_config(corpus, cache) -> DataConfig:
    return DataConfig(
        sources=(SourceConfig(path=str(corpus)),),
        tokenizer=TokenizerConfig(name="byte"),
        cache_dir=str(cache),
        shard_tokens=10_000,
    )
