"""Linear attention: against the quadratic form, the token-by-token recurrence, and itself cut in two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    NotSupported,
    empty_linear_state,
    linear_attention,
    lowering_platform,
    performer_attention,
    random_projection,
    record_choices,
    save_attention,
)
from pallas_kernels.linear_time_attention import xla
from tests.compilation import fully_optimized, run_jitted
from tests.marks import longer

B = 2
T = 21
N = 4
K = 2
H = 8
PROJECTION = random_projection(20, H, seed=1)


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(xla, "_SHORTEST_CHUNK", 8)
    monkeypatch.setattr(xla, "_LONGEST_CHUNK", 8)


def arrays(length=T, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, (B, length, heads, H), dtype) for key, heads in zip(keys, (N, K, K), strict=True)]


def documents(length=T, seed=0):
    return jnp.asarray(np.sort(np.random.default_rng(seed).integers(0, 3, (B, length)), axis=1))


def attend(kind, q, k, v, **options):
    if kind == "performer":
        return performer_attention(q, k, v, projection=PROJECTION, **options)
    return linear_attention(q, k, v, feature_map=kind, **options)


def out_and_gradients(kind, x, **options):
    def loss(*x):
        out = attend(kind, *x, **options)
        return (out.astype(jnp.float32) * jnp.sin(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    gradients, out = run_jitted(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), *x)
    return dict(zip(("out", "d_q", "d_k", "d_v"), (out, *gradients), strict=True))


def norm(x):
    return float(np.linalg.norm(np.asarray(x, np.float64)))


# --- the same as the quadratic form -----------------------------------------------------------------------------------

CASES = {
    "causal": {},
    "full": {"causal": False},
    "documents": {"segment_ids": documents()},
    "documents, full": {"segment_ids": documents(), "causal": False},
    "padding": {"segment_ids": jnp.where(jnp.arange(T) < jnp.array([[6], [0]]), -1, 2)},
}


@pytest.mark.parametrize("kind", ["elu", *longer("performer")])
@pytest.mark.parametrize("name", ["causal", "documents, full", *longer("full", "documents", "padding")])
def test_chunks_equal_the_quadratic_form_in_float32(name, kind):
    x = arrays()
    ours = out_and_gradients(kind, x, **CASES[name])
    expected = out_and_gradients(kind, x, implementation="reference", **CASES[name])
    for key, value in expected.items():
        assert norm(value) > 0 and norm(ours[key] - value) < 2e-5 * norm(value), key


def plain(q, k, v):
    """Causal elu attention as one writes it in the inputs' precision."""

    def phi(x):
        return jax.nn.elu(x) + 1

    k = jnp.repeat(k, N // K, axis=2)
    v = jnp.repeat(v, N // K, axis=2)
    weights = jnp.tril(jnp.einsum("btnf,bsnf->bnts", phi(q), phi(k)))
    weights = (weights.astype(jnp.float32) / weights.astype(jnp.float32).sum(-1, keepdims=True)).astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


@pytest.mark.longer
@pytest.mark.parametrize(("dtype", "platform"), [("bfloat16", "cpu"), ("float16", "cuda")])
def test_error_in_low_precision_at_most_twice_the_plain_version(dtype, platform):
    """On a CPU products are float32, lowered for a GPU they are in the inputs' dtype."""
    x = arrays(dtype=jnp.dtype(dtype))
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in x]
        exact = out_and_gradients("elu", wide, implementation="reference")
    weight = jnp.sin(jnp.arange(B * T * N * H)).reshape(B, T, N, H)
    gradients = run_jitted(jax.grad(lambda *x: (plain(*x).astype(jnp.float32) * weight).sum(), argnums=(0, 1, 2)), *x)
    plainly = dict(zip(("out", "d_q", "d_k", "d_v"), (run_jitted(plain, *x), *gradients), strict=True))
    with lowering_platform(platform):
        ours = out_and_gradients("elu", x)
    for key, truth in exact.items():
        error, allowed = (norm(np.asarray(y[key], np.float64) - np.asarray(truth)) for y in (ours, plainly))
        assert error <= 2 * allowed, (key, error, allowed)


def test_equal_to_the_recurrence_token_by_token():
    q, k, v = (np.asarray(x, np.float64) for x in arrays())

    def phi(x):
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    out = np.zeros(q.shape)
    for n in range(N):
        values = np.zeros((B, H, H))
        total = np.zeros((B, H))
        for t in range(T):
            feature = phi(k[:, t, n // 2])
            values += feature[:, :, None] * v[:, t, n // 2][:, None, :]
            total += feature
            query = phi(q[:, t, n])
            out[:, t, n] = np.einsum("bf,bfh->bh", query, values) / np.einsum("bf,bf->b", query, total)[:, None]
    np.testing.assert_allclose(run_jitted(linear_attention, *arrays()), out, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, 21, 64])
def test_the_chunk_does_not_matter(chunk):
    x = arrays()
    ours = run_jitted(lambda *x: linear_attention(*x, chunk=chunk), *x)
    np.testing.assert_allclose(ours, run_jitted(linear_attention, *x), atol=1e-5)


def test_own_feature_map_may_change_the_width():
    x = arrays()

    def both(x):
        return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x), x * x], -1)

    ours, expected = (
        run_jitted(lambda *x, name=name: linear_attention(*x, feature_map=both, implementation=name), *x)
        for name in ("xla", "reference")
    )
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.longer
def test_other_lengths_of_keys_without_causal():
    q, (_, k, v) = arrays(11)[0], arrays(17)
    for kind in ("elu", "performer"):
        ours, expected = (
            run_jitted(lambda *x, name=name, kind=kind: attend(kind, *x, causal=False, implementation=name), q, k, v)
            for name in ("xla", "reference")
        )
        np.testing.assert_allclose(ours, expected, atol=1e-5)


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*longer("elu"), "performer"])
@pytest.mark.parametrize("segmented", [*longer(False), True])
@pytest.mark.parametrize("implementation", ["xla", *longer("reference")])
def test_cut_in_two_with_a_state_is_the_same(kind, segmented, implementation):
    x = arrays()
    ids = np.asarray(documents()) if segmented else None
    features = PROJECTION.shape[0] if kind == "performer" else H

    def run(*x, cuts):
        state = empty_linear_state(B, K, features, H)
        outs = []
        for start, end in zip((0, *cuts), (*cuts, T), strict=True):
            part = [a[:, start:end] for a in x]
            own = None if ids is None else ids[:, start:end]
            out, state = attend(kind, *part, segment_ids=own, state=state, implementation=implementation)
            outs.append(out)
        return jnp.concatenate(outs, axis=1)

    same = np.asarray(documents())[:, 1:] == np.asarray(documents())[:, :-1]
    # A state belongs to the document that goes on.
    inside = (np.flatnonzero(same.all(axis=0)) + 1).tolist()
    whole = run_jitted(lambda *x: attend(kind, *x, segment_ids=ids, implementation=implementation), *x)
    for cuts in ((inside[3],), (inside[0], inside[-1])):
        np.testing.assert_allclose(run_jitted(lambda *x, cuts=cuts: run(*x, cuts=cuts), *x), whole, atol=2e-5)


@pytest.mark.longer
@pytest.mark.parametrize("kind", ["elu", *longer("performer")])
def test_gradients_flow_through_a_state(kind):
    x = arrays()

    def loss(*x, implementation, cut):
        if not cut:
            return (attend(kind, *x, implementation=implementation)[:, 9:] ** 2).sum()
        state = empty_linear_state(B, K, PROJECTION.shape[0] if kind == "performer" else H, H)
        _, state = attend(kind, *(a[:, :9] for a in x), state=state, implementation=implementation)
        return (attend(kind, *(a[:, 9:] for a in x), state=state, implementation=implementation)[0] ** 2).sum()

    whole = run_jitted(jax.grad(lambda *x: loss(*x, implementation="reference", cut=False), argnums=(0, 1, 2)), *x)
    ours = run_jitted(jax.grad(lambda *x: loss(*x, implementation="xla", cut=True), argnums=(0, 1, 2)), *x)
    for a, b in zip(ours, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


# --- numbers at the edge ----------------------------------------------------------------------------------------------


@pytest.mark.longer
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_queries_without_any_similarity_give_zero_and_finite_gradients(implementation):
    q, k, v = arrays()
    q = q.at[:, 5].set(-1.0)
    result = out_and_gradients("relu", (q, -jnp.abs(k), v), implementation=implementation)
    assert (result["out"] == 0).all()
    result = out_and_gradients("relu", (q, k, v), implementation=implementation)
    assert (result["out"][:, 5] == 0).all() and norm(result["out"]) > 0
    assert all(jnp.isfinite(x).all() for x in result.values())


def test_float16_states_do_not_overflow():
    x = [jnp.full((1, 4096, 1, H), 30.0, jnp.float16) for _ in range(3)]
    with lowering_platform("cuda"):
        out = run_jitted(lambda *x: linear_attention(*x, chunk=64), *x)
    np.testing.assert_allclose(out, 30.0, rtol=1e-2)


# --- memory, sharding, choice, messages -------------------------------------------------------------------------------


@pytest.mark.exhaustive
@fully_optimized()
def test_temporary_memory_is_linear_in_the_length(monkeypatch):
    monkeypatch.setattr(xla, "_LONGEST_CHUNK", 64)

    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        gradient = jax.grad(lambda *x: (linear_attention(*x) ** 2).sum(), argnums=(0, 1, 2))
        return jax.jit(gradient).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    first = temporary(2048)
    second = temporary(4096)
    # Quadratic would be four times.
    assert second < 2.5 * first and second < 4096 * 4096


@fully_optimized()
def test_sharded_over_batch_and_heads_moves_nothing():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data", None, "tensor"))
    x = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arrays()]
    for kind in ("elu", "performer"):
        gradient = jax.grad(lambda *x, kind=kind: (attend(kind, *x) ** 2).sum(), argnums=(0, 1, 2))
        text = jax.jit(gradient, out_shardings=sharding).lower(*x).compile().as_text()
        assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute", "all-reduce"))


def test_the_output_is_kept_by_the_policy_of_attention():
    def loss(x, policy):
        layer = jax.checkpoint(lambda x: jnp.sin(linear_attention(x, x, x)), policy=policy)
        return str(jax.make_jaxpr(jax.grad(lambda x: layer(x).sum()))(x)).count("cumsum")

    x = arrays()[0]
    assert "flash_attention_out" in str(jax.make_jaxpr(lambda x: linear_attention(x, x, x))(x))
    assert loss(x, save_attention) <= loss(x, jax.checkpoint_policies.nothing_saveable)


def test_choice_is_recorded_and_names_are_checked():
    x = arrays()
    with record_choices() as choices:
        jax.eval_shape(lambda *x: linear_attention(*x), *x)
    assert [(c.operation, c.backend) for c in choices] == [("linear_attention", "xla")]
    with pytest.raises(NotSupported, match="did you mean 'xla'"):
        linear_attention(*x, implementation="xlaa")


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_map": "elo"}, "'elo' is unknown: give one of 'elu', 'relu'"),
        ({"segment_ids": jnp.zeros((B, 3), int)}, r"shape \[2, 21\].*got \[2, 3\]"),
        ({"segment_ids": jnp.zeros((B, T))}, "must be integers; got float32"),
        ({"chunk": 0}, "at least 1.*got 0"),
        ({"causal": False, "state": empty_linear_state(B, K, H, H)}, "causal=True"),
    ],
)
def test_wrong_arguments_name_the_rule(options, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(*arrays(), **options)


@pytest.mark.usefixtures("unchecked_shapes")
def test_causal_lengths_must_agree():
    q, (_, k, v) = arrays(11)[0], arrays(17)
    with pytest.raises(ValueError, match="T = S; got T 11, S 17; pass the earlier tokens in `state`"):
        linear_attention(q, k, v)
