"""The table of bfloat16 values: every value at its bits, counts, quantiles."""

import jax.numpy as jnp
import numpy as np

from jaxstack.compressed_training.patterns import PATTERNS, count_patterns, pattern_values, patterns_of, quantiles


def test_the_table_has_every_bfloat16_once():
    values = pattern_values()
    x = jnp.array([[1.0, -2.5, 0.0, 3.0e38]], jnp.bfloat16)
    np.testing.assert_array_equal(values[np.asarray(patterns_of(x))], x.astype(jnp.float32))
    assert np.isfinite(values).all() and len(values) == PATTERNS
    assert np.abs(pattern_values(largest=8.0)).max() < 8 and pattern_values(largest=8.0)[patterns_of(x)[0, 0]] == 1


def test_counts_are_exact_and_quantiles_are_those_of_the_weights():
    w = jnp.arange(-8.0, 8.0)[:, None] * jnp.ones((1, 3))
    counts = count_patterns(patterns_of(w))
    assert counts.sum() == 48 and counts[patterns_of(w)[5, 0]] == 3
    found = quantiles(pattern_values(), counts, jnp.array([0.01, 0.25, 0.5, 0.99]))
    np.testing.assert_array_equal(found, np.quantile(w, [0.01, 0.25, 0.5, 0.99], method="inverted_cdf"))
