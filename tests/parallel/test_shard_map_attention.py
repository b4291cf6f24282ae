"""Attention on each device's own rows and heads: the same numbers as on one device, and nothing moves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxstack.observe.collectives import collectives
from jaxstack.parallel import ParallelConfig, logical_axis_rules, make_mesh, make_rules, shard, with_local_heads
from pallas_kernels import flash_attention, lowering_platform, record_choices, save_attention
from tests.compilation import fully_optimized
from tests.hopper import hopper_array, hopper_topology

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")


def rules(data=1, fsdp=1, tensor=1, devices=None, **more):
    devices = (devices or jax.devices())[: data * fsdp * tensor]
    return make_rules(make_mesh(ParallelConfig(data=data, fsdp=fsdp, tensor=tensor), devices), **more)


def arrays(batch, heads, kv_heads, length=12, head_dim=4):
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = (heads, kv_heads, kv_heads)
    q, k, v = (jax.random.normal(key, (batch, length, n, head_dim)) for key, n in zip(keys, sizes, strict=True))
    ids = jnp.broadcast_to(jnp.arange(length) // 5, (batch, length)) + jnp.arange(batch)[:, None] % 2
    return q, k, v, ids


def attend(q, k, v, ids):
    return flash_attention(q, k, v, segment_ids=ids, window=7, implementation="xla_dense")


def loss(q, k, v, ids):
    return (with_local_heads(attend, q, k, v, ids) ** 2).sum()


def gradients(layout, q, k, v, ids):
    """The loss and its gradients with these rules, and without."""
    function = jax.value_and_grad(loss, argnums=(0, 1, 2))

    @jax.jit
    def sharded(*arrays):
        with logical_axis_rules(layout):
            return function(*arrays)

    return sharded(q, k, v, ids), jax.jit(function)(q, k, v, ids)


@pytest.mark.parametrize(
    ("degrees", "batch", "heads", "kv_heads"),
    [
        ((2, 2, 2), 4, 4, 2),  # all divide
        ((1, 1, 4), 1, 8, 2),  # each kv head serves two devices
        ((2, 1, 4), 2, 12, 6),  # a device's three query heads read two kv heads, one of them for two of the three
        ((1, 2, 4), 2, 4, 1),  # one kv head
        ((1, 2, 3), 2, 4, 2),  # the heads do not divide: each device has all of them
        ((4, 1, 1), 2, 4, 2),  # the batch does not divide
    ],
)
def test_the_same_output_and_gradients_as_on_one_device(degrees, batch, heads, kv_heads):
    got, wanted = gradients(rules(*degrees), *arrays(batch, heads, kv_heads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, wanted)


def test_a_device_gets_its_own_rows_and_heads():
    shapes = []

    def note(q, k, v, ids):
        shapes.append((q.shape, k.shape, ids.shape))
        return q

    def run(*arrays):
        with logical_axis_rules(rules(2, 1, 4)):
            return with_local_heads(note, *arrays)

    jax.eval_shape(jax.jit(run), *arrays(4, 8, 2))
    assert shapes == [((2, 12, 2, 4), (2, 12, 1, 4), (2, 12))]


def test_a_plain_call_where_nothing_is_sharded():
    inputs = arrays(2, 4, 2)
    assert "shard_map" not in str(jax.make_jaxpr(loss)(*inputs))
    with logical_axis_rules(rules(1, 1, 1)):
        assert "shard_map" not in str(jax.make_jaxpr(loss)(*inputs))


def test_rules_that_split_the_heads_otherwise_are_followed():
    layout = rules(2, 1, 2, overrides={"act_kv_heads": (), "act_heads": ("data", "tensor"), "batch": ()})
    got, wanted = gradients(layout, *arrays(1, 8, 4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, wanted)


def test_inside_a_shard_map_that_has_taken_some_axes():
    """As in a pipeline: the surrounding map is manual over one axis, the worker over the others."""
    layout = rules(2, 2, 2)
    inputs = arrays(4, 4, 2)

    def outer(*arrays):
        with logical_axis_rules(layout.within(["data"])):
            return with_local_heads(attend, *arrays)

    rows = P("data")
    mapped = jax.shard_map(
        outer, mesh=layout.mesh, in_specs=(rows,) * 4, out_specs=rows, axis_names={"data"}, check_vma=False
    )
    got = jax.jit(jax.grad(lambda *x: (mapped(*x) ** 2).sum(), argnums=(0, 1, 2)))(*inputs)
    wanted = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, wanted)


# --- compiled for H200s -------------------------------------------------------------------------------------------

LAYERS = 4
BATCH = 4
LENGTH = 512
D = 64
H = 64


@fully_optimized()
def compiled_layers(implementation, heads, kv_heads, policy=save_attention):
    """Gradients of a scan over rematerialised attention layers, of data 2 x tensor 2: (custom calls, collectives)."""
    layout = rules(2, 1, 2, devices=list(hopper_topology(4).devices))
    mesh = layout.mesh

    def layer(x, weights):
        q, k = (jnp.einsum("btd,dnh->btnh", x, weights[name]) for name in "qk")
        q = shard(q, "batch", "length", "act_heads", "act_head_dim")
        k = shard(k, "batch", "length", "act_kv_heads", "act_head_dim")
        out = with_local_heads(lambda q, k, v: flash_attention(q, k, v, implementation=implementation), q, k, k)
        return x + shard(jnp.einsum("btnh,dnh->btd", out, weights["q"]), "batch", "length", "act_embed"), None

    def total(weights, x):
        with logical_axis_rules(layout):
            x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy, prevent_cse=False), x, weights)
            return (x.astype(jnp.float32) ** 2).mean()

    weights = {
        name: hopper_array((LAYERS, D, n, H), jnp.bfloat16, mesh, P(None, *layout.spec((None, axis), (D, n))))
        for name, n, axis in (("q", heads, "heads"), ("k", kv_heads, "kv_heads"))
    }
    x = hopper_array((BATCH, LENGTH, D), jnp.bfloat16, mesh, P("data"))
    with lowering_platform("cuda"), record_choices() as choices:
        text = jax.jit(jax.grad(total)).lower(weights, x).compile().as_text()
    assert {choice.backend for choice in choices} == {implementation}
    lines = [line for line in text.splitlines() if re.search(r'custom_call_target="(mosaic|triton|__cudnn)', line)]
    return lines, collectives(text, dict(mesh.shape))


IMPLEMENTATIONS = [pytest.param("mosaic", marks=needs_mosaic), "cudnn"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_kernels_run_on_local_heads_and_the_policy_keeps_their_outputs(implementation):
    lines, moved = compiled_layers(implementation, 4, 2)
    assert lines and all(f"bf16[{BATCH // 2},{LENGTH},2,{H}]" in line or "cudnn" in line for line in lines)
    assert not any("rematted_computation" in line for line in lines), "no forward is computed again"
    # What Megatron's split implies and no more: the output forward, the two inputs backward, the weights over data.
    rows = 2 * (BATCH // 2) * LENGTH * D
    assert {row.kind for row in moved} == {"all-reduce"}
    sizes = sum(row.payload_bytes * row.calls for row in moved if row.axes == ("tensor",))
    assert sizes == 3 * LAYERS * rows


def test_without_the_policy_the_forward_is_computed_again():
    lines, _ = compiled_layers("cudnn", 4, 2, policy=None)
    assert any("rematted_computation" in line for line in lines)


@pytest.mark.exhaustive
@needs_mosaic
def test_one_kv_head_costs_the_reduction_of_its_gradient_only():
    lines, moved = compiled_layers("mosaic", 4, 1)
    assert lines
    rows = 2 * (BATCH // 2) * LENGTH
    tensor = sum(row.payload_bytes * row.calls for row in moved if row.axes == ("tensor",))
    assert tensor <= LAYERS * rows * (2 * D + 2 * H), "x forward; x, and keys with values, backward"
    assert {row.kind for row in moved} == {"all-reduce"}
