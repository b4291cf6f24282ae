"""Weights of transformers in our model: the same logits, the same greedy tokens, on any mesh, a slice at a time."""

import functools
import json
import operator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxstack.config.loader import build_component, merge_trees
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer, from_huggingface
from jaxstack.models.huggingface import load
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.huggingface.files import WeightFiles
from jaxstack.models.mixers.gated_delta import GatedDeltaNet
from jaxstack.models.mixers.kimi_delta import KimiDeltaAttention
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules

HERE = Path(__file__).parent
FAMILIES = sorted(path.parent.name for path in HERE.glob("*/config.json"))


def leaves(model: Transformer) -> list[tuple[str, jax.Array]]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return [("/".join(map(str, path)), variable.get_value()) for path, variable in flat]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name):
    expected = load_file(HERE / name / "expected.safetensors")
    model = from_huggingface(HERE / name)
    found = jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(expected["tokens"]))
    np.testing.assert_allclose(found, expected["logits"], atol=1e-4, rtol=0)
    module = ModuleArrays(lambda rngs: Transformer(model.config, rngs))
    decoder = Decoder(module, *module.split(model), make_rules(make_mesh(ParallelConfig(), jax.devices()[:1])))
    prompt = expected["tokens"][0, :6].tolist()
    greedy = [int(ids[0]) for ids in decoder.generate([prompt], 12, Sampling(temperature=0.0))]
    assert greedy == expected["greedy"].tolist()


@pytest.mark.parametrize("name", ["kimi-linear", "olmo-hybrid"])
def test_a_step_of_gradient_descent_is_that_of_transformers(name):
    expected = load_file(HERE / name / "expected.safetensors")
    tokens = jnp.asarray(expected["tokens"])

    @jax.jit
    def step(model: Transformer) -> jax.Array:
        def loss(params: nnx.State) -> jax.Array:
            losses = jax.nn.log_softmax(nnx.merge(graph, params, rest)(tokens)[:, :-1])
            return -jnp.take_along_axis(losses, tokens[:, 1:, None], axis=-1).mean()

        graph, params, rest = nnx.split(model, nnx.Param, ...)
        params = jax.tree.map(lambda x, gradient: x - 0.002 * gradient, params, jax.grad(loss)(params))
        return nnx.merge(graph, params, rest)(tokens)

    found, wanted = step(from_huggingface(HERE / name)), expected["logits after a step"]
    assert np.abs(wanted - expected["logits"]).max() > 0.05
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


WRONG = {
    "olmo3, YaRN in windows too": ("olmo3", {"rope_local_base_freq": None}),
    "phi3, short factors": ("phi3", {"rope_scaling": {"long_factor": [1.0, 1.0, 1.0]}}),
    "mamba2, limits of step sizes": ("mamba2", {"ssd": {"time_step_limit": [0.1, 1.5]}}),
    "kimi-linear, corrections that overshoot": ("kimi-linear", {"kda": {"allow_neg_eigval": True}}),
    "olmo-hybrid, corrections of at most 1": ("olmo-hybrid", {"delta": {"allow_neg_eigval": False}}),
    "olmo-hybrid, rotary positions": ("olmo-hybrid", {"positions": "rope"}),
    "olmo-hybrid, epsilon of the other norms": ("olmo-hybrid", {"delta": {"norm_eps": None}}),
    "glm4-moe, all channels rotate": ("glm4-moe", {"partial_rotary_factor": 1.0}),
    "deepseek-v3.2, more keys": ("deepseek-v32", {"attention": {"index_topk": 6}}),
    "gemma4, all channels rotate": ("gemma4-dense", {"rope_scaling": {"partial_rotary_factor": 1.0}}),
    "llama4, longer chunks": ("llama4", {"attention_chunk_size": 64}),
    "llama4, weighted outputs": ("llama4", {"moe": {"weight_inputs": False}}),
    "olmo3, no attention factor": ("olmo3", {"rope_scaling": {"attention_factor": 1.0}}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_slightly_different_model_has_other_logits(name):
    folder, changes = WRONG[name]
    expected = load_file(HERE / folder / "expected.safetensors")
    model = from_huggingface(HERE / folder)
    config = build_component(ModelConfig, merge_trees(model.config.model_dump(mode="json"), changes))
    parts = ModuleArrays(lambda rngs: Transformer(model.config, rngs)).split(model)
    other = ModuleArrays(lambda rngs: Transformer(config, rngs)).merge(*parts)
    found = jax.jit(lambda model, tokens: model(tokens))(other, jnp.asarray(expected["tokens"]))
    assert np.abs(found - expected["logits"]).max() > 0.05


def _equal_decays(self, dt, beta, a_log, dt_bias):
    log_decay, beta = GatedDeltaNet._gates(self, dt, beta, a_log, dt_bias)
    return jnp.broadcast_to(log_decay.mean(-1, keepdims=True), log_decay.shape), beta


@pytest.mark.longer
@pytest.mark.parametrize(
    ("name", "value"),
    [("_gate", staticmethod(jax.nn.silu)), ("_gates", _equal_decays)],
    ids=["silu as gate", "one decay for all channels of a head"],
)
def test_gates_of_gated_deltanet_give_other_logits_of_kimi_linear(name, value, monkeypatch):
    monkeypatch.setattr(KimiDeltaAttention, name, value)
    expected = load_file(HERE / "kimi-linear" / "expected.safetensors")
    found = jax.jit(lambda model, tokens: model(tokens))(from_huggingface(HERE / "kimi-linear"), expected["tokens"])
    assert np.abs(found - expected["logits"]).max() > 0.05


@pytest.mark.longer
def test_the_keys_of_another_layer_give_other_logits(monkeypatch):
    """Layers with a window reuse the keys and values of the last such layer before them, not of the first."""
    expected = load_file(HERE / "gemma4-shared-keys" / "expected.safetensors")
    model = from_huggingface(HERE / "gemma4-shared-keys")
    first, last = model.decoder.layers[:2]
    assert (first.attention.keeps, last.attention.keeps) == (None, "sliding_attention")
    first.attention.keeps, last.attention.keeps = last.attention.keeps, first.attention.keeps
    found = jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(expected["tokens"]))
    assert np.abs(found - expected["logits"]).max() > 0.05


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("gpt2", {"fsdp": 8}),
        ("gpt2", {"fsdp": 2, "tensor": 2, "data": 2}),
        ("gemma2", {"fsdp": 2, "tensor": 2, "data": 2}),
        ("qwen2", {"fsdp": 4, "tensor": 2}),
        ("phi3", {"fsdp": 4, "tensor": 2}),
        ("mamba2", {"fsdp": 4, "tensor": 2}),
        ("qwen3-moe", {"expert": 4, "fsdp": 2}),
    ],
    ids=str,
)
def test_sharded_weights_are_the_same_and_lie_as_in_training(name, degrees, monkeypatch):
    monkeypatch.setattr(load, "_CHUNK_BYTES", 1000)  # several chunks a device
    rules = make_rules(make_mesh(ParallelConfig(**degrees)))
    plain = from_huggingface(HERE / name)
    sharded = from_huggingface(HERE / name, mesh=rules)
    specs = ModuleArrays(lambda rngs: Transformer(plain.config, rngs)).parameter_specs(rules)
    for (path, one), (_, many) in zip(leaves(plain), leaves(sharded), strict=True):
        spec = functools.reduce(operator.getitem, path.split("/"), specs)
        assert many.sharding.is_equivalent_to(rules.sharding(spec), many.ndim), path
        np.testing.assert_array_equal(one, many, err_msg=path)


class Counted:
    """Slices of a tensor, noting how many values were read at once."""

    def __init__(self, source, read):
        self.source = source
        self.read = read

    def __getitem__(self, index):
        found = self.source[index]
        self.read.append(np.asarray(found).size)
        return found


def test_no_more_than_a_devices_part_is_read_at_once(monkeypatch):
    read: list[int] = []
    slices = WeightFiles.slices
    monkeypatch.setattr(WeightFiles, "slices", lambda self, name: Counted(slices(self, name), read))
    files = WeightFiles(HERE / "llama")
    sizes = {name: int(np.prod(shape)) for name, shape in files.shapes.items()}
    from_huggingface(HERE / "llama", mesh=make_mesh(ParallelConfig(fsdp=8)))
    assert max(read) == max(sizes.values()) // 8
    matrices = sum(size for name, size in sizes.items() if "norm" not in name)
    vectors = sum(size for name, size in sizes.items() if "norm" in name)
    assert sum(read) == matrices + vectors  # each value once, though vectors lie on every device


def test_layers_may_be_unrolled_but_the_function_must_stay():
    config = read_model_config(HERE / "qwen3")
    unrolled = from_huggingface(HERE / "qwen3", config=config.model_copy(update={"scan_layers": False}))
    scanned = dict(leaves(from_huggingface(HERE / "qwen3")))
    for path, leaf in leaves(unrolled):
        if path.startswith("decoder/layers/1"):
            np.testing.assert_array_equal(leaf, scanned[path.replace("layers/1", "layers/0")][1])
    with pytest.raises(ConfigError, match=r"another model: rope_theta 500.0, not 10000.0"):
        from_huggingface(HERE / "qwen3", config=config.model_copy(update={"rope_theta": 500.0}))


@pytest.mark.longer
def test_a_text_model_is_found_under_the_prefixes_of_multimodal_files(tmp_path):
    def same_weights(name: str, config: dict, tensors: dict[str, np.ndarray]) -> None:
        folder = tmp_path / config["model_type"]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        others = dict(leaves(from_huggingface(folder)))
        for path, leaf in leaves(from_huggingface(HERE / name)):
            np.testing.assert_array_equal(leaf, others[path], err_msg=path)

    def stored(name: str) -> tuple[dict, dict[str, np.ndarray]]:
        return json.loads((HERE / name / "config.json").read_text()), load_file(HERE / name / "model.safetensors")

    config, tensors = stored("gemma3-multimodal")
    newer = {"model." + n.replace("language_model.model.", "language_model."): x for n, x in tensors.items()}
    same_weights("gemma3-multimodal", config, newer)
    text, tensors = stored("llama4")
    outer = {"language_model." + n: x for n, x in tensors.items()}
    vision = {"vision_model.class_embedding": np.zeros(8, np.float32)}
    same_weights("llama4", {"model_type": "llama4", "text_config": text, "vision_config": {}}, {**outer, **vision})
    text, tensors = stored("gemma4-shared-keys")
    outer = {n.replace("model.", "model.language_model."): x for n, x in tensors.items()}
    outer |= {
        f"model.language_model.layers.6.self_attn.{n}.weight": np.zeros(8, np.float32) for n in ("k_proj", "k_norm")
    }
    same_weights("gemma4-shared-keys", {"model_type": "gemma4", "text_config": text}, outer)
    # The release has all experts of a layer in one tensor, and a layer for multi-token prediction.
    text, tensors = stored("qwen3-5-moe")
    apart = {n: x for n, x in tensors.items() if ".experts." in n}
    joined = {n.replace("model.", "model.language_model.", 1): x for n, x in tensors.items() if n not in apart}
    for layer in range(2):
        at = f"layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([apart[f"model.{at}.{e}.{name}_proj.weight"] for e in range(4)]) for name in ("gate", "up", "down")
        )
        joined[f"model.language_model.{at}.gate_up_proj"] = np.concatenate((gate, up), axis=1)
        joined[f"model.language_model.{at}.down_proj"] = down
    joined |= {"mtp.norm.weight": np.zeros(32, np.float32), "model.visual.pos_embed.weight": np.zeros(8, np.float32)}
    same_weights("qwen3-5-moe", {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}}, joined)
