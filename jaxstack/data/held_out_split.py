"""The held-out split: by documents where there are many, inside of each document where there are few."""

import hashlib
import math

from jaxstack.data.documents import Document, Piece, Split

HEAD_BYTES = 2**16
EXPECTED_DOCUMENTS = 8


def split_score(content: bytes) -> float:
    """A number in [0, 1) from a text's bytes alone: equal texts score equal, wherever they stand."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


def documents_needed(fraction: float) -> int:
    """How many documents a source needs so that a share `fraction` of them is about surely not empty.

    With an expectation of 8 documents none is held out with probability e^-8, about 3 in 10,000.
    """
    return math.ceil(EXPECTED_DOCUMENTS / fraction) if 0 < fraction < 1 else 0


def split_document(document: Document, piece: Piece, fraction: float, inside: bool) -> list[tuple[Split, str, float]]:
    """(split, text, score) of the one or two parts of `document`.

    A document goes as a whole to the side that its score says; with `inside` its last `fraction`, from a
    line end on, is held out.
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
