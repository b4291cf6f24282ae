"""Multi-token prediction: the loss by its definition, and a released layer as transformers computes it."""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxstack.compress.matrix import compressible_weights, other_parameters
from jaxstack.errors import ConfigError
from jaxstack.loss import IGNORE, language_model_loss
from jaxstack.models import ModelConfig, Transformer, from_huggingface, to_huggingface
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.multi_token_prediction import MultiTokenPrediction
from tests.parallel.test_layouts import assert_trains_as_one_device, layout

RELEASE = Path(__file__).parent / "huggingface" / "deepseek-v3"
CONFIG = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24, num_nextn_predict_layers=2,
    initialization="fan_in",
)  # fmt: skip
NONE = {"num_nextn_predict_layers": 0}
LENGTHS = (7, 2, 7)
"""Documents of a row; the second is too short for the second layer."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(CONFIG, nnx.Rngs(0))


def mtp_of(model: Transformer) -> MultiTokenPrediction:
    assert model.mtp is not None
    return model.mtp


@jax.jit
def cross_entropies(model: Transformer, document: jax.Array, counted: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Sum and number of the cross-entropies of each prediction layer, on a document of T + 1 ids by itself."""
    ids = document[None, :-1]
    hidden = model.hidden(ids)
    found = []
    for depth, layer in enumerate(mtp_of(model).layers, 1):
        length = ids.shape[1] - depth  # positions that have a token to predict
        if not length:
            return [*found, (jnp.zeros(()), jnp.zeros((), int))]
        embedded, context = model.inputs_of_layers(ids[:, depth:])
        pair = layer.embedding_norm(embedded), layer.hidden_norm(hidden[:, :length])
        hidden = layer.final_norm(layer(jnp.concatenate(pair, -1) @ layer.projection.kernel[...], context)[0])
        chosen = jax.nn.log_softmax(model.logits(hidden))[0, np.arange(length), document[depth + 1 :]]
        found.append((-jnp.sum(chosen * counted[depth + 1 :]), counted[depth + 1 :].sum()))
    return found


def test_the_loss_is_that_of_every_document_by_itself(model):
    random = np.random.default_rng(0)
    documents = [random.integers(0, 32, length + 1) for length in LENGTHS]
    counted = [random.random(length + 1) < 0.8 for length in LENGTHS]
    batch = {
        "tokens": np.concatenate([ids[:-1] for ids in documents]),
        "labels": np.concatenate([np.where(c, x, IGNORE)[1:] for x, c in zip(documents, counted, strict=True)]),
        "segment_ids": np.repeat(np.arange(len(LENGTHS)), LENGTHS),
    }
    batch = {name: jnp.asarray(x[None], jnp.int32) for name, x in batch.items()}
    alone = [cross_entropies(model, ids, c) for ids, c in zip(documents, counted, strict=True)]
    totals, counts = np.asarray(alone).sum(0).T

    with_it, without = (
        jax.jit(functools.partial(language_model_loss, train=True, mtp_weight=weight))(model, batch)
        for weight in (0.4, 0.0)
    )
    np.testing.assert_allclose(with_it.further["mtp_loss"].total, totals.sum(), rtol=1e-5)
    assert with_it.further["mtp_loss"].count == counts.sum() and min(counts) > 0
    np.testing.assert_allclose(with_it.total - without.total, 0.4 * totals.sum() / 2, rtol=1e-5)
    assert with_it.count == without.count and not without.further
    assert not language_model_loss(model, batch).further, "an evaluation measures next tokens alone"


def write_release(folder: Path, **changes: np.ndarray) -> Path:
    """The checkpoint of DeepSeek-V3 with its prediction layer and the copies that a release has."""
    shutil.copytree(RELEASE, folder)
    tensors = load_file(folder / "model.safetensors")
    prediction = load_file(folder / "prediction.safetensors")
    del prediction["logits"]
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    tensors |= {f"model.layers.3.{name}.weight": tensors[f"{source}.weight"] for name, source in copies.items()}
    save_file(tensors | prediction | changes, folder / "model.safetensors")
    return folder


def logits(model: Transformer, tokens: np.ndarray) -> jax.Array:
    batch = {"tokens": tokens, "labels": tokens}
    predictions = mtp_of(model)(model.hidden(tokens), batch, model.inputs_of_layers, None, IGNORE)
    return model.logits(next(predictions).hidden)[:, :-1]


@pytest.mark.longer
def test_a_released_layer_predicts_as_in_transformers(tmp_path):
    model = from_huggingface(write_release(tmp_path / "release"))
    tokens = load_file(RELEASE / "expected.safetensors")["tokens"]
    expected = load_file(RELEASE / "prediction.safetensors")["logits"]
    run = jax.jit(logits)
    np.testing.assert_allclose(run(model, tokens), expected, atol=1e-4)
    kernel = mtp_of(model).layers[0].projection.kernel
    kernel.set_value(jnp.roll(kernel[...], 32, axis=0))  # as if the hidden state came first
    assert np.abs(run(model, tokens) - expected).max() > 1


def test_a_release_is_written_as_it_was_read(tmp_path):
    release = write_release(tmp_path / "release")
    to_huggingface(from_huggingface(release), tmp_path / "again", dtype="bfloat16")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", release))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_glm_has_the_layer_too(tmp_path):
    config = read_model_config(RELEASE.parent / "glm4-moe").model_copy(update={"num_nextn_predict_layers": 1})
    model = Transformer(config, nnx.Rngs(0))
    assert to_huggingface(model, tmp_path) == "glm4_moe"
    tensors = load_file(tmp_path / "model.safetensors")
    names = {"enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens", "input_layernorm"}
    assert {f"model.layers.{config.num_layers}.{name}.weight" for name in names} < tensors.keys()
    again = from_huggingface(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


def normalized(x: np.ndarray, weight: np.ndarray, eps: float = 1e-3) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (1 + weight)


def qwen_logits(tensors: dict[str, np.ndarray], hidden: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] by the layer in Qwen 3.5's files, given the T hidden states before the T tokens."""
    heads, key_heads, width, rotated = 4, 2, 16, 4
    count = len(tokens)

    def apply(x: np.ndarray, name: str) -> np.ndarray:
        return x @ tensors[f"mtp.{name}.weight"].T

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return normalized(x, tensors[f"mtp.{name}.weight"])

    def rotate(x: np.ndarray) -> np.ndarray:
        angles = np.arange(count)[:, None, None] * 1e4 ** (-np.arange(0, rotated, 2) / rotated)
        first, second = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
        turned = first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)
        return np.concatenate([*turned, x[..., rotated:]], -1)

    embedded = tensors["model.embed_tokens.weight"][tokens]
    pair = norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")
    x = apply(np.concatenate(pair, -1), "fc")
    inputs = norm(x, "layers.0.input_layernorm")
    q, gate = np.split(apply(inputs, "layers.0.self_attn.q_proj").reshape(count, heads, 2 * width), 2, -1)
    k, v = (apply(inputs, f"layers.0.self_attn.{n}_proj").reshape(count, key_heads, width) for n in "kv")
    q, k = rotate(norm(q, "layers.0.self_attn.q_norm")), rotate(norm(k, "layers.0.self_attn.k_norm"))
    k, v = (np.repeat(z, heads // key_heads, 1) for z in (k, v))
    scores = np.einsum("inh,jnh->nij", q, k) / width**0.5 + np.where(np.tri(count), 0, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("nij,jnh->inh", weights / weights.sum(-1, keepdims=True), v) / (1 + np.exp(-gate))
    x = x + apply(out.reshape(count, -1), "layers.0.self_attn.o_proj")
    inputs = norm(x, "layers.0.post_attention_layernorm")
    gate, up = (apply(inputs, f"layers.0.mlp.{n}_proj") for n in ("gate", "up"))
    x = x + apply(gate / (1 + np.exp(-gate)) * up, "layers.0.mlp.down_proj")
    return norm(x, "norm") @ tensors["lm_head.weight"].T


@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-next", "qwen3-5-moe"])
def test_qwen_has_the_layer_under_names_of_its_own(name, tmp_path):
    config = read_model_config(RELEASE.parent / name)
    assert config.num_nextn_predict_layers == 0, "the file has no such tensors"
    model = Transformer(config.model_copy(update={"num_nextn_predict_layers": 1}), nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 999))
    for variable in jax.tree.leaves(nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)):
        variable.set_value(variable[...] + 0.2 * jax.random.normal(next(keys), variable.shape))
    to_huggingface(model, tmp_path)
    tensors = {key: x.astype(np.float64) for key, x in load_file(tmp_path / "model.safetensors").items()}
    names = {"fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers.0.self_attn.q_proj"}
    assert {f"mtp.{name}.weight" for name in names} < tensors.keys()
    assert not any(key.startswith(f"model.layers.{config.num_layers}.") for key in tensors)
    again = from_huggingface(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    if name == "qwen3-5":
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 12))
        hidden = np.asarray(again.hidden(jnp.asarray(tokens)), np.float64)
        found = jax.jit(logits)(again, jnp.asarray(tokens))[0]
        wanted = qwen_logits(tensors, hidden[0, :-1], tokens[0, 1:])
        assert np.abs(wanted).max() > 1
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_family_without_such_layers_leaves_them_out(model, tmp_path):
    with pytest.warns(UserWarning, match="a llama has no layers for multi-token prediction; they are left out"):
        assert to_huggingface(model, tmp_path) == "llama"
    again = from_huggingface(tmp_path)
    assert again.mtp is None
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again.decoder), nnx.state(model.decoder))


def test_compression_after_training_leaves_the_layers_as_they_are():
    assert compressible_weights(CONFIG).keys() == compressible_weights(CONFIG.model_copy(update=NONE)).keys()
    assert other_parameters(CONFIG)["mtp/layers/1/projection/kernel"] == "a weight of multi-token prediction"


@pytest.mark.longer
def test_the_layer_may_be_left_out_or_missing(tmp_path):
    assert read_model_config(RELEASE).num_nextn_predict_layers == 0, "config.json has the key, the file no tensors"
    config = read_model_config(release := write_release(tmp_path / "release"))
    assert config.num_nextn_predict_layers == 1
    assert from_huggingface(release, config=config.model_copy(update=NONE)).mtp is None
    with pytest.raises(ConfigError, match=r"42 tensors are missing: model\.layers\.3"):
        from_huggingface(RELEASE, config=config)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        (*layout(1, 1, 1), "parallel.pipeline=2", "parallel.context=2"),
        (*layout(2, 2, 2, True), "train.gradient_accumulation=2"),
    ],
    ids=" ".join,
)
def test_layouts_give_the_loss_curve_of_one_device(overrides):
    assert_trains_as_one_device(*overrides, shape=("model.num_nextn_predict_layers=1",))
