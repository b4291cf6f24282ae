"""The Hopper kernels of the state space layer: interpreted with race detection, and compiled for an H200."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import NotSupported, lowering_platform, record_choices, ssd
from pallas_kernels.hopper import replay
from pallas_kernels.ssd import mosaic
from tests.hopper import compile_for_hopper, hopper_array, hopper_mesh
from tests.pallas_kernels.ssd.cases import NAMES, documents, make_inputs, relative_errors

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")


def check(shape, lengths):
    """The errors of outputs and gradients are those of bfloat16 operands."""
    inputs, cotangents = make_inputs(*shape)
    ids = None if lengths is None else documents(lengths, shape[0])
    errors = relative_errors("mosaic", inputs, cotangents, ids)
    assert max(errors[name] for name in NAMES if name != "a") < 0.006, errors
    assert errors["a"] < 0.02, errors  # A sum over all tokens of numbers of both signs.


@needs_mosaic
@pytest.mark.longer
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [((1, 130, 2, 64, 1, 64), (30, 50, 40, 10)), ((2, 192, 2, 64, 2, 128), None), ((1, 50, 1, 128, 1, 64), None)],
    ids=["packed", "wide states", "wide heads and less than a chunk"],
)
def test_errors_are_those_of_bfloat16_and_there_is_no_race(shape, lengths, monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    check(shape, lengths)
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@needs_mosaic
@pytest.mark.longer
@pytest.mark.parametrize("lengths", [None, (30, 150, 10, 200)], ids=["one document", "packed"])
def test_programs_that_share_a_head_give_the_same_bits(lengths, monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    inputs, _ = make_inputs(1, 390, 2, 64, 1, 64)
    ids = None if lengths is None else documents(lengths, 1)

    def run():
        return jax.jit(lambda *inputs: ssd(*inputs[:5], state=inputs[5], segment_ids=ids, implementation="mosaic"))

    whole = run()(*inputs)
    monkeypatch.setattr(replay, "_FEWEST_CHUNKS", 1)
    assert replay.count_programs(2, 7) == 4
    shared = run()(*inputs)
    assert all((x == y).all() and jnp.abs(x).max() > 0.1 for x, y in zip(whole, shared, strict=True))
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


def test_a_recurrence_is_divided_where_multiprocessors_are_free():
    assert [replay.count_programs(heads, 512) for heads in (128, 64, 44, 32, 8)] == [1, 2, 3, 4, 4]
    assert [replay.count_programs(32, chunks) for chunks in (1, 16, 32, 48)] == [1, 1, 2, 3]
    share = 2 / 7
    for programs in (1, 2, 4):
        firsts = replay.first_chunks(512, programs, share)
        work = [share * begin + end - begin for begin, end in itertools.pairwise(firsts)]
        assert firsts[0] == 0 and firsts[-1] == 512 and max(work) - min(work) <= 2
        for program in range(programs):
            own = replay.own_chunks(512, programs, share, program)
            assert tuple(map(int, own)) == firsts[program : program + 2]


@needs_mosaic
@pytest.mark.exhaustive
@pytest.mark.parametrize("programs", [1, 8], ids=["more heads than buffers", "divided heads"])
def test_programs_sum_over_the_heads_of_a_group(programs, monkeypatch):
    """Two groups of four heads, in one program or two for each of the two chunks."""
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    monkeypatch.setattr(mosaic, "_FEWEST_PROGRAMS", programs)
    check((1, 128, 8, 64, 2, 64), (70, 58))


@needs_mosaic
@pytest.mark.parametrize(
    ("packed", "width", "heads"),
    [(True, 128, 64), (False, 64, 64), (True, 128, 32), (False, 128, 32)],
    ids=["packed", "narrow states", "packed, programs that share heads", "programs that share heads"],
)
def test_compiled_for_hopper_without_spills(packed, width, heads, monkeypatch, capfd):
    """Layers in a loop that computes them again in the backward, on two devices."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh = hopper_mesh({"data": 2})
    batch, length, channels, groups = 4, 8192, 64, 1
    of_batch = PartitionSpec("data")
    shapes = [(batch, length, heads, channels), (batch, length, heads), *[(batch, length, groups, width)] * 2]
    dtypes = [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16]
    arrays = [hopper_array(*pair, mesh, of_batch) for pair in zip(shapes, dtypes, strict=True)]
    a = hopper_array((2, heads), jnp.float32, mesh)
    ids = hopper_array((batch, length), jnp.int32, mesh, of_batch)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(*(of_batch,) * 5, PartitionSpec()), out_specs=of_batch, check_vma=False
    )
    def layers(x, dt, b, c, ids, a):
        @jax.checkpoint
        def layer(x, a):
            y, _ = ssd(x, dt, a, b, c, segment_ids=ids if packed else None)
            return x + y, None

        return jax.lax.scan(layer, x, a)[0]

    def loss(*arrays):
        return (layers(*arrays).astype(jnp.float32) ** 2).sum()

    with lowering_platform("cuda"), record_choices() as choices:
        text = compile_for_hopper(jax.grad(loss, (0, 1, 2, 3, 5)), *arrays, ids, a, mesh=mesh).as_text()
    assert {choice.backend for choice in choices} == {"mosaic"}
    report = "".join(capfd.readouterr())
    spills = dict(re.findall(r"properties for (\w+)_mosaic_gpu_kernel\n.* (\d+) bytes spill stores", report))
    assert set(spills) == {"ssd_forward", "ssd_states", "ssd_gradients"}
    assert set(spills.values()) == {"0"} and "serialized" not in report
    # The forward's outputs are not needed for the gradients: its kernel runs once.
    assert text.count('custom_call_target="mosaic_gpu') == 3


@needs_mosaic
def test_sequences_take_the_kernels_and_one_token_the_recurrence():
    x, dt, a, b, c, _ = jax.eval_shape(lambda: make_inputs(1, 128, 4, 64, 2, 128)[0])

    def of_length(z, length):
        return jax.ShapeDtypeStruct((1, length, *z.shape[2:]), z.dtype)

    with lowering_platform("cuda"), record_choices() as choices:
        for length in (1, 128):
            jax.eval_shape(ssd, *(z if z.ndim == 1 else of_length(z, length) for z in (x, dt, a, b, c)))
    assert [choice.backend for choice in choices] == ["recurrent", "mosaic"]


@needs_mosaic
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "takes bfloat16, got float32"),
        ({"channels": 80}, r"P must be a multiple of 64 and S one of \(64, 128\), got 80 and 128"),
        ({"width": 96}, "got 64 and 96"),
        ({"chunk": 128}, "has chunks of 64 tokens, got 128"),
        ({"platform": ("cuda", (8, 0))}, "compute capability 9.0"),
    ],
)
def test_refuses_with_a_reason(change, reason):
    dtype = change.get("dtype", jnp.bfloat16)
    channels, width = change.get("channels", 64), change.get("width", 128)
    x = jax.ShapeDtypeStruct((1, 128, 2, channels), dtype)
    b = jax.ShapeDtypeStruct((1, 128, 1, width), dtype)
    dt = jax.ShapeDtypeStruct((1, 128, 2), jnp.float32)
    a = jax.ShapeDtypeStruct((2,), jnp.float32)
    call = functools.partial(ssd, chunk=change.get("chunk"), implementation="mosaic")
    with lowering_platform(*change.get("platform", ("cuda",))), pytest.raises(NotSupported, match=reason):
        jax.eval_shape(call, x, dt, a, b, b)
