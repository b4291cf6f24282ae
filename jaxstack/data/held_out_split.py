"""Splits sources into training and held-out text: by whole documents or, if there are few, inside each document."""

import hashlib
import math

from jaxstack.data.documents import Document, Piece, Split

HEAD_BYTES = 2**16
EXPECTED_DOCUMENTS = 8


def split_score(content: bytes) -> float:
    """Hash a text's bytes to a number in [0, 1), which decides whether the document is held out."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


def documents_needed(fraction: float) -> int:
    """Return how many documents a source needs so that holding out a random `fraction` almost certainly selects some.

    With an expectation of 8 held-out documents there are none with probability e^-8, about 3 in 10,000.
    """
    return math.ceil(EXPECTED_DOCUMENTS / fraction) if 0 < fraction < 1 else 0


def split_document(document: Document, piece: Piece, fraction: float, inside: bool) -> list[tuple[Split, str, float]]:
    """Return (split, text, score) of each part of a document: all of it in one split, or only its end held out.

    Args:
      document: the document, or a range of it.
      piece: the piece that it was read from, which can decide the side and the score.
      fraction: share that is held out.
      inside: hold out the last `fraction` of the document, from a line end on; False: the document's score decides for
        all of it.

    Returns:
      (split, text, score) of each part.
    """
    score = piece.score if piece.score is not None else split_score(document.text.encode())
    if piece.split is not None:
        return [(piece.split, document.text, score)]
    if not inside or fraction in (0, 1):
        return [("held_out" if score < fraction else "train", document.text, score)]
    cut = int(len(document.text) * (1 - fraction))
    line_end = document.text.find("\n", cut)
    cut = line_end + 1 if 0 <= line_end < len(document.text) - 1 else cut
    parts: list[tuple[Split, str, float]] = [
        ("train", document.text[:cut], score), ("held_out", document.text[cut:], score)
    ]  # fmt: skip
    return [p for p in parts if p[1]]
