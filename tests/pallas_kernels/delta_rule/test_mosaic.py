"""The gated delta rule by Hopper kernels: interpreted on the CPU with race detection, and compiled for an H200."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NotSupported, gated_delta_rule, lowering_platform, record_choices
from pallas_kernels.delta_rule import mosaic
from pallas_kernels.delta_rule.mosaic_parts import GROWN, REST
from pallas_kernels.hopper import replay
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.delta_rule.cases import Case, check, make_inputs

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")

CASES = {
    "packed": Case(length=130, starts=(5, 64, 70, 90)),
    "wide": Case(length=72, heads=1, width=128, value_width=128),
    "short_two_rows": Case(batch=2, length=40, key_heads=2, value_width=128),
}


@needs_mosaic
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_error_is_that_of_the_plain_version_and_no_race(name, monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    check(CASES[name], "mosaic")
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@needs_mosaic
@pytest.mark.longer
@pytest.mark.parametrize("starts", [(), (30, 150, 192, 300)], ids=["one document", "packed"])
def test_programs_that_share_a_head_give_the_same_bits(starts, monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    *tokens, state = make_inputs(Case(length=390, key_heads=1, heads=2))
    ids = jnp.searchsorted(jnp.asarray(starts), jnp.arange(390), side="right")[None] if starts else None

    def run():
        return jax.jit(lambda *x: gated_delta_rule(*x, state=state, segment_ids=ids, implementation="mosaic"))

    whole = run()(*tokens)
    monkeypatch.setattr(replay, "_FEWEST_CHUNKS", 1)
    assert replay.count_programs(2, 7) == 4
    shared = run()(*tokens)
    assert all((x == y).all() and jnp.abs(x).max() > 0.1 for x, y in zip(whole, shared, strict=True))
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


def shapes(length, dtype=jnp.bfloat16, width=128, channels=()):
    keys, values, gates = (1, length, 8, width), (1, length, 16, width), (1, length, 16)
    types = dtype, dtype, dtype, jnp.float32, jnp.float32
    sizes = keys, keys, values, (*gates, *channels), gates
    return [jax.ShapeDtypeStruct(*x) for x in zip(sizes, types, strict=True)]


@needs_mosaic
@pytest.mark.exhaustive
@pytest.mark.parametrize(("packed", "length"), [(False, 900), (True, 4000)], ids=["one program", "packed, three"])
def test_compiled_for_hopper_with_all_sums_in_registers(packed, length, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def loss(*tokens):
        ids = jnp.arange(length)[None] // 300 if packed else None
        out, last = jax.checkpoint(lambda *x: gated_delta_rule(*x, segment_ids=ids))(*tokens)
        return (out.astype(jnp.float32) ** 2).sum() + (last**2).sum()

    with lowering_platform("cuda"), record_choices() as choices:
        compile_for_hopper(jax.grad(loss, range(5)), *shapes(length))
    assert [choice.backend for choice in choices] == ["mosaic"]
    report = "".join(capfd.readouterr())
    stored = dict(re.findall(r"properties for (\w+)_mosaic_gpu_kernel\n.* (\d+) bytes spill stores", report))
    assert {stored.pop(f"delta_rule_{name}") for name in ("recurrence", "states", "reverse")} == {"0"}
    # Kernels that take all chunks at a time keep addresses, the same for all chunks, outside of registers.
    assert set(stored) == {"delta_rule_solve", "delta_rule_gradients"}
    assert max(map(int, stored.values())) < 250, stored
    assert "serialized" not in report


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"length": 128, "dtype": jnp.float16}, "takes bfloat16, got float16"),
        ({"length": 128, "channels": (128,)}, "takes one decay for each value head; got one for each key channel"),
        ({"length": 128, "width": 96}, "widths of keys and values must be 64 or 128; got 96 and 96"),
    ],
)
@needs_mosaic
def test_what_the_kernels_refuse(shape, reason):
    with lowering_platform("cuda"), pytest.raises(NotSupported, match=reason):
        jax.eval_shape(lambda *x: gated_delta_rule(*x, implementation="mosaic"), *shapes(**shape))


@needs_mosaic
@pytest.mark.parametrize(("length", "backend"), [(1, "recurrent"), (63, "xla"), (64, "mosaic")])
def test_which_backend_is_chosen_on_hopper(length, backend):
    with lowering_platform("cuda"), record_choices() as choices:
        jax.eval_shape(gated_delta_rule, *shapes(length))
    assert [choice.backend for choice in choices] == [backend]


def test_the_first_visible_token_of_a_chunk():
    documents = jnp.asarray(np.repeat([0, 1, 2], [3, 66, 31])[None])
    log_decay = jnp.full((1, 100, 2), -0.1)
    gates, first = mosaic._gates(log_decay, log_decay, documents)
    assert first is not None
    np.testing.assert_array_equal(first[0, 0], np.repeat([0, 3], [3, 61]))
    np.testing.assert_array_equal(first[0, 1], np.repeat([0, 5], [5, 59]))
    np.testing.assert_array_equal(gates[0, 0, 1, GROWN] > 0, np.arange(64) < 5)
    np.testing.assert_array_equal(gates[0, 0, 0, REST] > 0, np.arange(64) >= 3)
