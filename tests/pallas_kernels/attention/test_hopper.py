"""What XLA makes of attention when it is compiled for an H200, which needs no GPU."""

import jax
import jax.numpy as jnp

from pallas_kernels import flash_attention, lowering_platform, save_attention
from tests.hopper import compile_for_hopper


def shapes(length=512, dtype=jnp.bfloat16):
    q = jax.ShapeDtypeStruct((2, length, 8, 128), dtype)
    k = jax.ShapeDtypeStruct((2, length, 2, 128), dtype)
    return q, k, k


def compiled(function, *arguments):
    with lowering_platform("cuda"):
        return compile_for_hopper(jax.grad(function, argnums=(0, 1, 2)), *arguments)


def test_cudnn_runs_forward_once_and_backward_once():
    def layer(q, k, v):
        return flash_attention(q, k, v, window=100).astype(jnp.float32).sum()

    text = compiled(jax.checkpoint(layer, policy=save_attention), *shapes()).as_text()
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1


def test_chunked_memory_is_linear_in_the_length():
    def layer(q, k, v):
        return flash_attention(q, k, v, implementation="xla").astype(jnp.float32).sum()

    sizes = [compiled(layer, *shapes(n)).memory_analysis().temp_size_in_bytes for n in (4096, 8192)]
    assert sizes[1] < 2.1 * sizes[0]
