"""Adapters on a packed base (QLoRA, arXiv:2305.14314): training equals that on its dequantized values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxstack.compress.after_training.run import compress_leaves
from jaxstack.compress.config import Recipe, choose_methods
from jaxstack.compress.matrix import compressible_weights
from jaxstack.config.loader import build_component
from jaxstack.models import AdapterRule, ModelConfig, Transformer, add_adapters
from pallas_kernels.weight_only.packed import is_packed

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "num_layers": 2,
    "scan_layers": False,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
STEPS = 5


def make_models(moe: dict[str, Any] | None, rule: dict[str, Any]) -> tuple[Transformer, Transformer]:
    """A model with adapters on packed layers, and the same on their dequantized values."""
    config = build_component(ModelConfig, {**SHAPE, "moe": moe} if moe else SHAPE, "model")
    plain = Transformer(config, nnx.Rngs(0))
    recipe = build_component(Recipe, {"layers": [{"path": "^decoder/", **rule}]}, "recipe")
    layouts = compressible_weights(config)
    graphdef, state = nnx.split(plain)
    flat = {"/".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(state)}
    leaves = {name: variable[...] for name, (_, variable) in flat.items()}
    packed = compress_leaves(leaves, choose_methods(recipe, layouts), layouts)

    def with_values(values: dict[str, Any]) -> Transformer:
        changed = [(path, variable.replace(values[name])) for name, (path, variable) in flat.items()]
        model = nnx.merge(graphdef, nnx.from_flat_state(changed))
        return add_adapters(model, [AdapterRule(path="attention|mlp", rank=4)], nnx.Rngs(1))

    dense = {name: w.dense() if is_packed(w) else w for name, w in packed.items()}
    return with_values(packed), with_values(dense)


def train(model: Transformer) -> tuple[list[float], Any]:
    """The losses of a few steps that train the adapters, and the memory analysis of the compiled step."""
    graphdef, adapters, base = nnx.split(model, lambda path, _: "adapter" in path, ...)
    optimizer = optax.adamw(0.02)

    @jax.jit
    def step(adapters: Any, moments: Any, base: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(adapters: Any) -> jax.Array:
            logits = nnx.merge(graphdef, adapters, base)(tokens[:, :-1])
            logits = logits[0] if isinstance(logits, tuple) else logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = jax.value_and_grad(loss)(adapters)
        changes, moments = optimizer.update(gradient, moments, adapters)
        return optax.apply_updates(adapters, changes), moments, value

    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 17)), jnp.int32)
    moments = optimizer.init(adapters)
    compiled = step.lower(adapters, moments, base, tokens).compile()
    losses = []
    for _ in range(STEPS):
        adapters, moments, value = compiled(adapters, moments, base, tokens)
        losses.append(float(value))
    return losses, compiled.memory_analysis()


@pytest.mark.longer
@pytest.mark.parametrize(
    ("moe", "rule", "most"),
    [
        pytest.param(None, {"method": "rtn", "bits": 8}, 0.27, id="dense int8"),
        pytest.param(MOE, {"method": "rtn", "bits": 4, "group_size": 32}, 0.27, id="experts int4"),
        pytest.param(MOE, {"method": "fp8"}, 0.27, id="experts fp8", marks=pytest.mark.exhaustive),
        pytest.param(None, {"method": "kmeans", "bits": 4}, 0.27, id="dense table", marks=pytest.mark.exhaustive),
    ],
)
def test_training_on_a_packed_base_is_that_on_its_values(moe, rule, most):
    packed, dense = make_models(moe, rule)
    kernels = [variable.get_value() for _, variable in nnx.to_flat_state(nnx.state(packed))]
    stored = [kernel for kernel in kernels if is_packed(kernel)]
    plain_bytes = 4 * sum(int(np.prod(kernel.shape)) for kernel in stored)
    assert len(stored) == 14
    found, memory = train(packed)
    expected, dense_memory = train(dense)
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert expected[-1] < expected[0] - 0.05
    saved = dense_memory.argument_size_in_bytes - memory.argument_size_in_bytes
    assert saved >= (1 - most) * plain_bytes
    # XLA on a CPU writes values of some matrices for their products, which takes less than was saved.
    assert memory.temp_size_in_bytes - dense_memory.temp_size_in_bytes < saved
