"""The optimum that `benchmarks/serving/serve.py` compares throughput with."""

import pytest

from benchmarks.serving.serve import optimal_tokens_per_second
from jaxstack.run_config import load_config


@pytest.mark.quick
def test_optimum_of_llama3_8b_at_the_peak_of_an_h200():
    """C / (2 P) with 989 TFLOP/s and the 7.5e9 parameters outside of the input embedding and the norms."""
    model = load_config(None, ["model.preset=llama3-8b"]).model
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert optimal_tokens_per_second(model, 989) == pytest.approx(989e12 / (2 * (layers + 128256 * 4096)))
    assert optimal_tokens_per_second(model, 989) == pytest.approx(65_900, rel=1e-3)
