"""The table of bfloat16 values: every value at its bits, counts, quantiles."""

import jax.numpy as jnp
import numpy as np

from jaxstack.compress.formats.lookup_table import (
    PATTERNS,
    ValueTable,
    bfloat16_patterns,
    count_patterns,
    pattern_values,
    quantiles,
)
from tests.compilation import run_jitted


def test_the_table_has_every_bfloat16_once():
    values = pattern_values()
    x = jnp.array([[1.0, -2.5, 0.0, 3.0e38]], jnp.bfloat16)
    np.testing.assert_array_equal(values[np.asarray(bfloat16_patterns(x))], x.astype(jnp.float32))
    assert np.isfinite(values).all() and len(values) == PATTERNS
    assert (
        np.abs(pattern_values(largest=8.0)).max() < 8 and pattern_values(largest=8.0)[bfloat16_patterns(x)[0, 0]] == 1
    )


def test_counts_are_exact_and_quantiles_are_those_of_the_weights():
    w = np.repeat(np.arange(-8, 8, dtype=np.float32)[:, None], 3, axis=1)

    def run(w):
        patterns = bfloat16_patterns(w)
        counts = count_patterns(patterns)
        return patterns, counts, quantiles(pattern_values(), counts, jnp.array([0.01, 0.25, 0.5, 0.99]))

    patterns, counts, found = run_jitted(run, w)
    assert counts.sum() == 48 and counts[patterns[5, 0]] == 3
    np.testing.assert_array_equal(found, np.quantile(w, [0.01, 0.25, 0.5, 0.99], method="inverted_cdf"))


def test_a_table_of_a_range_of_magnitudes_has_each_of_its_values_once():
    table = ValueTable(smallest=2.0**-2, largest=2.0**3)
    assert len(table.values) == len(np.unique(table.values)) == 1 + 2 * 5 * 128
    w = jnp.array([0.25, -0.25, 7.96875, -7.96875, 1.5, 0.2490234375, -1e-30, 8.0, 0.0, -0.0, jnp.inf])
    places = table.places(w)
    np.testing.assert_array_equal(table.values[np.asarray(places)], [0.25, -0.25, 7.96875, -7.96875, 1.5] + [0] * 6)
    counts = table.counts(places)
    assert counts.sum() == len(w) and counts[0] == 6
