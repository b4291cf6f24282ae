"""The loss by exponentials: the Hopper kernel interpreted with race detection, and compiled for an H200."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NotSupported, linear_cross_entropy_sum, lowering_platform, record_choices
from pallas_kernels.cross_entropy import mosaic_chunk, xla
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.cross_entropy.cases import assert_error_at_most_twice, make_inputs, value_and_gradients

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")


def weighted_sum(implementation, **options):
    def function(hidden, weight, labels, token_weights):
        total = linear_cross_entropy_sum(
            hidden, weight, labels, token_weights=token_weights, implementation=implementation, **options
        )
        return total, total

    return function


def inputs_of(size, offset=0.0, vocabulary=384):
    """256 tokens, of which a fifth is ignored; logits of about this size, all moved by `offset`."""
    hidden, weight, labels, worth = make_inputs((2, 128), width=64, vocabulary=vocabulary)
    weight = np.asarray(jnp.asarray(weight * size / 8, jnp.bfloat16), np.float64)
    hidden[..., 0], weight[0] = 1.0, float(jnp.bfloat16(offset))
    return hidden, weight, labels, abs(worth)


def check(inputs, **options):
    with jax.enable_x64(True):
        truth = value_and_gradients(weighted_sum("reference", **options), inputs, "float64")
    ours, plain = (value_and_gradients(weighted_sum(name, **options), inputs, "bfloat16") for name in ("mosaic", "xla"))
    assert_error_at_most_twice(ours, plain, truth, "bfloat16")
    return ours


@needs_mosaic
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "offset", "vocabulary", "options"),
    [(1, 0, 384, {"z_loss": 1e-3}), (6, -200, 512, {}), (0.1, 0, 128, {})],
    ids=["z_loss", "large logits far from zero", "small logits"],
)
def test_error_at_most_twice_the_plain_version_and_no_race(size, offset, vocabulary, options, monkeypatch, capfd):
    monkeypatch.setattr(mosaic_chunk, "INTERPRET", True)
    check(inputs_of(size, offset, vocabulary), **options)
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@needs_mosaic
@pytest.mark.exhaustive
def test_logits_that_exponentials_cannot_hold_are_computed_once_more(monkeypatch):
    monkeypatch.setattr(mosaic_chunk, "INTERPRET", True)
    calls = []
    plain = xla._chunk_loss
    monkeypatch.setattr(xla, "_chunk_loss", lambda *arguments: calls.append(None) or plain(*arguments))
    hidden, weight, labels, worth = inputs_of(1)
    hidden[0, 5], weight[:, 17] = 2.0, 2.0  # one logit of 256 in one row, and the label is another
    labels[0, 5] = 3
    ours = check((hidden, weight, labels, worth))
    assert calls and all(np.isfinite(x).all() for x in ours)


@needs_mosaic
@pytest.mark.exhaustive
def test_a_label_out_of_range_gives_nan(monkeypatch):
    monkeypatch.setattr(mosaic_chunk, "INTERPRET", True)
    hidden, weight, labels, _ = inputs_of(1, vocabulary=128)
    labels[1, 7] = 128
    arrays = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), jnp.asarray(labels)
    assert np.isnan(jax.jit(lambda *x: linear_cross_entropy_sum(*x, implementation="mosaic"))(*arrays))


@needs_mosaic
@pytest.mark.parametrize("vocabulary", [50304, 128256])
def test_compiled_for_hopper_without_spills_and_without_a_pass_over_the_logits(vocabulary, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    arrays = (
        jax.ShapeDtypeStruct((8, 2048, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((256, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((8, 2048), jnp.int32),
    )
    with lowering_platform("cuda"), record_choices() as choices:
        gradients = jax.grad(linear_cross_entropy_sum, (0, 1))
        text = compile_for_hopper(gradients, *arrays, options={"xla_gpu_enable_triton_gemm": False}).as_text()
    assert [choice.backend for choice in choices] == ["mosaic"]
    report = "".join(capfd.readouterr())
    assert "0 bytes spill stores" in report and " bytes spill stores" not in report.replace("0 bytes spill stores", "")
    for block in (block for block in re.split(r"\n(?=\S)", text) if 'custom_call_target="mosaic_gpu' in block):
        made = re.findall(rf"%([\w.-]+) = \(?bf16\[\d+,{vocabulary}\]", block)
        made = [name for name in made if not name.startswith(("bitcast", "get-tuple-element", "mpmd_map"))]
        # What is left sets the entries of the labels, in place.
        assert all("scatter" in name for name in made), made
        assert not re.search(rf"bf16\[\d+,{vocabulary}\]\S* copy\(", block)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float16}, "takes bfloat16"),
        ({"vocabulary": 50300}, "multiples of 64 and 128"),
        ({"rows": 8257}, "multiple of 128 tokens"),
        ({"soft_cap": 30.0}, "no soft cap"),
        ({"z_loss": 0.1}, "up to 0.001"),
    ],
)
@needs_mosaic
def test_what_the_kernel_refuses(change, reason):
    chosen = {"rows": 8192, "vocabulary": 50304, "dtype": jnp.bfloat16, **change}
    rows, vocabulary, dtype = (chosen.pop(name) for name in ("rows", "vocabulary", "dtype"))
    arrays = (
        jax.ShapeDtypeStruct((rows, 256), dtype),
        jax.ShapeDtypeStruct((256, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )

    def call(*arrays):
        return linear_cross_entropy_sum(*arrays, implementation="mosaic", **chosen)

    with lowering_platform("cuda"), pytest.raises(NotSupported, match=reason):
        jax.eval_shape(call, *arrays)
