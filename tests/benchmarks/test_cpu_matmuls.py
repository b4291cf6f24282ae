"""The products of nanoGPT's step on a CPU are those of its FLOPs."""

import numpy as np

from benchmarks.cpu_matmuls import BATCH, LAYERS, LENGTH, TOKENS, VOCABULARY, WIDTH, flops, products


def test_the_products_are_those_of_a_training_step():
    weights = LAYERS * 12 * WIDTH**2 + WIDTH * VOCABULARY
    attention = 6 * 2 * BATCH * LENGTH * LENGTH * WIDTH * LAYERS
    assert sum(flops(product) * product[3] for product in products()) == 6 * TOKENS * weights + attention
    for subscripts, left, right, _ in products():
        assert np.einsum(subscripts, np.zeros(left), np.zeros(right)).ndim == len(subscripts.split("->")[1])
