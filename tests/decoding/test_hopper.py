"""What XLA makes of a decoding step for H200s: weights and caches are read where they lie."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxstack.decoding.decode import Decoder
from jaxstack.decoding.sampling import Sampling
from jaxstack.functional.module import FunctionalModule
from jaxstack.models import ModelConfig, Transformer
from jaxstack.parallel import AxisRules, make_rules
from pallas_kernels import lowering_platform
from tests.hopper import compile_for_hopper, hopper_array, hopper_mesh
from tests.pallas_kernels.triton_interpreter import needs_triton

BATCH, ROOM = 16, 512


def compiled_steps(rules: AxisRules, steps: int = 1, batch: int = BATCH) -> str:
    """The program of a few steps of an unrolled model in bfloat16."""
    config = ModelConfig(
        vocab_size=4096, hidden_size=1024, num_layers=2, num_heads=8, num_kv_heads=4, scan_layers=False,
        layer_types=("sliding_attention", "full_attention"), sliding_window=256,
    )  # fmt: skip
    module = FunctionalModule(lambda rngs: Transformer(config, rngs, dtype=jnp.bfloat16))

    def place(x: jax.ShapeDtypeStruct, spec: jax.P) -> jax.ShapeDtypeStruct:
        return hopper_array(x.shape, jnp.bfloat16 if x.ndim > 1 else x.dtype, rules.mesh, spec)

    params = jax.tree.map(place, module.abstract_params, module.parameter_specs(rules))
    decoder = Decoder.__new__(Decoder)  # the constructor casts arrays, of which there are none here
    decoder.module, decoder.rules, decoder._vocab_size = module, rules, None
    cache = jax.eval_shape(lambda: module.merge(params, {}).make_cache(batch, ROOM))
    cache = jax.tree.map(
        lambda x: hopper_array(x.shape, x.dtype, rules.mesh, jax.P("data", *["tensor"] * (x.ndim == 4))), cache
    )
    row, number = hopper_array((batch,), jnp.int32, rules.mesh), hopper_array((), jnp.int32, rules.mesh)
    program = functools.partial(decoder._decode_steps, count=steps, sampling=Sampling(temperature=0))
    arguments = (params, {}, row, row, hopper_array((batch,), jnp.uint32, rules.mesh), number, cache)
    with lowering_platform("cuda"), jax.set_mesh(rules.mesh):
        return compile_for_hopper(jax.jit(program, donate_argnums=6), *arguments, mesh=rules.mesh).as_text()


@needs_triton
@pytest.mark.exhaustive
def test_eight_steps_are_one_loop_whose_attention_reads_what_is_filled():
    """Two rows: no product of a matrix and a row is written to memory."""
    axes = {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    program = compiled_steps(make_rules(hopper_mesh(axes)), steps=8, batch=2)
    assert program.count(" while(") == program.count('"known_trip_count":{"n":"8"}') == 1
    assert program.count('custom_call_target="triton_kernel_call_ffi"') == 2, "ranges and their sum in the full layer"
    loop = max(program.split("\n\n"), key=lambda text: text.count("gemm_fusion") * ("ENTRY" not in text))
    launches = len(re.findall(r" = .* (?:fusion|custom-call|copy)\(", loop))
    assert launches <= 45, launches
    made = re.findall(r"= bf16\[2,4,(?:256|512),128\]\S* ([\w-]+)\(", loop)
    assert not {"copy", "transpose", "concatenate"} & set(made), made


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_step_copies_no_cache_and_sends_one_sum_a_sublayer(tensor):
    axes = {"pipeline": 1, "data": tensor, "fsdp": 1, "expert": 1, "context": 1, "tensor": tensor}
    program = compiled_steps(make_rules(hopper_mesh(axes)))
    rows, heads = BATCH // tensor, 4 // tensor
    for slots in (256, 512):
        shape = re.escape(f"bf16[{rows},{heads},{slots},128]")
        made = re.findall(rf"= {shape}\S* ([\w-]+)\(", program)
        assert "scatter" in made and not {"copy", "transpose", "all-gather", "concatenate"} & set(made), made
    sums = re.findall(r"all-reduce(?:-start)?\(", program)
    others = re.findall(r"(?:reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", program)
    # The embedding's rows, then one after attention and one after the MLP of each layer.
    assert (len(sums), others) == ((5, []) if tensor > 1 else (0, []))
