"""The example `compiler_costs`: tokens of StableHLO, the sum of bytes without fusion, and the model that reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.training.fields import check_result, load_example

example = load_example("compiler_costs")
TEXT = """
func.func public @main(%arg0: tensor<16x32xf32>, %arg1: tensor<32x8xf32>) -> (tensor<16x8xf32>) {
  %0 = stablehlo.tanh %arg0 : tensor<16x32xf32>
  %1 = stablehlo.dot_general %0, %arg1, contracting_dims = [1] x [0] : (tensor<16x32xf32>, tensor<32x8xf32>) -> tensor<16x8xf32>
  %2 = stablehlo.add %1, %1 : tensor<16x8xf32>
  return %2 : tensor<16x8xf32>
}
"""  # noqa: E501


def test_tokens_of_a_text():
    assert example.tokenize(TEXT) == [
        ["tanh", "argument", "16", "32"],
        ["dot_general", "-1", "argument", "16", "32", "32", "8", "16", "8"],
        ["add", "-1", "-1", "16", "8"],
    ]


def test_encoding_is_cut_off_and_knows_unknown_tokens():
    encoded = example.encode([[["tanh", "new"], *[["tanh"] * 99] * 99]], {"tanh": 1})
    assert encoded.shape == (1, example.LINES, example.TOKENS)
    assert encoded[0, 0].tolist() == [1] + [0] * 11 and (encoded[0, 1:] == 1).all()


def test_bytes_without_fusion():
    assert example.bytes_without_fusion(TEXT) == 4 * (2 * 16 * 32 + (16 * 32 + 32 * 8 + 16 * 8) + 3 * 16 * 8)


def test_random_programs_are_the_same_every_time():
    texts = [example.lower_program(seed).as_text() for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    assert len(example.tokenize(texts[0])) >= 2


def test_counts_are_of_the_fused_program():
    found = [example.compile_program(seed) for seed in range(2)]
    assert 0 < sum(one["bytes"] for one in found) < sum(example.bytes_without_fusion(one["text"]) for one in found)


@pytest.mark.trains
def test_cost_is_a_sum_over_operations():
    model = example.CostModel(9, nnx.Rngs(0))
    for layer in model.near:
        layer.kernel[...], layer.bias[...] = 0 * layer.kernel[...], 0 * layer.bias[...]  # without neighbours
    random = np.random.default_rng(0).integers(1, 9, (1, 3, example.TOKENS))
    program = jnp.asarray(np.pad(random, [(0, 0), (0, example.LINES - 3), (0, 0)]), jnp.int32)
    each = [model(program[:, i : i + 1]) for i in range(3)]
    np.testing.assert_allclose(model(program), jax.nn.logsumexp(jnp.stack(each), axis=0), rtol=1e-5)


def test_rank_correlation():
    x = np.random.default_rng(0).normal(size=50)
    assert example.rank_correlation(x, np.exp(x)) == pytest.approx(1)
    assert example.rank_correlation(x, -x) == pytest.approx(-1)


@pytest.mark.trains
def test_a_few_steps_on_a_few_programs(tmp_path, monkeypatch):
    monkeypatch.setattr(example.tempfile, "gettempdir", lambda: str(tmp_path))
    found = example.main(steps=3, programs=15)
    check_result(found)
    assert np.isfinite(found["ours"]) and len(list(tmp_path.iterdir())) == 1
    compiled = example.compiled_programs(15, 0)  # from the file
    assert compiled[3]["text"] == example.compile_program(3)["text"]


@pytest.mark.exhaustive
def test_acceptance():
    found = example.main()
    assert all(found["checks"].values()), found["checks"]
