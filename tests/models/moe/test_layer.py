"""The mixture-of-experts sublayer against a loop over experts, in a Transformer, and while decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.loss import language_model_loss
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.activations import ACTIVATIONS
from jaxstack.models.moe.exchange import arrange, sum_rows, take_rows, take_weights
from jaxstack.models.moe.router import route
from jaxstack.models.moe_layer import MoE
from tests.compilation import run_jitted
from tests.marks import longer
from tests.small_runs import batch_at

BASE = {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
X = np.random.default_rng(0).normal(size=(2, 12, 16)).astype(np.float32)


def model_config(moe: dict | None = None, **values) -> ModelConfig:
    return ModelConfig(**{**BASE, "initialization": "fan_in", "moe": {**MIXTURE, **(moe or {})}, **values})


def loop_over_experts(layer: MoE, x: jax.Array) -> jax.Array:
    """Every expert on every token, weighted; what was not chosen or is dropped has weight 0."""
    bias = layer.router.balance_bias
    routing = route(layer.moe, x @ layer.router.kernel[...], None if bias is None else bias[...])
    y = jnp.zeros_like(x)
    for expert in range(layer.moe.num_experts):
        hidden = x @ layer.up_proj.kernel[...][expert]
        if layer.gate_proj is not None:
            hidden = layer.activation(x @ layer.gate_proj.kernel[...][expert]) * hidden
        else:
            hidden = layer.activation(hidden)
        weight = jnp.where(routing.experts == expert, routing.weights, 0).sum(-1, keepdims=True)
        y += weight * (hidden @ layer.down_proj.kernel[...][expert])
    return y if layer.shared_experts is None else y + layer.shared_experts(x)


KINDS = {
    "softmax": {},
    "sigmoid_bias_scaled": {"scoring_func": "sigmoid", "balance_bias": True, "routed_scaling_factor": 2.5},
    "not_normalised": {"norm_topk_prob": False, "num_experts_per_tok": 3},
    "all_experts": {"num_experts_per_tok": 5},
    "capacity": {"capacity_factor": 0.7},
    "shared": {"n_shared_experts": 2, "moe_intermediate_size": 8},
    "one_expert": {"num_experts": 1, "num_experts_per_tok": 1},
}


QUICK = ("softmax",)
LONGER = ("capacity", "sigmoid_bias_scaled", "shared")


@pytest.mark.longer
@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *longer(*LONGER),
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (*KINDS, "plain") if n not in (*QUICK, *LONGER)),
    ],
)
def test_output_and_gradients_are_those_of_the_loop_over_experts(name):
    values = {"mlp": "plain", "hidden_act": "gelu"} if name == "plain" else {}
    graphdef, state = nnx.split(MoE(model_config(KINDS.get(name), **values), nnx.Rngs(0)))
    cotangent = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)

    def total(function):
        def run(state, x):
            y = function(nnx.merge(graphdef, state), x)
            return (y * cotangent).sum(), y

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(state, X)

    (_, found), gradients = total(lambda layer, x: layer(x)[0])
    (_, wanted), wanted_gradients = total(loop_over_experts)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), gradients, wanted_gradients)
    assert name == "one_expert" or all(np.any(g) for g in jax.tree.leaves(gradients) if g.ndim > 1)


def test_arrange_gives_each_assignment_a_row_of_its_group():
    assigned = np.array([[2, 0], [3, 2], [0, 2], [1, 3]], np.int32)  # 3 is of no group
    rows, sizes = run_jitted(lambda assigned: arrange(assigned, 3, 4), assigned)
    assert sizes.tolist() == [2, 1, 3]
    assert rows.source.tolist()[:12] == [1, 4, 8, 8, 6, 8, 8, 8, 0, 3, 5, 8]
    count = rows.source.shape[0]
    assert rows.place.tolist() == [[8, 0], [count, 9], [1, 10], [4, count]]


@pytest.mark.longer
def test_the_ways_to_rows_and_back_are_transposed():
    """Each custom gradient is the transpose of its forward, and none of them scatters."""
    assigned = jax.random.randint(jax.random.key(0), (7, 2), 0, 5)
    rows, _ = arrange(assigned, 4, 8)
    single, _ = arrange(assigned[:, :1], 4, 8)
    keys = jax.random.split(jax.random.key(1), 3)
    tokens = jax.random.normal(keys[0], (7, 3))
    weights = jax.random.normal(keys[1], (7, 2))
    y = jax.random.normal(keys[2], (rows.source.shape[0], 3))
    u = jax.random.normal(keys[0], (7, 3))
    of_rows = jax.random.normal(keys[1], y.shape)
    calls = (
        (lambda x: take_rows(x, rows), (tokens,), of_rows),
        (lambda y: sum_rows(y, single), (y[: single.source.shape[0]],), u),
        (lambda y: sum_rows(y, rows), (y,), u),
        (lambda weights: take_weights(weights, rows), (weights,), of_rows[:, 0]),
    )
    for function, arguments, cotangent in calls:
        out, transpose = jax.vjp(function, *arguments)
        for argument, gradient in zip(arguments, transpose(cotangent), strict=True):
            np.testing.assert_allclose(jnp.vdot(gradient, argument), jnp.vdot(cotangent, out), rtol=1e-4)
        assert "scatter" not in str(jax.make_jaxpr(transpose)(cotangent))


def test_layers_alternate_and_scan():
    """Two leading dense layers, then every third; scanned in groups, equal to the unrolled ones."""
    moe = {"first_k_dense_replace": 2, "decoder_sparse_step": 2}
    config = model_config(moe, num_layers=8)
    kinds = [layer.feed_forward == "experts" for layer in config.layers()]
    assert kinds == [False, False, False, True, False, True, False, True]
    scanned = Transformer(config, nnx.Rngs(0))
    stack = scanned.decoder
    assert (stack.start, stack.period, stack.repeats) == (2, 2, 3)
    assert [isinstance(block.mlp, MoE) for block in stack.layers] == [False, False, False, True]
    unrolled = Transformer(config.model_copy(update={"scan_layers": False}), nnx.Rngs(1))
    for index, block in enumerate(unrolled.decoder.layers):
        if index < 2:
            nnx.update(block, nnx.state(stack.layers[index]))
            continue
        repetition, position = divmod(index - 2, 2)
        state = nnx.state(stack.layers[2 + position])
        nnx.update(block, jax.tree.map(lambda x: x[repetition], state))  # noqa: B023
    for name in ("embedding", "final_norm"):
        nnx.update(getattr(unrolled, name), nnx.state(getattr(scanned, name)))
    unrolled.head[...] = scanned.head[...]
    tokens = jnp.asarray(batch_at(0, 2)["tokens"])
    run = nnx.jit(lambda model: model.hidden_and_sums(tokens))
    found = run(unrolled)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, run(scanned))
    assignments = tokens.size * MIXTURE["num_experts_per_tok"]
    routers = found[1]["router"]
    assert routers.load.sum(axis=1).tolist() == [assignments * kind for kind in kinds]
    assert (routers.entropy[np.array(kinds)] > 0).all()


def test_recorded_experts_are_replayed():
    """The scanned layers behind a dense one; a capacity drops the same tokens again."""
    model = Transformer(model_config({"first_k_dense_replace": 1, "capacity_factor": 1.0}, num_layers=3), nnx.Rngs(0))
    tokens = jnp.asarray(batch_at(0, 2)["tokens"])
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, experts):
        model = nnx.merge(graphdef, state)
        hidden, sums = model.hidden_and_sums(tokens, experts=experts, records_experts=True)
        return hidden, sums["router"].experts

    plain, experts = run(state, None)
    assert experts.shape == (*tokens.shape, 3, 2) and not experts[:, :, 0].any() and experts[:, :, 1:].any()
    replayed, again = run(state, experts)
    assert (replayed == plain).all() and (again == experts).all()
    other = experts.at[0, 3, 2].set((experts[0, 3, 2] + 1) % 5)
    changed, again = run(state, other)
    assert (again == other).all()
    differs = (changed != plain).any(-1)
    assert differs[0, 3] and not differs[:, :3].any() and not differs[1].any()
    with pytest.raises(ValueError, match=r"experts are \[B, T, layers, k\]"):
        model(tokens, experts=experts[:, :, :2])


def test_deepseek_layers_are_one_scan_behind_the_dense_ones():
    config = model_config({"first_k_dense_replace": 3}, num_layers=61)
    stack = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))).decoder
    assert (stack.start, stack.period, stack.repeats, len(stack.layers)) == (3, 1, 58, 4)


def test_the_loss_of_the_routers_counts_in_training_only():
    model = Transformer(model_config({"router_aux_loss_coef": 0.5}), nnx.Rngs(0))
    batch = {name: jnp.asarray(x) for name, x in batch_at(0, 2).items()}

    @nnx.jit
    def run(model):
        router_loss = model.hidden_and_sums(batch["tokens"], segment_ids=batch["segment_ids"])[1]["router"].loss
        return (
            language_model_loss(model, batch),
            language_model_loss(model, batch, key=jax.random.key(0), train=True),
            router_loss,
        )

    plain, trained, router_loss = run(model)
    assert router_loss > 0.5 * 2 * batch["tokens"].size * 0.9, "about 1 a token and layer, times the coefficient"
    np.testing.assert_allclose(trained.total, plain.total + router_loss, rtol=1e-6)
    assert trained.count == plain.count
    dense = Transformer(model_config().model_copy(update={"moe": None}), nnx.Rngs(0))
    assert not dense.hidden_and_sums(batch["tokens"])[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "policy", ["full", *(pytest.param(p, marks=pytest.mark.exhaustive) for p in ("save_dots", "save_attention"))]
)
def test_every_remat_policy_has_the_same_gradients(policy):
    batch = {name: jnp.asarray(x) for name, x in batch_at(0, 2).items()}

    def gradients(policy):
        graphdef, state = nnx.split(Transformer(model_config(remat=policy), nnx.Rngs(0)))

        def loss(state):
            return language_model_loss(nnx.merge(graphdef, state), batch, key=jax.random.key(0), train=True).total

        return jax.jit(jax.grad(loss))(state)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradients(policy), gradients("none")
    )


def test_decoding_gives_the_logits_of_the_whole_forward_also_with_a_capacity():
    """A capacity is one of training: a token that decodes alone is never dropped."""
    config = model_config({"capacity_factor": 100.0, "n_shared_experts": 1})
    model = Transformer(config, nnx.Rngs(0))
    tokens = jnp.asarray(batch_at(0, 2)["tokens"])[:, :8]
    forward = nnx.jit(lambda model, tokens: model(tokens))
    decode = nnx.jit(lambda model, *arguments: model.decode(*arguments))
    wanted = forward(model, tokens)
    tight = config.moe.model_copy(update={"capacity_factor": 0.1})
    for block in model.decoder.layers:
        block.mlp.moe = tight
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    logits, cache = decode(model, tokens[:, :5], positions[:, :5], model.make_cache(2, 8))
    found = [logits]
    for step in range(5, 8):
        logits, cache = decode(model, tokens[:, step : step + 1], positions[:, step : step + 1], cache)
        found.append(logits)
    np.testing.assert_allclose(jnp.concatenate(found, 1), wanted, rtol=1e-4, atol=1e-4)
    assert np.abs(forward(model, tokens) - wanted).max() > 1e-3, "training would have dropped some"


def test_experts_have_no_biases():
    with pytest.raises(ValueError, match="mlp_bias must be false with moe"):
        model_config(mlp_bias=True)


def test_activations_leave_rows_of_no_group_at_zero():
    """What dispatch relies on: padding rows are 0 in front of every matmul."""
    assert all(float(act(jnp.zeros(()))) == 0 for act in ACTIVATIONS.values())
