"""Attention over four H200s as compiled for them: what is sent, and that the ring sends while it computes."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxstack.observe.collectives import collectives
from pallas_kernels import KeySource, context_attention, lowering_platform
from tests.compilation import fully_optimized
from tests.hopper import hopper_array, hopper_mesh

pytestmark = pytest.mark.compiles_for_gpu

N = 4
B = 2
T = 512
HEADS = 8
KV_HEADS = 2
H = 64
"""Devices, and the shape of one device's part."""
LARGE = 1, 8192, 32, 8, 128
"""B, T, N, K, H of a part whose hops XLA does not combine."""
KEYS = B * T * KV_HEADS * H
"""Numbers in a device's keys."""


@fully_optimized()
@functools.cache
def compiled(
    method: str, *, gradient: bool, implementation: str, shape=(B, T, HEADS, KV_HEADS, H), project=False, **options
):
    """The program of attention, with `project` also of the output projection, or of their gradients."""
    rows, length, heads, kv_heads, width = shape
    mesh = hopper_mesh({"context": N})
    part = P(None, "context")
    attention = jax.shard_map(
        lambda q, k, v: context_attention(
            q, k, v, axis_name="context", method=method, implementation=implementation, **options
        ),
        mesh=mesh, in_specs=(part,) * 3, out_specs=part, check_vma=False,
    )  # fmt: skip

    def layer(q, k, v, weight):
        out = attention(q, k, v)
        return jnp.einsum("btnh,nhd->btd", out, weight) if project else out

    def gradients(q, k, v, weight):
        out, pullback = jax.vjp(layer, q, k, v, weight)
        return pullback(jnp.sin(out))

    sizes = (heads, kv_heads, kv_heads)
    arrays = [hopper_array((rows, N * length, n, width), jnp.bfloat16, mesh, part) for n in sizes]
    arrays.append(hopper_array((heads, width, heads * width), jnp.bfloat16, mesh))
    with lowering_platform("cuda"):
        return jax.jit(gradients if gradient else layer).lower(*arrays).compile()


@functools.cache
def sent(method: str, gradient: bool, **options) -> Counter:
    return payloads(compiled(method, gradient=gradient, implementation="xla_dense", **options))


def payloads(program) -> Counter:
    """(kind, dtype) -> payload bytes on each device."""
    found: Counter = Counter()
    for row in collectives(program.as_text(), {"context": N}):
        found[row.kind, row.dtype] += row.payload_bytes * row.calls
    return found


def test_the_ring_makes_one_hop_less_than_there_are_devices():
    assert sent("ring", False) == {("collective-permute", "bf16"): (N - 1) * 2 * 2 * KEYS}


@pytest.mark.exhaustive
def test_in_the_backward_keys_go_around_again_and_their_gradients_in_float32():
    got = sent("ring", True)
    assert {kind for kind, _ in got} == {"collective-permute"}
    forward = (N - 1) * 2 * 2 * KEYS
    backward = (N - 1) * 2 * (2 + 4) * KEYS
    assert got.total() == forward + backward


def test_a_window_sends_only_the_chunks_that_it_reaches():
    """Of the two chunks of T / 2 tokens each gets the one before it."""
    got = sent("ring", False, window=T // 2)
    assert set(got) == {("collective-permute", "bf16")}
    # The earlier chunk goes one device on; the later ones one back, and in the middle to the same device.
    assert got.total() == 3 * 2 * 2 * KEYS // 2


@pytest.mark.exhaustive
def test_gathering_sends_all_keys_once():
    assert sent("all_gather", False) == {("all-gather", "bf16"): N * 2 * 2 * KEYS}


@pytest.mark.exhaustive
def test_gathering_scatters_gradients_in_float32():
    got = sent("all_gather", True)
    assert got["all-gather", "bf16"] == 2 * N * 2 * 2 * KEYS
    assert got["reduce-scatter", "f32"] == N * 2 * 4 * KEYS
    assert set(got) == {("all-gather", "bf16"), ("reduce-scatter", "f32")}


@pytest.mark.exhaustive
def test_an_exchange_sends_every_activation_once():
    got = sent("all_to_all", False)
    kv = 2 * max(KV_HEADS, N) * B * T * H
    assert got == {("all-to-all", "bf16"): 2 * (2 * HEADS * B * T * H + kv)}


RANK = 128
ROPE = 32
LATENTS = B * T * (RANK + ROPE)
"""Numbers in a device's latents, from which keys and values of `HEADS` heads are expanded."""


def expand(weights, latent):
    """Keys [B, S, N, H] with shared channels, and values [B, S, N, H], of weights [N, RANK, 2 H - ROPE]."""
    expanded = jnp.einsum("bsr,nrc->bsnc", latent[..., :RANK], weights)
    shared = jnp.broadcast_to(latent[..., None, RANK:], (*expanded.shape[:3], ROPE))
    return jnp.concatenate([expanded[..., : H - ROPE], shared], -1), expanded[..., H - ROPE :]


@fully_optimized()
@functools.cache
def sent_for_latents(method: str, gradient: bool) -> Counter:
    """(kind, dtype) -> payload bytes on each device, of attention to keys that each device expands."""
    mesh = hopper_mesh({"context": N})
    part = P(None, "context")
    attention = jax.shard_map(
        lambda q, latent, weights: context_attention(
            q, KeySource((latent,), expand, weights), axis_name="context", method=method, implementation="xla_dense"
        ),
        mesh=mesh, in_specs=(part, part, P()), out_specs=part, check_vma=False,
    )  # fmt: skip

    def gradients(*arrays):
        out, pullback = jax.vjp(attention, *arrays)
        return pullback(jnp.sin(out))

    q = hopper_array((B, N * T, HEADS, H), jnp.bfloat16, mesh, part)
    latent = hopper_array((B, N * T, RANK + ROPE), jnp.bfloat16, mesh, part)
    weights = hopper_array((HEADS, RANK, 2 * H - ROPE), jnp.bfloat16, mesh)
    with lowering_platform("cuda"):
        program = jax.jit(gradients if gradient else attention).lower(q, latent, weights).compile()
    return payloads(program)


def test_the_ring_sends_latents_in_place_of_keys():
    assert sent_for_latents("ring", False) == {("collective-permute", "bf16"): (N - 1) * 2 * LATENTS}


@pytest.mark.exhaustive
def test_in_the_backward_latents_go_around_again_and_their_gradients_in_float32():
    got = sent_for_latents("ring", True)
    assert {kind for kind, _ in got} == {"collective-permute", "all-reduce"}, "the weights' gradient is summed"
    total = sum(size for (kind, _), size in got.items() if kind == "collective-permute")
    assert total == (N - 1) * (2 + 2 + 4) * LATENTS


@pytest.mark.exhaustive
def test_latents_are_gathered_in_place_of_keys_and_their_gradients_scattered():
    assert sent_for_latents("all_gather", False) == {("all-gather", "bf16"): N * 2 * LATENTS}
    got = sent_for_latents("all_gather", True)
    assert got["all-gather", "bf16"] == 2 * N * 2 * LATENTS
    assert got["reduce-scatter", "f32"] == N * 4 * LATENTS
    assert {kind for kind, _ in got} == {"all-gather", "reduce-scatter", "all-reduce"}


KERNEL = re.compile(r'custom_call_target="(mosaic_gpu|triton|__cublas)|^ *(ROOT )?%?gemm_fusion')


def schedule(text: str) -> list[str]:
    """The entry computation as `start`, `done`, and `kernel`, in the order of the schedule."""
    found = []
    for line in text[text.index("\nENTRY") :].splitlines():
        if "collective-permute-start(" in line:
            found.append("start")
        elif "collective-permute-done(" in line or "collective-permute(" in line:
            found += ["start", "done"] if "collective-permute(" in line else ["done"]
        elif KERNEL.search(line):
            found.append("kernel")
    return found


NEEDS_MOSAIC = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")


@pytest.mark.exhaustive
@pytest.mark.parametrize("implementation", [pytest.param("mosaic", marks=NEEDS_MOSAIC), "triton"])
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
def test_hops_run_beside_kernels(gradient, implementation):
    if implementation == "triton":
        pytest.importorskip("jax_triton")
    program = compiled("ring", gradient=gradient, implementation=implementation, shape=LARGE, project=True)
    order = schedule(program.as_text())
    hops = 3 * (N - 1) if gradient else N - 1
    assert order.count("start") == order.count("done") == hops
    beside = []
    kernels = 0
    for event in order:
        kernels = 0 if event == "start" else kernels + (event == "kernel")
        beside += [kernels] if event == "done" else []
    assert all(beside), order


@NEEDS_MOSAIC
@pytest.mark.exhaustive
def test_the_ring_holds_the_gradients_of_one_step_only():
    """With those of all steps it was 8.7 times its own queries in float32, all else included."""
    program = compiled("ring", gradient=True, implementation="mosaic", shape=LARGE)
    rows, length, heads, _, width = LARGE
    queries = rows * length * heads * width * 4
    assert program.memory_analysis().temp_size_in_bytes < 5.5 * queries
