"""`jaxstack.load(directory).model(tokens)`: the logits of every kind of stored model, on one device and on meshes."""

import jax
import numpy as np
import pytest

from jaxstack import load
from jaxstack.compress.after_training.run import compress
from jaxstack.compress.config import Recipe
from jaxstack.compress.formats.integer_grid import Rtn
from jaxstack.errors import ConfigError
from jaxstack.run.convert import export_checkpoint
from jaxstack.run.train import train
from jaxstack.run_config import config_from_tree

TOKENS = np.random.default_rng(0).integers(0, 257, (3, 16), np.int32)
MESHES = [["parallel.data=1"], ["parallel.data=2", "parallel.tensor=2"], ["parallel.fsdp=8"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tree = {
        "run": {"name": "a", "dir": str(folder)},
        "model": {"hidden_size": 64, "num_layers": 3, "num_heads": 2, "intermediate_size": 64},
        "data": {"tokenizer": {"name": "byte"}, "cache_dir": str(folder / "cache")},
        "train": {"steps": 2, "global_batch_size": 8, "sequence_length": 32, "eval_tokens": 64},
        "observe": {"trackers": ["jsonl"]},
        "parallel": {"data": 8},
    }
    (folder / "text.txt").write_text("a text of some length, again and again. " * 200)
    tree["data"]["sources"] = [{"path": str(folder / "text.txt")}]
    train(config_from_tree(tree, "test"), report=lambda line: None)
    export_checkpoint(folder / "a", folder / "exported", warn=lambda line: None)
    recipe = Recipe(layers=(Rtn(path="decoder", bits=8),))
    compress(folder / "a", recipe, folder / "small")
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", MESHES, ids=" ".join)
@pytest.mark.parametrize(("name", "atol"), [("a", 2e-5), ("exported", 2e-5), ("small", 0.1)])
def test_logits_are_those_of_the_trained_model(runs, name, atol, overrides):
    run = load(runs / name, [*overrides, "precision.compute=float32"], report=lambda line: None)
    logits = run.model(TOKENS)
    assert logits.shape == (3, 16, run.config.model.vocab_size) and logits.dtype == np.float32
    plain = load(runs / "a", ["parallel.data=1", "precision.compute=float32"])
    wanted = jax.jit(lambda params: plain.module.merge(params, {})(TOKENS))(plain.parameters)
    np.testing.assert_allclose(logits, wanted, atol=atol)
    assert run.tokenizer.decode(run.tokenizer.encode("abc")) == "abc"


def test_ids_outside_of_the_vocabulary_are_refused(runs):
    with pytest.raises(ConfigError, match="the token id 9999 is outside of the model's vocabulary"):
        load(runs / "a", ["parallel.data=1"]).model([[1, 9999]])
