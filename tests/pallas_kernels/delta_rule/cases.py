"""Cases of the gated delta rule, and the comparison of a backend's errors with those of the plain version (XLA)."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gated_delta_rule

RESULTS = ("out", "last", "d_q", "d_k", "d_v", "d_log_decay", "d_beta", "d_state")


@dataclass(frozen=True)
class Case:
    """Shapes of a call, and the first tokens of its documents."""

    length: int
    batch: int = 1
    key_heads: int = 1
    heads: int = 2
    width: int = 64
    value_width: int = 64
    starts: tuple[int, ...] = ()


def make_inputs(case: Case) -> list[jax.Array]:
    """Keys of length 1, values of order 1, in numbers of bfloat16; float32 log decays, betas and state."""
    keys = jax.random.split(jax.random.key(0), 6)
    q, k = (jax.random.normal(key, (case.batch, case.length, case.key_heads, case.width)) for key in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = jax.random.normal(keys[2], (case.batch, case.length, case.heads, case.value_width))
    log_decay = -jnp.exp(jax.random.normal(keys[3], v.shape[:3]) - 2)
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], v.shape[:3]))
    state = 0.3 * jax.random.normal(keys[5], (case.batch, case.heads, case.width, case.value_width))
    return [*(x.astype(jnp.bfloat16) for x in (q, k, v)), log_decay, beta, state]


def results_of(case: Case, implementation: str | None, dtype: str) -> Callable[[], list[np.ndarray]]:
    """Return a function that gives outputs and gradients of a loss whose gradients are as small as those of a mean."""
    ids = jnp.searchsorted(jnp.asarray(case.starts), jnp.arange(case.length), side="right") if case.starts else None
    ids = None if ids is None else jnp.broadcast_to(ids, (case.batch, case.length))
    inputs = make_inputs(case)
    keys = jax.random.split(jax.random.key(7))
    weights = [1e-6 * jax.random.normal(key, x.shape) for key, x in zip(keys, (inputs[2], inputs[5]), strict=True)]

    # Large arrays are arguments: XLA would compute with constants while it compiles, which takes minutes.
    def loss(*x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        *tokens, state, ids, out_weights, last_weights = x
        weights = out_weights, last_weights
        results = gated_delta_rule(*tokens, state=state, segment_ids=ids, implementation=implementation)
        out, last = ((x.astype(jnp.float32) * w).sum() for x, w in zip(results, weights, strict=True))
        return out + last, results

    inputs = [*(x.astype(dtype) for x in inputs[:3]), *inputs[3:], ids, *weights]
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        compiled = jax.jit(jax.grad(loss, range(6), has_aux=True)).lower(*inputs).compile()

    def compute() -> list[np.ndarray]:
        gradients, results = compiled(*inputs)
        return [np.asarray(x, np.float64) for x in (*results, *gradients)]

    return compute


def check(case: Case, implementation: str | None, truth: str = "recurrent", times: int = 1) -> None:
    """Assert that no result's error is more than 1.5 times that of XLA in bfloat16; float32 results may have 1e-3.

    `times`: how often the backend computes them, as a race does not show every time.
    """
    wanted = results_of(case, truth, "float32")()
    plain = results_of(case, "xla", "bfloat16")()
    compute = results_of(case, implementation, "bfloat16")
    for _ in range(times):
        for name, ours, theirs, right in zip(RESULTS, compute(), plain, wanted, strict=True):
            size = np.sqrt((right**2).mean())
            error, allowed = (np.sqrt(((x - right) ** 2).mean()) / size for x in (ours, theirs))
            assert error <= max(1.5 * allowed, 1e-3), f"{name}: error {error:.1e}, of XLA {allowed:.1e}"
