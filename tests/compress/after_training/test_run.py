"""`compress` of runs: weights that training rounded are rounded once, and a run starts from compressed weights."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.checkpoint.compressed import dense_parameter, named_leaves, read_compressed
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.compress.after_training.report import CompressionReport, summary_lines
from jaxstack.compress.after_training.run import (
    CompressOptions,
    compress,
    other_rounding_warnings,
)
from jaxstack.compress.config import Recipe, load_recipe
from jaxstack.compress.during_training import compress_in_training
from jaxstack.compress.formats.integer_grid import QatRule, Rtn
from jaxstack.compress.formats.sparse import Magnitude
from jaxstack.compress.matrix import MatrixLayout
from jaxstack.compress.solvers.lsq import LsqRule
from jaxstack.config.loader import dump_yaml
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.decoding.sampling import Sampling
from jaxstack.export.source import load_source
from jaxstack.files import write_file
from jaxstack.parameter_paths import flatten, nest
from jaxstack.run.build_model import build_model
from jaxstack.run.evaluate import TextOptions, evaluate
from jaxstack.run.load import start_parameters
from jaxstack.run_config import load_config
from pallas_kernels import Grid
from pallas_kernels.weight_only.packed import pack_nearest
from tests.stored.decoders import decoder_of

GRID = Grid(4, 16)
Q_PROJ = "decoder/layers/0/attention/q_proj/kernel"
OVERRIDES = [
    "run.name=trained",
    "model.hidden_size=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.intermediate_size=48",
    "model.vocab_size=320",
    "model.scan_layers=false",
    "data.tokenizer.name=byte",
    "train.sequence_length=32",
    "train.global_batch_size=4",
    "compression.rules=[{path: ^decoder, method: qat, bits: 4, group_size: 16}]",
    "distill.teacher=/no/such/directory",
]


def make_run(place: Path, *overrides: str) -> Path:
    """A run at step 0, and a text beside it."""
    (place / "text.txt").write_text("A sentence to measure a loss on, and another one. " * 20)
    config = load_config(None, [*OVERRIDES, f"run.dir={place}", *overrides])
    module = compress_in_training(build_model(config, jnp.float32), config.compression.rules)
    params, non_params = jax.jit(module.init)(jax.random.key(0))
    run = place / "trained"
    with CheckpointManager(run / "checkpoints") as manager:
        manager.save(0, {"params": params, "non_params": non_params}, {"batches": 0, "data": None}, wait=True)
    ByteTokenizer().save(run / "tokenizer")
    write_file(run / "config.yaml", dump_yaml(config).encode())
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run with quantization-aware training and a teacher, at step 0."""
    return make_run(tmp_path_factory.mktemp("runs"))


def stored_weights(run: Path) -> dict[str, jax.Array]:
    """The weights in the checkpoint, as the optimizer would store them."""
    config = load_config(run / "config.yaml")
    module = compress_in_training(build_model(config, jnp.float32), config.compression.rules)
    wanted = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), module.abstract_params)
    tree = CheckpointManager(run / "checkpoints").restore(0, {"params": wanted}, subset=True)[0]
    return {"/".join(path): jnp.asarray(x) for path, x in flatten(tree["params"]).items()}


@pytest.mark.parametrize(
    ("path", "layout"),
    [("head", MatrixLayout((4, 3, 6), 0, 2)), ("embedding/table", MatrixLayout((6, 8), 0, 1, outputs_first=True))],
)
def test_a_matrix_goes_back_to_the_weight_that_it_comes_from(path, layout):
    w = jnp.arange(np.prod(layout.shape), dtype=jnp.float32).reshape(layout.shape)
    matrix = layout.to_matrices(w)
    assert matrix.shape == layout.size
    np.testing.assert_array_equal(layout.from_compressed(matrix), w)
    packed = layout.from_compressed(pack_nearest(Grid(8), matrix))
    np.testing.assert_allclose(dense_parameter(path, packed), w, atol=0.5)


def test_weights_that_training_rounded_are_rounded_once(trained):
    out = trained.parent / "small"
    text = TextOptions([str(trained.parent / "text.txt")])
    recipe = Recipe(layers=(Rtn(path="^decoder/", bits=4, group_size=16),), store="float32")
    report = compress(trained, recipe, out, CompressOptions(text=text, layer_tokens=0))
    found = named_leaves(read_compressed(out)[0])[Q_PROJ].arrays
    once = pack_nearest(GRID, stored_weights(trained)[Q_PROJ].reshape(32, 32).T)
    for name, values in once.arrays.items():
        np.testing.assert_array_equal(found[name].astype(jnp.float32), values.astype(jnp.float32))
    again = pack_nearest(GRID, once.matrix())
    assert jnp.any(again.matrix() != once.matrix())  # rounding a second time would have other values
    # Training's evaluation rounds to the same grid, and the compressed run is not rounded once more.
    assert report.loss_after is not None
    for run in (trained, out):
        measured = evaluate(run, text=text).text
        assert measured is not None and measured.loss == pytest.approx(report.loss_after.loss, rel=1e-6)
    said = list[str]()
    load_source(out, report=said.append)
    assert said == [f"note: {out} holds compressed weights; the export holds their values in float32, uncompressed"]


def test_a_recipe_that_changes_trained_values_gets_a_warning():
    rules = (LsqRule(path="mlp", bits=3, group_size=16), QatRule(path="q_proj", bits=8, group_size=None))
    paths = ["layers/0/mlp/kernel", "layers/1/mlp/kernel", "layers/0/q_proj/kernel", "head"]
    kept = Rtn(path="mlp", bits=3, group_size=16, scales="fitted"), Rtn(path=".*", bits=8)
    assert not list(other_rounding_warnings(rules, dict(zip(paths, (kept[0], kept[0], kept[1], kept[1]), strict=True))))
    found = list(other_rounding_warnings(rules, dict.fromkeys(paths, Rtn(path=".*", bits=3, group_size=16))))
    assert len(found) == 2 and "layers/0/mlp/kernel and 1 more" in found[0]
    assert "{path: .*, method: rtn, bits: 3, group_size: 16, scales: fitted} keeps the trained values" in found[0]
    assert "layers/0/q_proj/kernel. The rule {path: .*, method: rtn, bits: 8, scales: largest}" in found[1]


@pytest.mark.exhaustive
@pytest.mark.longer
def test_learned_scales_are_packed_exactly(tmp_path):
    """A run that learns scales has the loss of its compressed model; scales of the largest weights have another."""
    rule = "{path: ^decoder, method: lsq, bits: 3, group_size: 16}"
    run = make_run(tmp_path, f"compression.rules=[{rule}]", "model.scan_layers=true", "model.num_layers=2")
    text = TextOptions([str(tmp_path / "text.txt")])
    measured = evaluate(run, text=text).text
    losses = {}
    for scales in ("fitted", "largest"):
        recipe = Recipe(layers=(Rtn(path="^decoder/", bits=3, group_size=16, scales=scales),), store="float32")
        lines = list[str]()
        report = compress(run, recipe, tmp_path / scales, CompressOptions(text=text, layer_tokens=0), lines.append)
        warned = [line for line in lines if "scales: fitted} keeps the trained values" in line]
        assert len(warned) == (scales == "largest")
        assert report.loss_before is not None and report.loss_after is not None and measured is not None
        assert report.loss_before.loss == pytest.approx(measured.loss, rel=1e-6)
        losses[scales] = report.loss_after.loss
    assert losses["fitted"] == pytest.approx(measured.loss, rel=1e-6) != losses["largest"]


@pytest.mark.exhaustive
def test_a_run_with_rounded_inputs_computes_what_its_compressed_model_does(tmp_path):
    """Training's evaluation, the run's decoder and the decoder of recipe w8a8 multiply the same integers."""
    rule = "{path: ^decoder, method: qat, bits: 8, group_size: null, activations: int8}"
    run = make_run(tmp_path, f"compression.rules=[{rule}]", "model.scan_layers=true", "model.num_layers=2")
    out = tmp_path / "small"
    text = TextOptions([str(tmp_path / "text.txt")])
    recipe = load_recipe("w8a8").model_copy(update={"store": "float32"})
    report = compress(run, recipe, out, CompressOptions(text=text, layer_tokens=0))
    measured = evaluate(run, text=text).text
    assert report.loss_after is not None and report.loss_before is not None and measured is not None
    difference = abs(measured.loss - report.loss_after.loss)
    assert difference < 1e-6 and abs(measured.loss - report.loss_before.loss) > 10 * max(difference, 1e-6)
    decoders = [decoder_of(directory, ["parallel.data=1"]) for directory in (run, out)]
    for path, leaf in named_leaves(decoders[1].params).items():
        other = named_leaves(decoders[0].params)[path]
        if path.endswith("/kernel"):
            assert leaf.format.name == other.format.name == "integer_w8a8"
            jax.tree.map(np.testing.assert_array_equal, leaf, other)
    greedy = Sampling(temperature=0.0)
    prompt = list(b"A sentence to")
    texts = [np.concatenate(list(decoder.generate([prompt], 6, greedy))).tolist() for decoder in decoders]
    assert texts[0] == texts[1] and len(texts[0]) == 6


def test_a_run_starts_from_compressed_weights(trained):
    recipe = Recipe(layers=(Magnitude(path="^decoder/"),), store="float32")
    out = trained.parent / "sparse"
    lines = list[str]()
    text = TextOptions([str(trained.parent / "text.txt")])
    compress(trained, recipe, out, CompressOptions(text=text, layer_tokens=0))
    weights = stored_weights(trained)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    place = jax.NamedSharding(mesh, jax.P())

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=place)

    wanted = nest((tuple(path.split("/")), shape(x)) for path, x in weights.items())
    model = load_config(trained / "config.yaml").model
    params = start_parameters(out, model, wanted, lines.append)
    kernel = params["decoder"]["layers"]["0"]["attention"]["q_proj"]["kernel"]
    assert float(jnp.mean(kernel == 0)) == 0.5 and "compressed parameters" in lines[0]
    np.testing.assert_array_equal(kernel, jnp.where(kernel == 0, 0, weights[Q_PROJ]))


@pytest.mark.parametrize("after, said", [(50, "2.00x smaller"), (100, "no smaller: the recipe"), (125, "1.25x larger")])
def test_the_report_says_how_much_smaller(after, said):
    found = CompressionReport("run", 1, 100, after, None, None, (), {})
    assert said in summary_lines(found)[-1] and "1.00x" not in summary_lines(found)[-1]


def test_the_table_says_what_its_perplexities_are_to_be_compared_with():
    found = CompressionReport("run", 1, 100, 50, None, None, (), {"none": 1.0, "0": 1.1})
    assert "with no layer compressed it is 2.7183" in summary_lines(found)[-1]
