"""Random token ids from a seed, for benchmarks: uniform over the vocabulary except the document-start id."""

import numpy as np

TRAIN_TOKENS = 2**31
HELD_OUT_TOKENS = 2**16


class SyntheticStream:
    """Stream of random token ids computed from (seed, position); a `TokenStream` that stores nothing.

    The function is SplitMix64's finaliser (Steele, Lea, Flood 2014) of the position plus a seeded offset.
    """

    def __init__(self, vocab_size: int, document_start: int, seed: int, tokens: int):
        self._choices = vocab_size - 1
        self.document_start = document_start
        self.tokens = tokens
        self._seed = seed
        self._offset = np.uint64(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))

    @property
    def hashes(self) -> list[str]:
        return [f"synthetic-{self._choices}-{self._seed}-{self.tokens}"]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the `count` ids from position `start` on, fewer at the end of the stream, int64."""
        x = np.arange(start, min(start + count, self.tokens), dtype=np.uint64)
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + self._offset
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        ids = ((x ^ (x >> np.uint64(31))) % np.uint64(self._choices)).astype(np.int64)
        return ids + (ids >= self.document_start)

    def close(self) -> None:
        """Do nothing; exists because other token streams have files to close."""
