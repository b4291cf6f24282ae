"""Attention over several devices to keys that each expands from what was sent: the same numbers as on one device."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import KeySource, context_attention, flash_attention, lowering_platform, sequence_order
from pallas_kernels.attention.context import ContextRequest, sends_source
from pallas_kernels.attention.context_layout import LINK_BANDWIDTH, NETWORK_BANDWIDTH
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.partial_attention import PartOptions
from tests.compilation import run_jitted
from tests.pallas_kernels.attention.test_context import LAYOUTS, documents, mesh_of

DEVICES = 4
B = 2
T = 48
N = 4
NOPE = 8
ROPE = 4
V = 6
RANK = 10


def expand(weights, latent):
    """As in latent attention: keys of each head with shared channels, and narrower values."""
    expanded = jnp.einsum("bsr,nrc->bsnc", latent[..., :RANK], weights)
    shared = jnp.broadcast_to(latent[..., None, RANK:], (*expanded.shape[:3], ROPE))
    return jnp.concatenate([expanded[..., :NOPE], shared], -1), expanded[..., NOPE:]


def arrays() -> tuple:
    """q, latent, the expansion's weights, and a cotangent of the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (B, T, N, NOPE + ROPE), (B, T, RANK + ROPE), (N, RANK, NOPE + V), (B, T, N, V)
    q, latent, weights, g = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return q, latent, weights * RANK**-0.5, g


def with_gradients(attention, q, latent, weights, g):
    """The output and the gradients of sum(output * g)."""

    def total(*given):
        out = attention(*given)
        return (out * g).sum(), out

    (_, out), gradients = run_jitted(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True), q, latent, weights)
    return (out, *gradients)


def over_devices(layout: str, ids, *, check_vma: bool = False, bandwidth: float = LINK_BANDWIDTH, **options):
    """Attention of whole arrays, computed on devices that each hold a part of the sequence."""
    order = sequence_order(T, DEVICES, layout)
    part = P(None, "parts")

    def attend(q, latent, ids, weights):
        source = KeySource((latent,), expand, weights, bandwidth)
        return context_attention(q, source, axis_name="parts", layout=layout, segment_ids=ids, **options)

    mapped = jax.shard_map(
        attend, mesh=mesh_of(DEVICES), in_specs=(part, part, part, P()), out_specs=part, check_vma=check_vma
    )

    def whole(q, latent, weights):
        given = None if ids is None else ids[:, order]
        return mapped(q[:, order], latent[:, order], given, weights)[:, np.argsort(order)]

    return whole


def assert_as_on_one_device(layout: str, ids, **options) -> None:
    found = with_gradients(over_devices(layout, ids, **options), *arrays())
    window = options.get("window")

    def one(q, latent, weights):
        return flash_attention(
            q, *expand(weights, latent), causal=options.get("causal", True), window=window, segment_ids=ids,
            implementation="reference",
        )  # fmt: skip

    for got, wanted in zip(found, with_gradients(one, *arrays()), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-5)


def test_the_ring_gives_the_output_and_gradients_of_one_device():
    assert_as_on_one_device("zigzag", documents(), method="ring")


def test_gathered_latents_give_the_output_and_gradients_of_one_device():
    assert_as_on_one_device("zigzag", documents(), method="all_gather")


MASKS = ({}, {"segments": True}, {"window": 7, "segments": True}, {"causal": False})


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(("layout", "method"), itertools.product(LAYOUTS, ("ring", "all_gather", "all_to_all")))
def test_every_method_layout_and_mask(layout, method, options):
    ids = documents() if options.get("segments") else None
    options = {name: value for name, value in options.items() if name != "segments"}
    assert_as_on_one_device(layout, ids, method=method, **options)


SENT = re.compile(r"\w+\[([\d,]+)\]\S* = (ppermute|all_gather)\[")


def received(method: str, **options) -> set[tuple[str, str]]:
    """(operation, shape) of what a device receives in the forward and the backward, traced for a GPU."""
    q, latent, weights, g = arrays()
    attention = over_devices("zigzag", None, method=method, implementation="xla_dense", **options)
    with lowering_platform("cuda"):
        traced = jax.make_jaxpr(jax.grad(lambda *x: (attention(*x) * g).sum(), argnums=(0, 1, 2)))(q, latent, weights)
    return {(name, shape) for shape, name in SENT.findall(str(traced))}


LATENT = f"{T // DEVICES},{RANK + ROPE}"
KEYS = f"{T // DEVICES},{N},{NOPE + ROPE}"


def test_a_ring_sends_the_latent_unless_keys_travel_unnoticed():
    assert received("ring") == {("ppermute", f"{B},{LATENT}")}
    assert received("ring", bandwidth=1e15) == {("ppermute", f"{2 * B},{KEYS}")}, "keys and values as one message"


def test_the_latent_is_gathered_unless_its_expansion_takes_longer():
    assert received("all_gather") == {("all_gather", f"{DEVICES * B},{LATENT}")}
    assert received("all_gather", bandwidth=1e18) == {("all_gather", f"{DEVICES * B},{KEYS}")}


@pytest.mark.quick
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_the_checks_of_shard_map_accept_the_result(method):
    attention = over_devices("zigzag", None, method=method, check_vma=True)
    q, latent, weights, g = arrays()
    shapes = jax.eval_shape(jax.grad(lambda *x: (attention(*x) * g).sum(), argnums=(0, 1, 2)), q, latent, weights)
    assert [x.shape for x in shapes] == [q.shape, latent.shape, weights.shape]


@pytest.mark.parametrize(
    ("tokens", "bandwidth", "latents"),
    [
        (3000, LINK_BANDWIDTH, True),
        (3600, LINK_BANDWIDTH, False),
        (23000, NETWORK_BANDWIDTH, True),
        (24000, NETWORK_BANDWIDTH, False),
    ],
)
def test_how_long_a_ring_sends_the_latents_of_deepseek_v3(tokens, bandwidth, latents):
    """128 heads of 128 + 64 channels, a latent of 512; nothing is computed."""
    shapes = (1, tokens, 128, 192), (1, tokens, 576), (128, 512, 256)

    def decide(q, latent, weights):
        k = jax.ShapeDtypeStruct(q.shape, q.dtype)
        request = ContextRequest(
            q, KeySource((latent,), expand, weights, bandwidth), k, None, "context", 4, "zigzag", Mask(), PartOptions()
        )  # fmt: skip
        assert sends_source(request, overlaps=True) == latents
        assert sends_source(request, overlaps=False), "an all-gather hides nothing"

    jax.eval_shape(decide, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
