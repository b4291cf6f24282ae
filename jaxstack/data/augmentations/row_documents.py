"""Splits packed training rows into their documents, and joins documents to rows again.

Dimensions: T sequence length.
"""

from collections.abc import Sequence

import numpy as np

from jaxstack.data.token_rows import IGNORE, Row

Document = tuple[np.ndarray, np.ndarray]
"""Tokens [n] and labels [n], int32, of a document or the part of one that is in the row."""


def split_row(row: Row, document_start: int) -> list[Document]:
    """Split a training row into its documents, in order; padding is returned as documents without labels."""
    tokens = row["tokens"]
    labels = row["labels"]
    if "segment_ids" in row:
        begins = np.flatnonzero(np.diff(row["segment_ids"])) + 1
    else:
        begins = np.flatnonzero(tokens[1:] == document_start) + 1
    return list(zip(np.split(tokens, begins), np.split(labels, begins), strict=True))


def join_documents(documents: Sequence[Document], like: Row, document_start: int) -> Row:
    """Concatenate documents into a training row, cut or padded to the length of the row `like`, with the same keys."""
    length = len(like["tokens"])
    room = length - sum(len(tokens) for tokens, _ in documents)
    if room > 0:
        padding = np.full(room, document_start, np.int32), np.full(room, IGNORE, np.int32)
        documents = [*documents, padding]
    tokens, labels = (np.concatenate(parts)[:length].astype(np.int32) for parts in zip(*documents, strict=True))
    row = {"tokens": tokens, "labels": labels}
    if "segment_ids" in like:
        sizes = [len(tokens) for tokens, _ in documents]
        numbers = np.repeat(np.arange(1, len(documents) + 1, dtype=np.int32), sizes)
        places = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
        row |= {"segment_ids": numbers[:length], "positions": places[:length]}
    return row


def has_targets(document: Document) -> bool:
    """Return True if at least one token of the document has a label to train on; padding has none."""
    return bool((document[1] != IGNORE).any())


def split_start_id(document: Document, document_start: int) -> tuple[np.ndarray, np.ndarray]:
    """Split a document's ids into its document-start id (an array of 0 or 1 ids) and the ids after it."""
    tokens = document[0]
    opens = int(len(tokens) > 0 and tokens[0] == document_start)
    return tokens[:opens], tokens[opens:]
