"""What XLA makes of a decoding step for H200s: weights and caches are read where they lie."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxstack.functional.module import FunctionalModule
from jaxstack.models import ModelConfig, Transformer
from jaxstack.parallel import AxisRules, logical_axis_rules, make_rules
from tests.hopper import compile_for_hopper, hopper_array, hopper_mesh

BATCH, ROOM = 16, 512


def compiled_step(rules: AxisRules) -> str:
    """The program of one step of an unrolled model in bfloat16."""
    config = ModelConfig(
        vocab_size=4096, hidden_size=1024, num_layers=2, num_heads=8, num_kv_heads=4, scan_layers=False,
        layer_types=("sliding_attention", "full_attention"), sliding_window=256,
    )  # fmt: skip
    module = FunctionalModule(lambda rngs: Transformer(config, rngs, dtype=jnp.bfloat16))

    def place(x: jax.ShapeDtypeStruct, spec: jax.P) -> jax.ShapeDtypeStruct:
        return hopper_array(x.shape, jnp.bfloat16 if x.ndim > 1 else x.dtype, rules.mesh, spec)

    params = jax.tree.map(place, module.abstract_params, module.parameter_specs(rules))
    cache = jax.eval_shape(lambda: module.merge(params, {}).make_cache(BATCH, ROOM))
    cache = jax.tree.map(
        lambda x: hopper_array(x.shape, x.dtype, rules.mesh, jax.P("data", *["tensor"] * (x.ndim == 4))), cache
    )
    row = hopper_array((BATCH, 1), jnp.int32, rules.mesh, jax.P("data"))

    def step(params, token, position, cache):
        with logical_axis_rules(rules):
            logits, cache = module.merge(params, {}).decode(token, position, cache)
        return jnp.argmax(logits[:, 0], -1), cache

    return compile_for_hopper(jax.jit(step, donate_argnums=3), params, row, row, cache, mesh=rules.mesh).as_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_step_copies_no_cache_and_sends_one_sum_a_sublayer(tensor):
    axes = {"pipeline": 1, "data": tensor, "fsdp": 1, "expert": 1, "context": 1, "tensor": tensor}
    program = compiled_step(make_rules(hopper_mesh(axes)))
    rows, heads = BATCH // tensor, 4 // tensor
    for slots in (256, 512):
        shape = re.escape(f"bf16[{rows},{heads},{slots},128]")
        made = re.findall(rf"= {shape}\S* ([\w-]+)\(", program)
        assert "scatter" in made and not {"copy", "transpose", "all-gather", "concatenate"} & set(made), made
    sums = re.findall(r"all-reduce(?:-start)?\(", program)
    others = re.findall(r"(?:reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", program)
    # The embedding's rows, then one after attention and one after the MLP of each layer.
    assert (len(sums), others) == ((5, []) if tensor > 1 else (0, []))
