"""The kernel that makes logits their gradient: interpreted on the CPU against the plain form, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.cross_entropy.test_triton`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NotSupported, linear_cross_entropy_sum, lowering_platform, record_choices
from pallas_kernels.cross_entropy.request import Options
from pallas_kernels.cross_entropy.triton_launch import RowKernelPlan
from pallas_kernels.cross_entropy.xla_common import log_sum_exp, logits_gradient, loss_shares
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import Array, let_numpy_index, needs_triton, run_interpreted


def interpret(z_loss: float) -> None:
    """Rows of very different size, one logit far above the others, an ignored label and one out of range."""
    from pallas_kernels.cross_entropy.triton_kernel import gradient_kernel

    let_numpy_index()
    rows = 6
    vocabulary = 1000
    options = Options(z_loss=z_loss)
    random = np.random.default_rng(0)
    logits = (random.normal(size=(rows, vocabulary)) * [[1], [8], [0.1], [40], [1], [1]]).astype(np.float16)
    logits[1, 17] = 3000
    labels = np.array([3, 999, 0, 512, -100, vocabulary], np.int32)
    weights = np.array([1, 0.5, 2, 1, 1, 1], np.float32)

    buffer = Array(logits.copy(), "fp16")
    losses = Array(np.ones(rows, np.float32), "fp32")
    plan = RowKernelPlan(vocabulary, 16, options.ignore_index, z_loss)
    gradient_kernel[(rows,)](buffer, Array(labels, "i32"), Array(weights, "fp32"), buffer, losses, plan=plan)

    lse, chosen = log_sum_exp(jnp.asarray(logits), labels, options)
    loss = loss_shares(lse, chosen, jnp.asarray(labels), vocabulary, options)
    wide = jnp.asarray(logits, jnp.float32)
    gradient = logits_gradient(jnp.exp(wide - lse[:, None]), jnp.ones(rows), None, lse, labels, weights, options)
    np.testing.assert_allclose(losses.array, loss, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(buffer.array.astype(np.float32), gradient.astype(jnp.float16), rtol=2e-3, atol=1e-6)


@needs_triton
def test_losses_and_gradients_are_those_of_the_plain_form():
    done = run_interpreted(__spec__.name)
    assert done.returncode == 0, done.stderr[-3000:]


def compiled(**options):
    """The gradients of a call of 8 x 2048 tokens; the text of the program."""
    arrays = (
        jax.ShapeDtypeStruct((8, 2048, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((256, 50304), jnp.float32),
        jax.ShapeDtypeStruct((8, 2048), jnp.int32),
    )
    with lowering_platform("cuda"):
        gradients = jax.grad(lambda *x: linear_cross_entropy_sum(*x, **options), (0, 1))
        return compile_for_hopper(gradients, *arrays, options={"xla_gpu_enable_triton_gemm": False}).as_text()


@needs_triton
def test_compiled_for_hopper_logits_are_written_by_a_matmul_and_overwritten_by_the_kernel():
    with record_choices() as choices:
        text = compiled(implementation="triton")
    assert [choice.backend for choice in choices] == ["triton"]
    written = re.findall(r"%([\w.-]+) = \(?bf16\[[\d,]*50304\]", text)
    made = [name for name in written if not name.startswith(("bitcast", "get-tuple-element", "triton_kernel_call"))]
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 1 and "known_trip_count" in text
    assert sum("matmul" in name or "custom-call" in name for name in made) == 1, made


@needs_triton
@pytest.mark.parametrize("options", [{"soft_cap": 30.0}, {"implementation": "xla"}])
def test_other_calls_are_for_xla(options):
    assert "triton_kernel_call" not in compiled(**options)


def test_a_call_by_name_is_refused_with_the_rule():
    with pytest.raises(NotSupported, match="Triton|compute capability 8.0 or newer, got cpu"):
        linear_cross_entropy_sum(
            jnp.zeros((8, 16), jnp.bfloat16), jnp.zeros((16, 64)), jnp.zeros(8, jnp.int32), implementation="triton"
        )


if __name__ == "__main__":
    for weight in (0.0, 1e-3):
        interpret(weight)
