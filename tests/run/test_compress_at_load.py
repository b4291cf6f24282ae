"""Models whose weights are compressed while they are loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.checkpoint.compressed import named_leaves
from jaxstack.compress import __main__ as compress
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError
from jaxstack.run.load import load
from jaxstack.serve.__main__ import main as serve
from pallas_kernels import PackedWeight
from pallas_kernels.weight_only.float8_products import MOST_EXACT_ROWS
from tests.word_models import as_words, make_word_model

pytestmark = pytest.mark.longer
GREEDY = Sampling(temperature=0.0)
ONE_DEVICE = ["parallel.tensor=1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_word_model("qwen2", tmp_path_factory.mktemp("models") / "qwen2")


def packed(run) -> dict[str, PackedWeight]:
    leaves = named_leaves(run.parameters)
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, PackedWeight)}


def test_weights_are_those_of_a_compressed_run(model, tmp_path):
    assert compress.main(["--run", str(model), "--recipe", "fp8-dynamic", "--out", str(tmp_path / "run")]) == 0
    expected = packed(load(tmp_path / "run", ONE_DEVICE))
    found = packed(load(model, ONE_DEVICE, recipe="fp8-dynamic"))
    assert found.keys() == expected.keys() and len(found) == 14
    for path, weight in found.items():
        like = expected[path]
        assert (weight.format, weight.inputs, weight.outputs) == (like.format, like.inputs, like.outputs)
        for name, array in weight.arrays.items():
            assert np.asarray(array).tobytes() == np.asarray(like.arrays[name]).tobytes(), f"{path}: {name}"


def test_logits_are_near_those_of_the_model_and_text_is_generated(model):
    tokens = np.random.default_rng(0).integers(5, 60, (2, MOST_EXACT_ROWS))
    expected, exact, rounded = (
        np.asarray(load(model, ONE_DEVICE, recipe=recipe).model(tokens)) for recipe in (None, "fp8", "fp8-dynamic")
    )
    assert 0 < (exact - expected).std() < 0.2 * expected.std()
    assert 0 < (rounded - exact).std() < 0.2 * expected.std(), "more than 16 tokens: inputs are rounded too"
    (text,) = load(model, ONE_DEVICE, recipe="fp8-dynamic").generate([as_words([5, 6, 7])], GREEDY, max_tokens=6)
    assert len(text.text.split()) == 6


def test_weights_of_several_devices_are_split_as_plain_ones_are(model):
    whole = packed(load(model, ONE_DEVICE, recipe="fp8"))
    split = packed(load(model, ["parallel.tensor=2"], recipe="fp8"))
    up = split["decoder/layers/0/mlp/up_proj/kernel"].arrays
    assert [x.sharding.shard_shape(x.shape)[0] for x in up.values()] == [x.shape[0] // 2 for x in up.values()]
    for path, weight in split.items():
        np.testing.assert_array_equal(weight.dense(), whole[path].dense())


def test_pruned_matrices_stay_plain_numbers_and_experts_are_stacked(model, tmp_path):
    (tmp_path / "half.yaml").write_text("layers: [{path: mlp, method: magnitude, sparsity: 0.5}]")
    pruned = load(model, ONE_DEVICE, recipe=str(tmp_path / "half.yaml"))
    kernel = pruned.parameters["decoder"]["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    assert isinstance(kernel, jax.Array) and float(jnp.mean(kernel == 0)) == pytest.approx(0.5, abs=0.01)
    mixture = load(make_word_model("mixtral", tmp_path / "mixtral"), ONE_DEVICE, recipe="fp8-dynamic")
    assert {weight.format.name for weight in packed(mixture).values() if weight.stack} == {"float8"}


def test_recipes_that_do_not_fit_are_one_message(model, tmp_path):
    with pytest.raises(ConfigError, match="gptq measures the inputs of layers on a text"):
        load(model, recipe="int4-gptq")
    with pytest.raises(ConfigError, match="there is no recipe 'fp9'"):
        load(model, recipe="fp9")
    assert compress.main(["--run", str(model), "--recipe", "int8", "--out", str(tmp_path / "run")]) == 0
    with pytest.raises(ConfigError, match="is compressed already"):
        load(tmp_path / "run", recipe="fp8")


def test_the_server_takes_a_recipe(model, capsys):
    sizes = []
    for more in ([], ["--recipe", "fp8"]):
        assert serve(["--run", str(model), "--plan", "parallel.tensor=1", *more]) == 0
        sizes.append(capsys.readouterr().out)
    assert sizes[0] != sizes[1] and "weights" in sizes[1]
    assert serve(["--run", str(model), "--plan", "--recipe", "int4-gptq"]) == 2
    assert "`jaxstack compress`" in capsys.readouterr().err
