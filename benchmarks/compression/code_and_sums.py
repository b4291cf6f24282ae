"""Text and questions of compressed_models.py: source code of the installed packages, and sums of numbers.

The model trains on both. Two kinds of questions have one right answer each, and are asked of text that training never
sees: a name in source code that occurred before (cloze), and the sum of two numbers.
"""

import hashlib
import json
import keyword
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.sources import ROOT

CODE = "code.jsonl"
SUMS = "sums.jsonl"
HELD_OUT = "held_out.jsonl"
QUESTIONS = "questions.json"
HELD_OUT_SHARE = 0.02
"""Of the files of source code."""
CONTEXT = 600
"""Characters of source code before a name that is asked for."""
SHOTS = 8
"""Solved sums before the one that is asked for."""
_NAME = re.compile(r"(?<!\w)[A-Za-z_]\w{3,}(?!\w)")
_DIGITS = (1, 2, 3)
_SUMS_OF_A_DOCUMENT = 32
_LONGEST = 200_000
"""Characters of a file; longer ones are mostly tables."""


class Question(NamedTuple):
    """A question: the text so far, and the only right continuation."""

    context: str
    answer: str


def write_work(folder: Path, megabytes: float, questions: int, sums: int) -> None:
    """Write the training text, the held-out text and the questions into a folder.

    Args:
        folder: directory to write, which exists.
        megabytes: limit of the source code.
        questions: number of questions of each kind.
        sums: documents of sums.
    """
    chooser = random.Random(0)
    held_out: list[str] = []
    with (folder / CODE).open("w", encoding="utf-8") as file:
        for text in read_sources(int(megabytes * 1e6)):
            if chooser.random() < HELD_OUT_SHARE or not held_out:
                held_out.append(text)
            else:
                file.write(json.dumps({"text": text}) + "\n")
    _write_documents(folder / HELD_OUT, held_out)
    _write_documents(folder / SUMS, (_document(chooser) for _ in range(sums)))
    asked = {
        "cloze": [question._asdict() for question in _cloze(held_out, questions, chooser)],
        "sums": [_ask_sum(chooser)._asdict() for _ in range(questions)],
    }
    (folder / QUESTIONS).write_text(json.dumps(asked), encoding="utf-8")


def read_questions(folder: Path) -> dict[str, list[Question]]:
    """Return the questions of a folder by kind."""
    found = json.loads((folder / QUESTIONS).read_text(encoding="utf-8"))
    return {kind: [Question(**question) for question in asked] for kind, asked in found.items()}


def read_sources(limit: int) -> Iterator[str]:
    """Yield source files of Python and its packages in the order of a hash of their paths, up to `limit` bytes.

    Of files with the same content only one is read, so that no held-out text is in the training text too.
    """
    roots = [Path(place) for place in sys.path if place and not Path(place).resolve().is_relative_to(ROOT)]
    files = {path.resolve() for root in roots for path in root.rglob("*.py")}
    seen = set()
    for path in sorted(files, key=lambda path: hashlib.sha256(str(path).encode()).digest()):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        content = hashlib.sha256(text.encode()).digest()
        if 200 < len(text) < _LONGEST and content not in seen:
            seen.add(content)
            yield text
            limit -= len(text)
        if limit <= 0:
            return


def is_held_out(a: int, b: int) -> bool:
    """Return whether the sum of two numbers is only asked for, and never trained on."""
    return hashlib.sha256(f"{a}+{b}".encode()).digest()[0] < 26


def _write_documents(path: Path, texts: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def _spaced(number: int) -> str:
    """Return the digits of a number with spaces between them, so that each is a token."""
    return " ".join(str(number))


def _pair(chooser: random.Random, held_out: bool) -> tuple[int, int]:
    """Return two numbers of one to three digits."""
    while True:
        a, b = (chooser.randrange(10 ** chooser.choice(_DIGITS)) for _ in range(2))
        if is_held_out(a, b) == held_out:
            return a, b


def _solved(a: int, b: int) -> str:
    return f"{_spaced(a)} + {_spaced(b)} = {_spaced(a + b)}\n"


def _document(chooser: random.Random, count: int = _SUMS_OF_A_DOCUMENT) -> str:
    """Return solved sums of training, one a line."""
    return "".join(_solved(*_pair(chooser, held_out=False)) for _ in range(count))


def _ask_sum(chooser: random.Random) -> Question:
    """Return a question for a sum that training never sees, after solved ones."""
    a, b = _pair(chooser, held_out=True)
    question, answer = _solved(a, b).split(" = ")
    return Question(f"{_document(chooser, SHOTS)}{question} =", f" {answer}")


def _cloze(texts: list[str], count: int, chooser: random.Random) -> Iterator[Question]:
    """Yield questions for names in source code that occurred in the `CONTEXT` characters before."""
    found = 0
    for _ in range(100 * count):
        text = chooser.choice(texts)
        start = chooser.randrange(max(1, len(text) - CONTEXT))
        begin = text.find("\n", start) + 1
        names = [m for m in _NAME.finditer(text, begin + CONTEXT // 2, begin + CONTEXT)]
        seen = [m for m in names if text.find(m.group(), begin, m.start()) >= 0 and not keyword.iskeyword(m.group())]
        if seen:
            name = seen[-1]
            # A space before a name is a part of its token.
            end = name.start() - (text[name.start() - 1] == " ")
            yield Question(text[begin:end], text[end : name.end()])
            found += 1
        if found == count:
            return
