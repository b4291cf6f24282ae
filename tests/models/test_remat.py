"""Rematerialisation policies: the same gradients, and less kept for the backward pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.loss import language_model_loss
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.remat import OFFLOADED
from pallas_kernels import lowering_platform
from tests.hopper import compile_for_hopper
from tests.small_runs import batch_at

pytestmark = pytest.mark.longer  # a few seconds each

try:
    from jax.ad_checkpoint import saved_residuals
except ImportError:  # its place in older and newer versions of jax
    from jax._src.ad_checkpoint import saved_residuals

POLICIES = ("none", "save_dots", "save_attention", "full", "offload", "save_attention_offload")


def model_of(policy: str, scan: bool) -> Transformer:
    config = ModelConfig(
        vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, intermediate_size=64, remat=policy, scan_layers=scan
    )
    return Transformer(config, nnx.Rngs(0))


def objective(policy: str, scan: bool):
    graphdef, state = nnx.split(model_of(policy, scan))
    batch = {name: jnp.asarray(x) for name, x in batch_at(0, 4).items()}
    return (lambda state: language_model_loss(nnx.merge(graphdef, state), batch).total), state


@functools.cache
def gradients(policy: str, scan: bool):
    loss, state = objective(policy, scan)
    return jax.tree.leaves(jax.jit(jax.grad(loss))(state))


def assert_gradients_equal_those_without_remat(policy: str, scan: bool) -> None:
    for found, wanted in zip(gradients(policy, scan), gradients("none", scan), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "none" and p not in OFFLOADED])
def test_every_policy_has_the_same_gradients(policy, scan):
    assert_gradients_equal_those_without_remat(policy, scan)


@pytest.mark.parametrize("policy", OFFLOADED)
def test_offloaded_layer_inputs_give_the_same_gradients(policy):
    assert_gradients_equal_those_without_remat(policy, scan=True)


@pytest.mark.parametrize("policy", OFFLOADED)
def test_offloaded_inputs_of_unrolled_layers_give_the_same_gradients(policy):
    assert_gradients_equal_those_without_remat(policy, scan=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", OFFLOADED)
def test_offloaded_layer_inputs_leave_the_memory_of_a_gpu(policy):
    """Compiled for an H200: the host holds the inputs of all layers, and the GPU no longer does."""
    config = ModelConfig(
        vocab_size=512, hidden_size=256, num_layers=8, num_heads=4, intermediate_size=256, remat=policy,
        scan_layers=True, attention_implementation="cudnn",
    )  # fmt: skip
    kept = config.model_copy(update={"remat": {"offload": "full"}.get(policy, "save_attention")})
    tokens = jax.ShapeDtypeStruct((2, 4096), jnp.int32)

    def memory(config: ModelConfig) -> Any:
        def make():
            return Transformer(config, nnx.Rngs(0), dtype=jnp.bfloat16)

        graphdef, state = nnx.split(nnx.eval_shape(make))

        def loss(state, tokens):
            return language_model_loss(nnx.merge(graphdef, state), {"tokens": tokens, "labels": tokens}).total

        with lowering_platform("cuda"):
            return compile_for_hopper(jax.grad(loss), state, tokens).memory_analysis()

    offloaded = memory(config)
    on_device = memory(kept)
    inputs = config.num_layers * 2 * 4096 * config.hidden_size * 2
    assert offloaded.host_temp_size_in_bytes == inputs and on_device.host_temp_size_in_bytes == 0
    saved = on_device.temp_size_in_bytes - offloaded.temp_size_in_bytes
    assert saved >= inputs / 2, "all but the layers whose inputs are on their way"


def kept_bytes(policy: str, scan: bool) -> int:
    """Bytes that the backward pass finds saved, arguments left out."""
    loss, state = objective(policy, scan)
    found = saved_residuals(loss, state)
    return sum(
        x.size * x.dtype.itemsize for x, source in found if "argument" not in source and "constant" not in source
    )


@pytest.mark.parametrize("scan", [True, False])
def test_policies_keep_less_and_less(scan):
    kept = {policy: kept_bytes(policy, scan) for policy in ("none", "save_dots", "save_attention", "full")}
    assert kept["none"] > kept["save_dots"] > kept["save_attention"] > kept["full"], kept
    # Attention's output is as large as the residual stream, and there are three layers.
    stream = 4 * 4 * 16 * 32
    assert kept["save_attention"] - kept["full"] >= 3 * stream


def test_offload_keeps_layer_inputs_in_host_memory():
    loss, state = objective("offload", True)
    text = str(jax.make_jaxpr(jax.grad(loss))(state))
    assert "pinned_host" in text or "Host" in text
    assert "Host" not in str(jax.make_jaxpr(jax.grad(objective("full", True)[0]))(state))


def test_beside_offloaded_inputs_attention_is_saved():
    kept = {policy: kept_bytes(policy, True) for policy in ("full", "save_attention", "save_attention_offload")}
    # `saved_residuals` counts what waits in host memory too.
    assert kept["full"] < kept["save_attention_offload"] == kept["save_attention"]
    loss, state = objective("save_attention_offload", True)
    assert str(jax.make_jaxpr(jax.grad(loss))(state)).count("Host") > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["save_attention", "save_dots"])
@pytest.mark.parametrize("scan", [True, False])
def test_cudnn_attention_runs_forward_once(policy, scan):
    """Its log-sum-exp has no name by which a policy could keep it."""
    config = ModelConfig(
        vocab_size=64, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=64, remat=policy, scan_layers=scan,
        attention_implementation="cudnn",
    )  # fmt: skip
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dtype=jnp.bfloat16)))
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)

    def loss(state, tokens):
        return language_model_loss(nnx.merge(graphdef, state), {"tokens": tokens, "labels": tokens}).total

    with lowering_platform("cuda"):
        text = compile_for_hopper(jax.grad(loss), state, tokens).as_text()
    layers = 1 if scan else config.num_layers
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == layers
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == layers
