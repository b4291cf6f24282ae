"""Models in few bits under tensor parallelism: logits, texts and answers of one device, by parts of the bytes."""

import re
from pathlib import Path

import numpy as np
import pytest

import jaxstack.generate as command
from jaxstack.checkpoint.compressed import named_leaves
from jaxstack.compress import __main__ as compress
from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.sampling import Sampling
from jaxstack.run.load import Run, load
from jaxstack.serve.engine import open_engine
from pallas_kernels import PackedWeight
from pallas_kernels.weight_only.packed import device_bytes
from tests.word_models import as_words, make_word_model

pytestmark = pytest.mark.longer
GREEDY = Sampling(temperature=0.0)
RECIPES = {
    "int4": "[{path: ^decoder, method: rtn, bits: 4, group_size: 16}, {path: .*, method: rtn}]",
    "int8": "[{path: .*, method: rtn}]",
    "w8a8": "[{path: ^decoder, method: rtn, activations: int8}, {path: .*, method: rtn}]",
    "fp8": "[{path: .*, method: fp8}]",
    "fp8-dynamic": "[{path: ^decoder, method: fp8, activations: fp8}, {path: .*, method: fp8}]",
}
"""Rules of a recipe. Of the 48 inputs of the last matrix of an MLP a device has 24, which is one and a half groups."""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_word_model("qwen2", tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="module", params=RECIPES)
def model(request, source, tmp_path_factory) -> Path:
    """A compressed run."""
    return compressed(source, tmp_path_factory.mktemp(request.param), request.param)


def compressed(source: Path, place: Path, recipe: str) -> Path:
    (place / "recipe.yaml").write_text(f"layers: {RECIPES[recipe]}")
    arguments = ["--run", str(source), "--recipe", str(place / "recipe.yaml"), "--out", str(place / "run")]
    assert compress.main(arguments) == 0
    return place / "run"


def load_on(model: Path, tensor: int) -> Run:
    return load(model, [f"parallel.tensor={tensor}"])


def test_logits_and_greedy_text_are_those_of_one_device(model):
    """For 14 rows, which a device multiplies with its part of a weight, and for 90, which XLA partitions."""
    one = load_on(model, 1)
    two = load_on(model, 2)
    for length in (7, 45):
        tokens = np.random.default_rng(length).integers(5, 60, (2, length))
        np.testing.assert_allclose(two.model(tokens), one.model(tokens), rtol=1e-5, atol=1e-5)
    for run in (one, two):
        run.decoder.join_projections()
    prompts = [as_words([5, 9, 2, 24]), as_words([17, 3])]
    texts = [[text.text for text in run.generate(prompts, GREEDY, max_tokens=12)] for run in (one, two)]
    assert texts[0] == texts[1] and all(texts[0])


def test_each_device_holds_half_of_the_bytes_and_projections_are_joined(model):
    decoder = load_on(model, 2).decoder
    decoder.join_projections()
    leaves = named_leaves(decoder.params)
    weights = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, PackedWeight)}
    layers = {path.split("/")[-2] for path in weights if path.startswith("decoder/layers/0/")}
    assert layers == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    for path, weight in weights.items():
        for name, array in weight.arrays.items():
            whole = array.shape[-1] == 1 and ("o_proj" in path or "down_proj" in path)  # one scale for all inputs
            part = array.addressable_shards[0].data
            assert device_bytes(part) == device_bytes(array) // (1 if whole else 2), (path, name)


def test_the_server_gives_the_texts_of_one_device(source, tmp_path):
    model = compressed(source, tmp_path, "int4")
    prompts = [[5, 9, 2, 24], [17, 3], [8] * 20]
    sizes = EngineConfig(slots=2, context=64, page_size=8, chunk=16)
    found = []
    for tensor in (1, 2):
        decoder = load_on(model, tensor).decoder
        decoder.join_projections()
        with open_engine(decoder, sizes, warm_up=False) as engine:
            requests = [engine.submit(prompt, 12, GREEDY) for prompt in prompts]
            found.append([request.result() for request in requests])
    assert found[0] == found[1]


def test_the_command_says_what_multiplies(source, tmp_path, capsys):
    model = compressed(source, tmp_path, "int4")
    capsys.readouterr()
    prompt = ["--prompt", as_words([5, 9]), "--temperature", "0", "--max-tokens", "4"]
    texts = []
    for tensor in (1, 2):
        assert command.main(["--run", str(model), *prompt, f"parallel.tensor={tensor}"]) == 0
        printed = capsys.readouterr()
        texts.append(printed.out)
        assert re.search(r"^packed_matmul: xla for \d+ shapes \(not triton: needs an NVIDIA GPU", printed.err, re.M)
    assert texts[0] == texts[1]
