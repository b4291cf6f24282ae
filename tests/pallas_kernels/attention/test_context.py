"""Attention over a sequence on several devices: the same numbers and gradients as on one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    NotSupported,
    context_attention,
    flash_attention,
    lowering_platform,
    record_choices,
    ring_attention,
    save_attention,
    sequence_order,
    with_whole_sequences,
)
from tests.compilation import run_jitted

METHODS = ("ring", "all_gather", "all_to_all")
LAYOUTS = ("zigzag", "contiguous")
SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
B = 2
T = 48
H = 8


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    names = ("parts", "other")[: len(sizes)]
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def arrays(heads: int = 4, kv_heads: int = 2, length: int = T, dtype=jnp.float32) -> tuple:
    """q, k, v and a cotangent of the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (heads, kv_heads, kv_heads, heads)
    return tuple(jax.random.normal(key, (B, length, n, H), dtype) for key, n in zip(keys, sizes, strict=True))


def documents(length: int = T) -> jax.Array:
    """Segment ids [B, T] of documents that end anywhere."""
    return jnp.cumsum(jax.random.bernoulli(jax.random.key(9), 0.15, (B, length)), axis=1).astype(jnp.int32)


def spread(function, devices: int, layout: str):
    """`function` of a device's parts of arrays [B, T, ...] as one of whole arrays in their order."""
    part = P(None, "parts")

    def whole(*arrays):
        order = sequence_order(arrays[0].shape[1], devices, layout)
        present = [x is not None for x in arrays]
        mapped = jax.shard_map(
            lambda *given: function(*_filled(given, present)),
            mesh=mesh_of(devices), in_specs=(part,) * sum(present), out_specs=part, check_vma=False,
        )  # fmt: skip
        out = mapped(*(x[:, order] for x in arrays if x is not None))
        return out[:, np.argsort(order)]

    return whole


def _filled(given, present):
    found = iter(given)
    return [next(found) if there else None for there in present]


def with_gradients(attention, q, k, v, g):
    """The output and the gradients of sum(output * g)."""

    def total(q, k, v):
        out = attention(q, k, v)
        return (out.astype(jnp.float32) * g).sum(), out

    (_, out), gradients = run_jitted(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True), q, k, v)
    return (out, *gradients)


def assert_as_on_one_device(devices, layout, method, *, heads=(4, 2), length=T, segments=False, **options):
    q, k, v, g = arrays(*heads, length=length)
    ids = documents(length) if segments else None

    def part(q, k, v, ids):
        return context_attention(
            q, k, v, axis_name="parts", method=method, layout=layout, segment_ids=ids, **options
        )  # fmt: skip

    found = with_gradients(lambda q, k, v: spread(part, devices, layout)(q, k, v, ids), q, k, v, g)

    def one(q, k, v):
        return flash_attention(q, k, v, segment_ids=ids, **options, implementation="reference")

    for got, wanted in zip(found, with_gradients(one, q, k, v, g), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("devices", "layout", "method", "options"),
    [
        (4, "zigzag", "ring", {"segments": True}),
        (3, "zigzag", "ring", {"window": 7, "segments": True, "soft_cap": 2.0}),
        (3, "zigzag", "all_gather", {"segments": True}),
        (3, "zigzag", "all_to_all", {"heads": (6, 2), "segments": True}),
        (2, "zigzag", "ring", {"sinks": SINKS}),
        (2, "zigzag", "all_to_all", {"sinks": SINKS, "segments": True}),
    ],
)
def test_the_same_output_and_gradients_as_on_one_device(devices, layout, method, options):
    assert_as_on_one_device(devices, layout, method, **options)


MASKS = (
    {},
    {"segments": True},
    {"window": 7, "segments": True},
    {"window": 20},
    {"window": 45},
    {"causal": False, "segments": True, "scale": 0.5},
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(("devices", "layout", "method"), itertools.product((2, 3, 4, 8), LAYOUTS, METHODS))
def test_every_method_and_mask_on_two_to_eight_devices(devices, layout, method, options):
    assert_as_on_one_device(devices, layout, method, heads=(24, 4) if method == "all_to_all" else (4, 2), **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", METHODS)
def test_a_window_without_causal_needs_whole_sequences(method):
    if method == "all_to_all":
        return assert_as_on_one_device(4, "zigzag", method, causal=False, window=9)
    with pytest.raises(NotSupported, match="all_to_all"):
        assert_as_on_one_device(4, "zigzag", method, causal=False, window=9)


def test_the_log_sum_exp_is_that_of_all_keys_and_differentiable():
    q, k, v, g = arrays()

    def total(attention, q, k, v):
        out, lse = attention(q, k, v)
        return (out * g).sum() + jnp.sin(lse).sum()

    def part(q, k, v):
        out, lse = ring_attention(q, k, v, axis_name="parts", return_lse=True)
        return jnp.concatenate([out, jnp.moveaxis(lse, 1, 2)[..., None]], axis=-1)

    def around(q, k, v):
        joined = spread(part, 4, "zigzag")(q, k, v)
        return joined[..., :-1], jnp.moveaxis(joined[..., -1], 2, 1)

    def one(q, k, v):
        return flash_attention(q, k, v, return_lse=True, implementation="reference")

    found, wanted = (
        run_jitted(jax.grad(lambda *x, f=f: total(f, *x), argnums=(0, 1, 2)), q, k, v) for f in (around, one)
    )
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_in_bfloat16_the_error_is_at_most_twice_that_of_one_device(method):
    q, k, v, g = arrays(length=64, dtype=jnp.bfloat16)

    def part(q, k, v):
        return context_attention(q, k, v, axis_name="parts", method=method)

    def one(q, k, v):
        return flash_attention(q, k, v, implementation="xla")

    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    exact = with_gradients(lambda *x: flash_attention(*x, implementation="reference"), *wide, g)
    errors = [
        [float(jnp.sqrt(jnp.mean((x.astype(jnp.float32) - y) ** 2))) for x, y in zip(found, exact, strict=True)]
        for found in (with_gradients(spread(part, 4, "zigzag"), q, k, v, g), with_gradients(one, q, k, v, g))
    ]
    assert all(ours <= 2 * plain for ours, plain in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("window", [None, pytest.param(7, marks=pytest.mark.exhaustive)])
def test_in_a_branch_that_another_axis_decides(window):
    """As in a stage of a pipeline: half of the devices attend, the others do something else."""
    q, k, v, g = arrays()
    order = sequence_order(T, 4)

    def part(q, k, v):
        def attend():
            return ring_attention(q, k, v, axis_name="parts", window=window)

        out = jax.lax.cond(jax.lax.axis_index("other") == 1, attend, lambda: 0.0 * q)
        return jax.lax.psum(out, "other")

    mapped = jax.shard_map(
        part, mesh=mesh_of(4, 2), in_specs=(P(None, "parts"),) * 3, out_specs=P(None, "parts"), check_vma=False
    )

    def around(q, k, v):
        return mapped(q[:, order], k[:, order], v[:, order])[:, np.argsort(order)]

    found = with_gradients(around, q, k, v, g)
    wanted = with_gradients(lambda *x: flash_attention(*x, window=window, implementation="reference"), q, k, v, g)
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_whole_sequences_of_a_part_of_the_heads():
    q, k, v, _ = arrays(heads=6, kv_heads=2)
    shapes = []

    def note(q, k, v, ids):
        shapes.append((q.shape, k.shape, ids.shape))
        return q * (ids[:, :, None, None] + 1) * jnp.arange(1, T + 1)[None, :, None, None]

    def part(q, k, v, ids):
        return with_whole_sequences(note, q, k, v, ids, axis_name="parts")

    ids = documents()
    out = run_jitted(spread(part, 3, "zigzag"), q, k, v, ids)
    assert shapes[0] == ((B, T, 2, H), (B, T, 2, H), (B, T)), "each of the two kv heads stands there three times"
    np.testing.assert_allclose(out, q * (ids[:, :, None, None] + 1) * np.arange(1, T + 1)[None, :, None, None])


@pytest.mark.parametrize(
    ("devices", "layout", "wanted"),
    [(2, "zigzag", [0, 1, 6, 7, 2, 3, 4, 5]), (2, "contiguous", range(8)), (4, "zigzag", [0, 7, 1, 6, 2, 5, 3, 4])],
)
def test_the_order_of_a_sequence(devices, layout, wanted):
    assert sequence_order(8, devices, layout).tolist() == list(wanted)


def test_a_length_that_the_chunks_do_not_divide():
    with pytest.raises(ValueError, match=r"nearest: 992 or 1008"):
        sequence_order(1000, 8)


@pytest.mark.parametrize(("policy", "hops"), [(save_attention, 3 * 3), (None, 4 * 3)])
def test_a_policy_of_checkpoint_keeps_the_merged_output(policy, hops):
    """Traced for a GPU: three hops forward, of keys backward, and of gradients; three more to go around again."""
    part = P(None, "parts")
    mapped = jax.shard_map(
        lambda q, k, v: ring_attention(q, k, v, axis_name="parts", implementation="xla_dense"),
        mesh=mesh_of(4), in_specs=(part,) * 3, out_specs=part, check_vma=False,
    )  # fmt: skip
    layer = jax.checkpoint(lambda *x: jnp.sin(mapped(*x)), policy=policy)
    with lowering_platform("cuda"):
        text = str(jax.make_jaxpr(jax.grad(lambda *x: layer(*x).sum(), argnums=(0, 1, 2)))(*arrays()[:3]))
    assert text.count("ppermute[") == hops


@pytest.mark.quick
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_the_checks_of_shard_map_accept_the_result(method, layout):
    """`jax.shard_map` checks by default over which axes each array varies; here also over one of the batch."""
    part = P("other", "parts")
    mapped = jax.shard_map(
        lambda q, k, v: context_attention(q, k, v, axis_name="parts", layout=layout, method=method),
        mesh=mesh_of(4, 2), in_specs=(part,) * 3, out_specs=part,
    )  # fmt: skip
    q, k, v, g = arrays()
    shapes = jax.eval_shape(jax.grad(lambda *x: (mapped(*x) * g).sum(), argnums=(0, 1, 2)), q, k, v)
    assert [x.shape for x in shapes] == [q.shape, k.shape, v.shape]


# --- the choice -----------------------------------------------------------------------------------------------------


def chosen(devices: int, length: int, heads: int, kv_heads: int, **options) -> str:
    """The method that such a call gets; nothing is computed."""
    shapes = [jax.ShapeDtypeStruct((1, length, n, 64), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)]
    with record_choices() as choices:
        mapped = jax.shard_map(
            lambda q, k, v: context_attention(q, k, v, axis_name="parts", **options),
            mesh=mesh_of(devices), in_specs=(P(None, "parts"),) * 3, out_specs=P(None, "parts"), check_vma=False,
        )  # fmt: skip
        jax.eval_shape(mapped, *shapes)
    return next(choice.backend for choice in choices if choice.operation == "context_attention")


def test_long_sequences_go_around_and_short_ones_are_gathered():
    assert chosen(4, 32768, 16, 16) == "ring"
    assert chosen(4, 8192, 16, 4) == "ring", "fewer key heads, shorter hops"
    assert chosen(4, 8192, 16, 16) == "all_to_all", "(16 + 16) / 4 heads are less than 16"
    assert chosen(2, 1024, 16, 4) == "all_gather"
    assert chosen(8, 2048, 12, 12) == "all_gather", "12 heads are not for 8 devices"


def test_a_window_is_fetched_from_neighbours_unless_it_reaches_nearly_everything():
    assert chosen(4, 2048, 16, 16, window=100) == "ring"
    assert chosen(4, 2048, 16, 16, window=1900) == "all_gather"


def test_what_was_asked_for_by_name_never_falls_back():
    with pytest.raises(NotSupported, match="divisible by the 8 devices of the axis; possible: 1, 2, 3, 4, 6, 12"):
        chosen(8, 2048, 12, 12, method="all_to_all")
    with pytest.raises(NotSupported, match="ring_attention|did you mean 'ring'"):
        chosen(2, 2048, 4, 4, method="rang")
    with pytest.raises(NotSupported, match="cannot compute the gradients for a part"):
        chosen(2, 2048, 4, 4, method="ring", implementation="reference")


@pytest.mark.usefixtures("unchecked_shapes")
def test_arguments_are_checked():
    with pytest.raises(ValueError, match="layout must be one of zigzag, contiguous"):
        chosen(2, 2048, 4, 4, layout="zag")
    with pytest.raises(ValueError, match="divisible by 2 x 2"):
        chosen(2, 2046, 4, 4)
    with pytest.raises(ValueError, match="segment_ids must be integers"):
        chosen(2, 2048, 4, 4, segment_ids=jnp.zeros((1, 2048), jnp.int32))
