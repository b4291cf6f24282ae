"""Attention on an H200, without one: which backend is chosen, how it lowers, and what the compiler makes of it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import flash_attention, lowering_platform, record_choices, save_attention
from tests.hopper import compile_for_hopper, hopper_array, hopper_mesh

pytestmark = pytest.mark.compiles_for_gpu

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
KERNEL = "mosaic_gpu_v2"


def shapes(length=512, dtype=jnp.bfloat16, key_length=None, head_dim=128):
    q = jax.ShapeDtypeStruct((2, length, 8, head_dim), dtype)
    k = jax.ShapeDtypeStruct((2, key_length or length, 2, head_dim), dtype)
    return q, k, k


def compiled(function, *arguments):
    with lowering_platform("cuda"):
        return compile_for_hopper(jax.grad(function, argnums=(0, 1, 2)), *arguments)


# --- the default choice -------------------------------------------------------------------------------------------

FUSED = ("mosaic", "cudnn", "triton")
CALLS = {
    "causal": (shapes(4096), {}, FUSED[:2]),
    "full": (shapes(4096), {"causal": False}, FUSED[:2]),
    "window": (shapes(4096), {"window": 512}, FUSED[:2]),
    "packed": (shapes(4096), {"segment_ids": jnp.zeros((2, 4096), jnp.int32)}, ("mosaic",)),
    "soft_cap": (shapes(4096), {"soft_cap": 30.0}, ("mosaic",)),
    "sinks": (shapes(4096, head_dim=64), {"window": 128, "sinks": jnp.zeros(8)}, ("mosaic",)),
    "log_sum_exp": (shapes(4096), {"return_lse": True}, ("mosaic",)),
    "fewer_queries": (shapes(1024, key_length=4096), {}, ("mosaic",)),
    "head_dim_104": (shapes(4096, head_dim=104), {}, ("cudnn",)),
    "head_dim_100": (shapes(4096, head_dim=100), {}, ("triton", "xla")),
    "head_dim_256": (shapes(4096, head_dim=256), {}, ("cudnn",)),
    "head_dim_256_full": (shapes(4096, head_dim=256), {"causal": False}, ("mosaic",)),
    "head_dim_256_window": (shapes(4096, head_dim=256), {"window": 512}, ("mosaic",)),
    "head_dim_512": (shapes(4096, head_dim=512), {}, ("triton", "xla")),
    "float16": (shapes(4096, jnp.float16), {}, FUSED[:2]),
    "float32": (shapes(4096, jnp.float32), {}, ("xla",)),
    "float32_short": (shapes(256, jnp.float32), {}, ("xla_dense",)),
}


@needs_mosaic
@pytest.mark.parametrize("name", CALLS)
def test_the_default_choice(name):
    arrays, options, backends = CALLS[name]
    with lowering_platform("cuda"), record_choices() as choices:
        jax.eval_shape(lambda q, k, v: flash_attention(q, k, v, **options), *arrays)
    assert choices[0].backend in backends, str(choices[0])


# --- cuDNN and XLA ------------------------------------------------------------------------------------------------


def test_cudnn_runs_forward_once_and_backward_once():
    def layer(q, k, v):
        return flash_attention(q, k, v, window=100, implementation="cudnn").astype(jnp.float32).sum()

    text = compiled(jax.checkpoint(layer, policy=save_attention), *shapes()).as_text()
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "implementation",
    [pytest.param("xla", marks=pytest.mark.exhaustive), pytest.param("mosaic", marks=needs_mosaic)],
)
def test_memory_is_linear_in_the_length(implementation):
    def layer(q, k, v):
        return flash_attention(q, k, v, implementation=implementation).astype(jnp.float32).sum()

    sizes = [compiled(layer, *shapes(n, head_dim=64)).memory_analysis().temp_size_in_bytes for n in (4096, 8192)]
    assert sizes[1] < 2.1 * sizes[0]


# --- our kernels --------------------------------------------------------------------------------------------------


def total(q, k, v):
    out, lse = flash_attention(q, k, v, window=100, return_lse=True, implementation="mosaic")
    return (out.astype(jnp.float32) ** 2).sum() + lse.sum()


def over_layers(q, k, v):
    def layer(x, kv):
        return x + flash_attention(x, *kv, implementation="mosaic"), None

    kept = jax.checkpoint(layer, policy=save_attention, prevent_cse=False)
    return (jax.lax.scan(kept, q, (k, v))[0].astype(jnp.float32) ** 2).sum()


def stacked(x):
    return jax.ShapeDtypeStruct((3, *x.shape), x.dtype)


def lowered_kernels(function, *arguments):
    with lowering_platform("cuda"):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text().count(KERNEL)


Q, K, V = shapes(256, head_dim=64)


@needs_mosaic
def test_lowers_under_jit_and_grad():
    forward = lowered_kernels(total, Q, K, V)
    both = lowered_kernels(jax.grad(total, argnums=(0, 1, 2)), Q, K, V)
    assert forward == 1 and both > forward


@pytest.mark.exhaustive
@needs_mosaic
@pytest.mark.parametrize(("packed", "kernels"), [(False, 2), (True, 4)])
def test_the_backward_of_wide_heads_fits_in_shared_memory(packed, kernels):
    """One kernel computes all gradients; with segment ids it would not fit, and dQ, dK and dV have one each."""
    ids = jnp.zeros((2, 256), jnp.int32) if packed else None

    def total(q, k, v):
        return flash_attention(q, k, v, segment_ids=ids, implementation="mosaic").astype(jnp.float32).sum()

    assert lowered_kernels(jax.grad(total, argnums=(0, 1, 2)), *shapes(256, head_dim=256)) == kernels


@pytest.mark.exhaustive
@needs_mosaic
def test_lowers_under_vmap_as_one_launch_each():
    gradient = jax.grad(total, argnums=(0, 1, 2))
    assert lowered_kernels(jax.vmap(gradient), *map(stacked, (Q, K, V))) == lowered_kernels(gradient, Q, K, V)


@needs_mosaic
def test_lowers_under_scan_and_checkpoint_without_a_second_forward():
    both = lowered_kernels(jax.grad(total, argnums=(0, 1, 2)), Q, K, V)
    layers = jax.grad(over_layers, argnums=(0, 1, 2))
    assert lowered_kernels(layers, Q, stacked(K), stacked(V)) == both
    again = jax.value_and_grad(jax.checkpoint(total), argnums=(0, 1, 2))
    assert lowered_kernels(again, Q, K, V) == both + 1


@pytest.mark.exhaustive
@needs_mosaic
def test_lowers_under_shard_map_over_batch_and_heads():
    mesh = hopper_mesh({"data": 2, "tensor": 2})
    spec = P("data", None, "tensor", None)

    def loss(q, k, v):
        local = jax.shard_map(
            lambda q, k, v: flash_attention(q, k, v, implementation="mosaic"),
            mesh=mesh,
            in_specs=(spec,) * 3,
            out_specs=spec,
            check_vma=False,
        )
        return (local(q, k, v).astype(jnp.float32) ** 2).sum()

    arrays = [hopper_array(x.shape, x.dtype, mesh, spec) for x in (Q, K, V)]
    both = lowered_kernels(jax.grad(total, argnums=(0, 1, 2)), Q, K, V)
    assert lowered_kernels(jax.grad(loss, argnums=(0, 1, 2)), *arrays) == both


@needs_mosaic
def test_every_kernel_multiplies_on_the_tensor_cores(monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    text = compiled(total, Q, K, V).as_text()
    kernels = "".join(capfd.readouterr()).split(".visible .entry")[1:]
    assert len(kernels) == text.count(f'custom_call_target="{KERNEL}"')
    for kernel in kernels:
        assert "wgmma.mma_async" in kernel and "cp.async.bulk.tensor" in kernel
