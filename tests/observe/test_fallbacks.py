"""`observe.fail_on_fallback`: a call on a GPU that no kernel computes is refused, whatever its operation."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxstack.errors import ConfigError
from jaxstack.observe.what_ran import describe_backends, refuse_fallbacks
from jaxstack.run_config import load_config
from pallas_kernels import activated_matmul, grouped_matmul, lowering_platform, record_choices, rms_norm
from pallas_kernels.dispatch import Backend, Choice, select

CONFIGS = Path(__file__).parents[2] / "configs"
needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")


def choices_of(function, *shapes, dtype=jnp.bfloat16, platform="cuda") -> list[Choice]:
    """What the function chooses for a Hopper GPU, or for a CPU, without running."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    capability = (9, 0) if platform == "cuda" else None
    with lowering_platform(platform, compute_capability=capability), record_choices() as choices:
        jax.eval_shape(function, *arguments)
    return list(choices)


def experts(implementation=None):
    return lambda x, w: grouped_matmul(x, w, jnp.array([100, 156]), implementation=implementation)


WIDE = ((256, 128), (2, 128, 64))
NARROW = ((256, 128), (2, 128, 72))


def norm_loss(x, weight):
    return jnp.sum(jnp.asarray(rms_norm(x, weight)))


@pytest.mark.parametrize(
    ("function", "shapes", "dtype"),
    [
        (experts(), NARROW, jnp.bfloat16),
        (experts(), WIDE, jnp.float32),
        (lambda x, w: activated_matmul([x], w, "gelu_tanh"), ((16384, 768), (768, 72)), jnp.bfloat16),
        (jax.grad(norm_loss), ((8192, 1020), (1020,)), jnp.bfloat16),
    ],
)
def test_a_call_that_no_kernel_computes_is_refused(function, shapes, dtype):
    choices = choices_of(function, *shapes, dtype=dtype)
    assert choices[-1].fallback and choices[-1].backend == "xla"
    with pytest.raises(
        ConfigError, match=f"fail_on_fallback: {choices[-1].operation} at .*not (mosaic|triton): .*set observe"
    ):
        refuse_fallbacks(choices)
    refuse_fallbacks(choices_of(function, *shapes, dtype=dtype, platform="cpu"))


@needs_mosaic
def test_the_message_names_the_way_out_of_a_mixture():
    with pytest.raises(ConfigError, match=r"multiples of 64, got 128 and 72.*model\.moe\.implementation"):
        refuse_fallbacks(choices_of(experts(), *NARROW))
    refuse_fallbacks(choices_of(experts("xla"), *NARROW))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        pytest.param(experts(), WIDE, marks=needs_mosaic),
        (lambda x, w: activated_matmul([x], w, "gelu_tanh"), ((256, 768), (768, 128))),
        (jax.grad(norm_loss), ((256, 128), (128,))),
    ],
)
def test_what_is_faster_without_a_kernel_is_no_fallback(function, shapes):
    choices = choices_of(function, *shapes)
    assert choices and not any(choice.fallback for choice in choices)
    refuse_fallbacks(choices)


def test_a_backend_that_is_slower_here_makes_no_fallback():
    table = (
        Backend("kernel", "first", lambda _: "cannot", lambda x: x, lambda _: "slower"),
        Backend("xla", "all", lambda _: None, lambda x: x),
    )
    with record_choices() as choices:
        select("operation", table, None, "a call on cuda 9.0")
        select("operation", (Backend("kernel", "first", lambda _: "cannot", lambda x: x), table[1]), None, "a call")
    assert [choice.fallback for choice in choices] == [False, True]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configurations_for_gpus_refuse_fallbacks(path):
    on_gpu = "H200" in path.read_text(encoding="utf-8")
    assert load_config(path, []).observe.fail_on_fallback == on_gpu


def test_one_line_names_the_backends_of_an_operation_and_each_rule_once():
    choices = [
        Choice("packed_matmul", "site", "x [8, 4]", "triton"),
        Choice("packed_matmul", "site", "x [65, 4]", "xla", (("triton", "takes 1 to 64 rows; got 65"),)),
        Choice("packed_matmul", "site", "x [512, 4]", "xla", (("triton", "takes 1 to 64 rows; got 512"),)),
        Choice("packed_matmul", "site", "x [8, 2]", "xla", (("triton", "needs inputs of 128; got 2"),)),
        Choice("norm", "site", "x [8, 4]", "reference"),
    ]
    assert describe_backends(choices, "packed_matmul") == (
        "packed_matmul: triton for 1 shape, xla for 3 shapes "
        "(not triton: takes 1 to 64 rows; got 65; not triton: needs inputs of 128; got 2)"
    )
    assert describe_backends(choices, "attention") is None
    assert describe_backends(choices, "attention", "norm") == "norm: reference for 1 shape"
