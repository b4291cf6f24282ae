"""The PyTorch peers compute what our model computes: same weights, same tokens, same loss and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.loss import language_model_loss
from jaxstack.models import Transformer
from jaxstack.run_config import load_config

torch = pytest.importorskip("torch")

SMALL = ("model.num_layers=2", "model.hidden_size=32", "model.intermediate_size=96", "model.vocab_size=64")
LLAMA = ("model.preset=llama3-1b", *SMALL, "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=8")
LAYERS = {
    "attention_norm": "attention_norm/scale",
    "query": "attention/q_proj/kernel",
    "key": "attention/k_proj/kernel",
    "value": "attention/v_proj/kernel",
    "attention_out": "attention/o_proj/kernel",
    "mlp_norm": "mlp_norm/scale",
    "gate": "mlp/gate_proj/kernel",
    "up": "mlp/up_proj/kernel",
    "mlp_out": "mlp/down_proj/kernel",
}


def copy_weights(ours, theirs):
    """Gives the PyTorch module our weights."""
    weights = {"/".join(map(str, path)): np.array(x[...]) for path, x in nnx.to_flat_state(nnx.state(ours, nnx.Param))}
    outside = {"tokens": "embedding/table", "final_norm": "final_norm/scale", "head": "head"}
    for name, parameter in theirs.named_parameters():
        module, *rest = name.removesuffix(".weight").split(".")
        value = weights.pop(outside.get(module) or f"decoder/layers/{rest[0]}/{LAYERS[rest[1]]}")
        if module != "tokens" and parameter.dim() == 2:
            value = value.reshape(parameter.shape[::-1]).T
        parameter.data = torch.from_numpy(np.ascontiguousarray(value))
    assert not weights


def test_llama_is_our_llama():
    from benchmarks.peers.torch_step import make_module

    model = load_config(None, [*LLAMA, "model.rope_scaling=null", "model.scan_layers=false"]).model
    ours = Transformer(model, nnx.Rngs(0))
    theirs = make_module(model, 16)
    copy_weights(ours, theirs)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 17))
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    def mean_loss(ours):
        return language_model_loss(ours, jax.tree.map(jnp.asarray, batch)).total / batch["labels"].size

    loss, gradient = nnx.value_and_grad(mean_loss)(ours)
    expected = theirs(*(torch.from_numpy(batch[name].copy()) for name in ("tokens", "labels")))
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(
        gradient["decoder"]["layers"][0]["attention"]["k_proj"]["kernel"][...].reshape(32, -1).T,
        theirs.blocks[0].key.weight.grad.numpy(),
        rtol=1e-3,
        atol=1e-6,
    )


def test_other_models_are_refused():
    from benchmarks.peers.torch_step import make_module

    with pytest.raises(SystemExit, match="GPT-2 and Llama"):
        make_module(load_config(None, ["model.preset=qwen3-8b", *SMALL]).model, 16)


def test_decoding_with_a_cache_gives_the_tokens_of_the_whole_forward():
    from benchmarks.peers.torch_decode import TorchDecoder, generate
    from benchmarks.peers.torch_step import make_module

    torch.manual_seed(0)
    llama = make_module(load_config(None, [*LLAMA, "model.rope_scaling=null"]).model, 24)
    prompts = torch.randint(0, 64, (2, 9))
    decoder = TorchDecoder(llama, 2, 24)
    found, _ = generate(decoder, decoder, prompts, 8)
    texts = torch.cat([prompts, found], 1)
    assert texts.shape == (2, 17)
    with torch.no_grad():
        for length in range(9, 17):
            assert decoder(texts[:, :length], torch.arange(length)).tolist() == texts[:, length : length + 1].tolist()
