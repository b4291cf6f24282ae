"""The loss of a compressed mixture on several devices is that on one, with its weights packed."""

import pytest

from jaxstack.compress.after_training.run import CompressOptions, compress
from jaxstack.compress.config import Recipe
from jaxstack.config.loader import build_component
from jaxstack.errors import ConfigError
from jaxstack.run.evaluate import TextOptions, evaluate
from tests.compress.after_training.test_run import make_run

MOE = "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 64}"
RULES = {
    "int4": [{"path": "^decoder/", "method": "rtn", "bits": 4, "group_size": 16}, {"path": ".*", "method": "rtn"}],
    "mxfp4": [{"path": "^decoder/", "method": "mxfp4"}],
}
pytestmark = pytest.mark.longer


@pytest.fixture(scope="module", params=RULES)
def compressed(request, tmp_path_factory):
    """A compressed mixture, the text, and the loss on one device."""
    place = tmp_path_factory.mktemp("layouts")
    sizes = ["model.hidden_size=64", "model.intermediate_size=64", "model.num_layers=2", "compression.rules=[]"]
    run = make_run(place, *sizes, MOE)
    recipe = build_component(Recipe, {"layers": RULES[request.param]}, "recipe")
    compress(run, recipe, place / "small", CompressOptions(layer_tokens=0))
    text = TextOptions([str(place / "text.txt")])
    found = evaluate(place / "small", ["precision.compute=float32"], text=text).text
    assert found is not None
    return place / "small", text, found.loss


@pytest.mark.parametrize("layout", [{"data": 8}, {"data": 4, "tensor": 2}], ids=str)
def test_the_loss_is_that_on_one_device(compressed, layout):
    directory, text, expected = compressed
    degrees = [f"parallel.{axis}={degree}" for axis, degree in layout.items()]
    found = evaluate(directory, ["precision.compute=float32", *degrees], text=text).text
    assert found is not None and found.loss == pytest.approx(expected, rel=2e-5)


def test_an_axis_that_gathers_weights_is_refused(compressed):
    directory, text, _ = compressed
    with pytest.raises(ConfigError, match=r"parallel.expert would .*; set parallel.data and parallel.tensor only"):
        evaluate(directory, ["parallel.data=2", "parallel.expert=4"], text=text)
