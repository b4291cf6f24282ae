"""Compressed directories of each shipped recipe hold the model in memory bit for bit, and answer alike."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.checkpoint import compressed as files
from jaxstack.checkpoint.compressed import dense_parameter, named_leaves, read_compressed, unpack_vectors
from jaxstack.compress.after_training import run as compress_run
from jaxstack.compress.after_training.report import CompressionReport
from jaxstack.compress.after_training.run import CompressOptions, compress
from jaxstack.compress.config import RECIPES, Recipe, load_recipe
from jaxstack.config.loader import build_component
from jaxstack.decoding.sampling import Sampling
from jaxstack.run.convert import export_checkpoint
from jaxstack.run.evaluate import TextOptions, evaluate
from jaxstack.run.load import load
from jaxstack.serve.config import EngineConfig
from jaxstack.serve.engine import Engine
from pallas_kernels import PackedWeight
from tests.compress.after_training.test_run import make_run
from tests.stored.decoders import decoder_of
from tests.word_models import make_word_model

GREEDY = Sampling(temperature=0)
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))


MOE = "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 128}"


@pytest.fixture(scope="module", params=["dense", pytest.param("mixture", marks=pytest.mark.exhaustive)])
def source(request, tmp_path_factory) -> Path:
    """A run with grouped queries and an output head of its own, in sizes that all recipes can divide."""
    sizes = ["model.hidden_size=128", "model.intermediate_size=256", "model.num_kv_heads=1"]
    untied = ["model.tie_word_embeddings=false", "compression.rules=[]"]
    experts = [MOE] if request.param == "mixture" else []
    return make_run(tmp_path_factory.mktemp("runs"), *sizes, *untied, *experts)


def compress_by(name: str, source: Path, out: Path, text: TextOptions | None = None) -> CompressionReport:
    calibration = ["calibration.sequences=8", f"calibration.data=[{source.parent / 'text.txt'}]"]
    options = CompressOptions(
        text=text or TextOptions([str(source.parent / "text.txt")], max_tokens=64), layer_tokens=0
    )
    return compress(source, load_recipe(name, calibration), out, options)


@pytest.mark.exhaustive
def test_a_directory_of_each_recipe_holds_the_bits_of_the_model_in_memory(source, tmp_path, monkeypatch):
    written = {}

    def write(directory, params, step):
        written[directory.name] = params
        files.write_compressed(directory, params, step)

    monkeypatch.setattr(compress_run, "write_compressed", write)
    for name in NAMES:
        written.clear()
        compress_by(name, source, tmp_path / name)
        (params,) = written.values()
        in_memory = unpack_vectors(named_leaves(params))
        reloaded = named_leaves(read_compressed(tmp_path / name)[0])
        assert in_memory.keys() == reloaded.keys()
        for path, leaf in in_memory.items():
            assert jax.tree.structure(leaf) == jax.tree.structure(reloaded[path]), (name, path)
            jax.tree.map(assert_same_bits, leaf, reloaded[path])


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_is_evaluated_generated_from_served_and_converted_alike(name, source, tmp_path):
    out = tmp_path / "small"
    text = TextOptions([str(source.parent / "text.txt")])
    report = compress_by(name, source, out, text)
    measured = evaluate(out, text=text).text
    assert measured is not None and report.loss_after is not None
    assert measured.loss == pytest.approx(report.loss_after.loss, rel=1e-6)
    run = load(out, ["parallel.data=1"])
    prompt = list(b"A sentence to")
    generated = np.concatenate(list(run.decoder.generate([prompt], 6, GREEDY))).tolist()
    settings = EngineConfig(slots=1, chunk=16, context=64)
    words = run.tokenizer.vocab_size
    with Engine(run.decoder, settings, vocab_size=words, warm_up=False) as engine:
        assert engine.submit(prompt, 6, GREEDY).result() == generated
    export_checkpoint(out, tmp_path / "converted", warn=lambda line: None)
    plain = named_leaves(decoder_of(tmp_path / "converted", ["parallel.data=1"]).params)
    for path, leaf in named_leaves(run.parameters).items():
        np.testing.assert_array_equal(plain[path], dense_parameter(path, leaf).astype(jnp.float32), path)


def assert_same_bits(x: jax.Array, y: jax.Array) -> None:
    assert x.dtype == y.dtype
    wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
    np.testing.assert_array_equal(x.astype(wide), y.astype(wide))


@pytest.mark.longer
def test_experts_rounded_to_mxfp4_are_exported_as_files_of_gpt_oss(tmp_path):
    """The export holds every bit: read again, its weights stay packed and are those that were written."""
    source = make_word_model("gpt-oss", tmp_path / "source")
    rules = {"layers": [{"path": "mlp/(gate|up|down)_proj", "method": "mxfp4"}]}
    compress(source, build_component(Recipe, rules, "recipe"), tmp_path / "packed", CompressOptions(layer_tokens=0))
    export_checkpoint(tmp_path / "packed", tmp_path / "export", format="mxfp4")
    quantization = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "mxfp4"
    written, read = (
        {path: x for path, x in named_leaves(load(tmp_path / name).parameters).items() if isinstance(x, PackedWeight)}
        for name in ("packed", "export")
    )
    assert written.keys() == read.keys() and len(written) == 3 * load(source).config.model.num_layers
    for path, weight in written.items():
        for name, array in weight.arrays.items():
            np.testing.assert_array_equal(np.asarray(array), np.asarray(read[path].arrays[name]), err_msg=path)
