"""Cases of `copy_newest`: keys and values in pages, and what their copies must be."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.page_copies.api import BLOCK

PAGE, PAGES, ROWS, HEADS, KEY_WIDTH, VALUE_WIDTH = 12, 60, 4, 3, 40, 24
LENGTHS = (29 * PAGE, 31, 1, 0)
"""A whole row, two shorter sequences, and no sequence."""
CASES = {"bfloat16": "bfloat16", "float32": "float32", "float8_e4m3fn": "bfloat16"}
"""Dtype of the pages -> dtype of the copies."""


def make_arrays(dtype: str) -> tuple[np.ndarray, ...]:
    """Keys, values, the page table and the lengths, with pages in random order."""
    random = np.random.default_rng(0)
    keys, values = (
        random.normal(size=(PAGES, PAGE, HEADS, width)).astype(jnp.dtype(dtype)) for width in (KEY_WIDTH, VALUE_WIDTH)
    )
    table = random.integers(0, PAGES, (ROWS, 29)).astype(np.int32)
    return keys, values, table, np.array(LENGTHS, np.int32)


def check(copies, arrays, dtype: str) -> None:
    """Compare the tokens' slots with loops over them; the slots before them must be finite up to the margin."""
    keys, values, table, lengths = arrays
    for pages, copy in zip((keys, values), copies, strict=True):
        assert copy.shape == (ROWS, table.shape[1] * PAGE, *pages.shape[2:]) and copy.dtype == jnp.dtype(dtype)
        for row, length in enumerate(lengths):
            start = copy.shape[1] - length
            assert np.isfinite(np.asarray(copy[row, max(0, start - BLOCK) : start], np.float32)).all()
            for token in range(length):
                expected = pages[table[row, token // PAGE], token % PAGE].astype(jnp.dtype(dtype))
                np.testing.assert_array_equal(copy[row, start + token], expected)
