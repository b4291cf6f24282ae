"""The contract of attention as a check: a backend's error against float64, forward and gradients.

A backend in low precision may err at most twice as much as attention written plainly in that precision.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import flash_attention
from tests.compilation import run_jitted


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call; `segments` is the number of documents packed into a row."""

    batch: int = 2
    length: int = 40
    key_length: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int | None = None
    causal: bool = True
    window: int | None = None
    segments: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    dtype: str = "bfloat16"
    sinks: bool = False

    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window, "scale": self.scale, "soft_cap": self.soft_cap}


@dataclass(frozen=True)
class Inputs:
    """Float64 arrays that the case's dtype holds exactly, and the cotangents of out and lse."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_out: np.ndarray
    d_lse: np.ndarray
    segment_ids: tuple[np.ndarray, np.ndarray] | None
    sinks: np.ndarray | None


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Normal values; the segments of queries and keys end at different random places."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        values = jnp.asarray(rng.normal(size=shape), jnp.float32).astype(case.dtype)
        return np.asarray(values.astype(jnp.float32), np.float64)

    q_shape = (case.batch, case.length, case.heads, case.head_dim)
    k_shape = (case.batch, case.key_length, case.kv_heads, case.head_dim)
    segment_ids = None
    if case.segments is not None:
        query = np.sort(rng.integers(0, case.segments, (case.batch, case.length)), axis=1)
        key = np.sort(rng.integers(0, case.segments, (case.batch, case.key_length)), axis=1)
        segment_ids = (
            query.astype(np.int32),
            (query if case.length == case.key_length else key).astype(np.int32),
        )
    d_lse = rng.normal(size=(case.batch, case.heads, case.length))
    width = case.value_dim or case.head_dim
    v_shape, out_shape = ((*shape[:3], width) for shape in (k_shape, q_shape))
    arrays = normal(*q_shape), normal(*k_shape), normal(*v_shape), normal(*out_shape)
    return Inputs(*arrays, d_lse, segment_ids, normal(case.heads) if case.sinks else None)


def outputs_and_gradients(attention: Any, case: Case, inputs: Inputs, dtype: Any, with_lse: bool) -> dict:
    """out, lse, d_q, d_k, d_v, d_sinks as float64 numpy arrays, of a function called like flash_attention."""
    ids = None if inputs.segment_ids is None else tuple(map(jnp.asarray, inputs.segment_ids))
    d_out = jnp.asarray(inputs.d_out, dtype)
    d_lse = jnp.asarray(inputs.d_lse)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, *sinks: jax.Array) -> tuple:
        options = {**case.options(), **({"sinks": sinks[0]} if sinks else {})}
        result = attention(q, k, v, segment_ids=ids, return_lse=with_lse, **options)
        out, lse = result if with_lse else (result, None)
        total = (out * d_out).astype(d_lse.dtype).sum()
        if lse is not None:
            total = total + (jnp.where(jnp.isfinite(lse), lse, 0.0) * d_lse).sum()
        return total, (out, lse)

    arrays = [jnp.asarray(x, dtype) for x in (inputs.q, inputs.k, inputs.v)]
    if inputs.sinks is not None:
        arrays.append(jnp.asarray(inputs.sinks, jnp.promote_types(dtype, jnp.float32)))
    gradient = jax.value_and_grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)
    (_, (out, lse)), gradients = run_jitted(gradient, *arrays)
    results = {"out": out, "lse": lse, **dict(zip(("d_q", "d_k", "d_v", "d_sinks"), gradients, strict=False))}
    return {
        name: np.asarray(x.astype(jnp.promote_types(x.dtype, jnp.float32)), np.float64)
        for name, x in results.items()
        if x is not None
    }


def plain_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, segment_ids: Any, return_lse: bool, **options: Any
) -> Any:
    """Attention as one writes it in the inputs' precision, softmax in float32, differentiated by jax."""
    distance = jnp.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - jnp.arange(k.shape[1])
    visible = jnp.ones(distance.shape, bool)
    if options["causal"]:
        visible &= distance >= 0
    if options["window"] is not None:
        visible &= distance < options["window"]
    if segment_ids is not None:
        visible = visible & (segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None, :])
    out, lse = attend_plainly(q, k, v, visible, options["scale"], options["soft_cap"], options.get("sinks"))
    return (out, lse) if return_lse else out


def attend_plainly(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: Any,
    scale: float | None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """out and lse for a boolean mask that broadcasts to [B, N, T, S]."""
    group = q.shape[2] // k.shape[2]
    k = jnp.repeat(k, group, axis=2)
    v = jnp.repeat(v, group, axis=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(scores.dtype)[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
        visible = jnp.pad(
            jnp.broadcast_to(visible, (*scores.shape[:3], k.shape[1])), 3 * [(0, 0)] + [(0, 1)], constant_values=True
        )
        v = jnp.pad(v, ((0, 0), (0, 1), (0, 0), (0, 0)))
    scores = jnp.where(visible, scores, -1e30)
    some = jnp.broadcast_to(visible, scores.shape).any(axis=-1, keepdims=True)
    weights = jnp.where(some, jax.nn.softmax(scores, axis=-1), 0.0).astype(q.dtype)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v)
    return out, jnp.where(some[..., 0], jax.nn.logsumexp(scores, axis=-1), -jnp.inf)


def check(
    case: Case,
    implementation: str,
    with_lse: bool = True,
    seed: int = 0,
    attention: Any = flash_attention,
    plainly: Any = plain_attention,
) -> None:
    """Asserts the contract for one case of an `attention`, which `plainly` computes too."""
    expected, plain = _expected_and_plain(case, with_lse, seed, attention, plainly)

    def ours(*arrays: jax.Array, **options: Any) -> Any:
        return attention(*arrays, implementation=implementation, **options)

    actual = outputs_and_gradients(ours, case, make_inputs(case, seed), case.dtype, with_lse)
    for name, truth in expected.items():
        np.testing.assert_array_equal(np.isfinite(actual[name]), np.isfinite(truth), err_msg=name)
        error = _relative(actual[name], truth)
        allowed = 2 * _relative(plain[name], truth)
        # Where the plain version happens to be exact, rounding the result once must still be allowed.
        floor = 2 * float(jnp.finfo(case.dtype if name != "lse" else jnp.float32).eps)
        assert error <= max(allowed, floor), f"{name}: error {error:.2e}, allowed {max(allowed, floor):.2e}"


@functools.cache
def _expected_and_plain(case: Case, with_lse: bool, seed: int, attention: Any, plainly: Any) -> tuple[dict, dict]:
    inputs = make_inputs(case, seed)

    def exact(*arrays: jax.Array, **options: Any) -> Any:
        return attention(*arrays, implementation="reference", **options)

    with jax.enable_x64(True):
        expected = outputs_and_gradients(exact, case, inputs, jnp.float64, with_lse)
    return expected, outputs_and_gradients(plainly, case, inputs, case.dtype, with_lse)


def _relative(actual: np.ndarray, truth: np.ndarray) -> float:
    finite = np.isfinite(truth)
    difference = np.where(finite, actual - np.where(finite, truth, 0.0), 0.0)
    return float(np.linalg.norm(difference) / (np.linalg.norm(np.where(finite, truth, 0.0)) + 1e-30))
