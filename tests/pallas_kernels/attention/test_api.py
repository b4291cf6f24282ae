"""Which backend is chosen, what is refused, and what the messages say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NotSupported, flash_attention, lowering_platform, record_choices
from tests.compilation import run_jitted

Q = jax.ShapeDtypeStruct((2, 2048, 4, 64), jnp.bfloat16)
K = jax.ShapeDtypeStruct((2, 2048, 2, 64), jnp.bfloat16)
IDS = jax.ShapeDtypeStruct((2, 2048), jnp.int32)


def chosen(q=Q, k=K, platform="cuda", capability=None, **options):
    with lowering_platform(platform, capability), record_choices() as choices:
        jax.eval_shape(lambda q, k: flash_attention(q, k, k, **options), q, k)
    (choice,) = choices
    return choice


AMPERE = (8, 0)
BEHIND_CUDNN = ("triton", "xla")  # Where jax-triton is installed, and where not.
ON_HOPPER = "mosaic" if jax.__version_info__ >= (0, 11) else "cudnn"


def test_hopper_takes_our_kernels():
    choice = chosen(window=128)
    assert choice.backend == ON_HOPPER and not choice.explicit
    assert choice.site.endswith(tuple(f"test_api.py:{line}" for line in range(1, 40)))
    assert ON_HOPPER in str(choice) and "window 128" in str(choice)
    if ON_HOPPER == "mosaic":
        assert chosen(segment_ids=jnp.zeros((2, 2048), jnp.int32), soft_cap=3.0).backend == "mosaic"


def test_cudnn_on_other_gpus_where_it_is_exact():
    choice = chosen(window=128, capability=AMPERE)
    assert choice.backend == "cudnn" and [name for name, _ in choice.refused] == ["mosaic"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"soft_cap": 30.0}, "soft cap"),
        ({"return_lse": True}, "log-sum-exp"),
        ({"window": 4, "causal": False}, "causal=True"),
        ({"segment_ids": jnp.zeros((2, 2048), jnp.int32)}, "segment ids"),
        ({"k": jax.ShapeDtypeStruct((2, 4096, 2, 64), jnp.bfloat16)}, "T 2048 must equal S 4096"),
    ],
)
def test_cudnn_refuses_with_a_reason(options, reason):
    choice = chosen(**options, capability=AMPERE)
    assert choice.backend in BEHIND_CUDNN
    assert reason in dict(choice.refused)["cudnn"]


@pytest.mark.parametrize(("options", "reason"), [({"capability": (7, 5)}, "8.0"), ({"platform": "cpu"}, "NVIDIA")])
def test_xla_takes_what_no_kernel_can(options, reason):
    choice = chosen(**options)
    assert choice.backend == "xla"
    reasons = dict(choice.refused)
    assert reason in reasons["cudnn"]
    assert "2048" in reasons["xla_dense"]


def test_cudnn_head_dims():
    wide = [jax.ShapeDtypeStruct((2, 2048, 2, size), jnp.bfloat16) for size in (160, 192, 100)]
    assert chosen(wide[0], wide[0]).backend == "cudnn"
    assert "at most 128" in dict(chosen(wide[1], wide[1], capability=AMPERE).refused)["cudnn"]
    assert "multiple of 8" in dict(chosen(wide[2], wide[2]).refused)["cudnn"]


def test_short_sequences_take_the_dense_backend():
    short = jax.ShapeDtypeStruct((2, 256, 4, 32), jnp.float32)
    assert chosen(short, short, platform="cpu").backend == "xla_dense"


def test_one_function_is_traced_for_each_target():
    short = jnp.zeros((1, 2048, 1, 64), jnp.bfloat16)
    function = jax.jit(lambda x: flash_attention(x, x, x))
    names = []
    for platform in ("cpu", "cuda"):
        with lowering_platform(platform), record_choices() as choices:
            jax.eval_shape(function, short)
        names += [choice.backend for choice in choices]
    assert names == ["xla", ON_HOPPER]


def test_an_explicit_choice_never_falls_back():
    x = jnp.zeros((1, 8, 1, 64))
    with pytest.raises(NotSupported, match="runs on NVIDIA GPUs, lowered for cpu.*implementation=None"):
        flash_attention(x, x, x, implementation="cudnn")
    with pytest.raises(NotSupported, match="did you mean 'xla_dense'"):
        flash_attention(x, x, x, implementation="xla-dense")
    with record_choices() as choices:
        flash_attention(x, x, x, implementation="xla")
    assert [(c.backend, c.explicit) for c in choices] == [("xla", True)]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 8, 4),) * 3, {}, r"\[B, T, N, H\].*q \[2, 8, 4\]"),
        (((2, 8, 4, 8), (2, 8, 3, 8), (2, 8, 3, 8)), {}, r"heads \(4\) must be a multiple.*\(3\)"),
        (((2, 8, 4, 8), (2, 8, 2, 8), (2, 9, 2, 8)), {}, "k and v must have the same shape"),
        (((2, 8, 4, 8), (1, 8, 2, 8), (1, 8, 2, 8)), {}, "same batch size"),
        (((2, 0, 4, 8),) * 3, {}, "no dim may be 0"),
        (((2, 8, 4, 8),) * 3, {"window": 0}, "at least 1; got 0"),
        (((2, 8, 4, 8),) * 3, {"window": 2.5}, "must be a Python integer"),
        (((2, 8, 4, 8),) * 3, {"soft_cap": -1.0}, "greater than 0, got -1.0"),
        (((2, 8, 4, 8),) * 3, {"segment_ids": jnp.zeros((2, 7), jnp.int32)}, r"shape \[2, 8\].*got \[2, 7\]"),
        (((2, 8, 4, 8),) * 3, {"segment_ids": jnp.zeros((2, 8))}, "must be integers; got float32"),
        (((2, 8, 4, 8), (2, 9, 4, 8), (2, 9, 4, 8)), {"segment_ids": jnp.zeros((2, 8), int)}, "give a pair"),
    ],
)
def test_wrong_arguments_name_the_rule(shapes, options, message):
    with pytest.raises(ValueError, match=message):
        flash_attention(*(jnp.zeros(shape) for shape in shapes), **options)


@pytest.mark.usefixtures("unchecked_shapes")
def test_wrong_dtypes():
    x = jnp.zeros((1, 4, 1, 8))
    with pytest.raises(ValueError, match="one dtype; got float32, bfloat16, float32"):
        flash_attention(x, x.astype(jnp.bfloat16), x)
    with pytest.raises(ValueError, match="got int32"):
        flash_attention(*[x.astype(jnp.int32)] * 3)


@pytest.mark.parametrize("backend", ["xla", "xla_dense", "reference"])
def test_rows_without_a_visible_key(backend):
    """Of 6 queries the first two are before the 4 keys; the others see 1 to 4 keys, all alike, whose values are 1."""
    q = np.ones((1, 6, 1, 4), np.float32)
    k = np.ones((1, 4, 1, 4), np.float32)

    def total(q, k):
        out, lse = flash_attention(q, k, k, return_lse=True, implementation=backend)
        return out.sum(), (out, lse)

    gradients, (out, lse) = run_jitted(jax.grad(total, (0, 1), has_aux=True), q, k)
    np.testing.assert_array_equal(out[0, :2], 0)
    np.testing.assert_allclose(out[0, 2:], 1, rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], [-np.inf, -np.inf, *(2 + np.log([1, 2, 3, 4]))], rtol=1e-6)
    np.testing.assert_array_equal(gradients[0][0, :2], 0)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
