"""Mixtures of experts on several devices: every layout trains as one device does, however uneven the load."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.data.device_batches import arrange
from jaxstack.errors import ConfigError
from jaxstack.loss import language_model_loss
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.moe.exchange import compute_on_expert_devices, compute_on_this_device, count_buffer_rows
from jaxstack.parallel import ParallelConfig, logical_axis_rules, make_mesh, make_rules, with_local_tokens
from tests.parallel.test_layouts import assert_trains_as_one_device
from tests.small_runs import batch_at, small_config

MIXTURE = (
    "model.moe={num_experts: 12, num_experts_per_tok: 3, moe_intermediate_size: 24, router_aux_loss_coef: 0.01}",
    "train.global_batch_size=24",
)
DEEPSEEK = (
    "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, n_shared_experts: 1, "
    "scoring_func: sigmoid, balance_bias: true, first_k_dense_replace: 1, router_z_loss_coef: 0.001}",
    "model.num_layers=3",
    "model.remat=full",
    "train.global_batch_size=8",
)
GPT_OSS = (
    "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, router_bias: true, "
    "expert_bias: true, swiglu_limit: 1.0}",
    "model.attention={name: softmax, sinks: true}",
    "model.layer_types=[sliding_attention,full_attention]",
    "model.sliding_window=5",
    "train.global_batch_size=8",
)
LLAMA4 = (
    "model.moe={num_experts: 4, num_experts_per_tok: 1, moe_intermediate_size: 16, n_shared_experts: 1, "
    "scoring_func: sigmoid, norm_topk_prob: false, weight_inputs: true, decoder_sparse_step: 2}",
    "model.layer_types=[chunked_attention,full_attention_no_rope]",
    "model.attention_chunk_size=6",
    "model.floor_scale=4",
    "model.qk_norm=without_gain",
    "train.global_batch_size=8",
)
GEMMA4 = (
    "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, beside_mlp: true}",
    "model.attention={name: gemma4, global_head_dim: 24, num_global_kv_heads: 1, attention_k_eq_v: true}",
    "model.layer_types=[sliding_attention,full_attention]",
    "model.sliding_window=5",
    "model.rope_local_base_freq=100.0",
    "model.qk_norm=true",
    "model.post_norms=true",
    "model.layer_scalars=true",
    "train.global_batch_size=8",
    "optimizer.eps=1e-3",  # norms of values and of both outputs: smaller gradients, of which rounding is a larger part
)
LATENT = (
    "model.moe={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 16, n_shared_experts: 1, n_group: 4, "
    "topk_group: 2, scoring_func: sigmoid, balance_bias: true, first_k_dense_replace: 1}",
    "model.attention={name: latent, q_lora_rank: 24, kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 4, "
    "v_head_dim: 6}",
    "model.head_dim=12",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.num_layers=3",
    "train.global_batch_size=8",
)
FEW_SLOTS = ("model.moe.exchange_factor=0.3",)
CAPACITY = ("model.moe.capacity_factor=0.8",)


def layout(**degrees: int) -> tuple[str, ...]:
    return tuple(f"parallel.{axis}={degree}" for axis, degree in degrees.items())


def slow(*layouts: tuple[str, ...]):
    return [pytest.param(found, marks=pytest.mark.exhaustive) for found in layouts]


@pytest.mark.parametrize(
    "overrides",
    [
        layout(expert=2),
        (*layout(fsdp=2, expert=2, tensor=2), "parallel.sequence=true", "train.gradient_accumulation=2"),
        *slow(
            layout(expert=3),
            layout(expert=6),
            layout(data=3, expert=2),
            layout(expert=4, tensor=2),
            (*layout(data=2, fsdp=2, expert=2), "train.gradient_accumulation=3"),
            layout(data=4, tensor=2),
            layout(fsdp=8),
            (*layout(data=2, expert=2), *FEW_SLOTS),
        ),
    ],
    ids=" ".join,
)
@pytest.mark.exhaustive
def test_every_layout_gives_the_loss_curve_of_one_device(overrides):
    assert_trains_as_one_device(*overrides, shape=MIXTURE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        layout(data=2, expert=2, tensor=2),
        (*layout(fsdp=4, expert=2), *FEW_SLOTS),
        (*layout(expert=4, tensor=2), "parallel.sequence=true", "model.scan_layers=false"),
        (*layout(data=2, fsdp=2), "train.gradient_accumulation=2"),
    ],
    ids=" ".join,
)
def test_shared_experts_and_the_balance_bias_too(overrides):
    unrolled = [o for o in overrides if o.startswith("model.scan_layers")]
    assert_trains_as_one_device(*overrides, shape=(*DEEPSEEK, *unrolled))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        layout(expert=2, tensor=2, context=2),
        *slow(
            layout(data=2, fsdp=2, tensor=2),
            (*layout(pipeline=2, fsdp=2, expert=2), "model.num_layers=4"),
            (*layout(tensor=4), "parallel.sequence=true"),
            (*layout(context=4), "parallel.context_method=ring"),
        ),
    ],
    ids=" ".join,
)
def test_attention_sinks_and_biases_of_experts_too(overrides):
    assert_trains_as_one_device(*overrides, shape=(*GPT_OSS, *(o for o in overrides if o.startswith("model."))))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        layout(fsdp=2, tensor=2, context=2),
        *slow(
            layout(expert=2, tensor=2, data=2),
            (*layout(pipeline=2, fsdp=2, expert=2), "model.num_layers=5"),
            (*layout(tensor=4), "parallel.sequence=true"),
            (*layout(context=4), "parallel.context_method=ring"),
            (*layout(context=2), "parallel.context_method=all_to_all", "model.remat=full"),
        ),
    ],
    ids=" ".join,
)
def test_latent_attention_and_groups_of_experts_too(overrides):
    assert_trains_as_one_device(*overrides, shape=(*LATENT, *(o for o in overrides if o.startswith("model."))))


@pytest.mark.exhaustive
def test_weighted_inputs_and_chunks_too():
    assert_trains_as_one_device(*layout(expert=2, tensor=2, context=2), shape=LLAMA4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides", [layout(fsdp=2, expert=2, tensor=2), layout(context=4), layout(pipeline=2, expert=2)], ids=" ".join
)
def test_experts_next_to_an_mlp_and_heads_of_two_widths_too(overrides):
    # Of four layers the rounding of gradients is a larger part still.
    four = ("model.num_layers=4", "optimizer.eps=3e-3")
    more = four if any(o.startswith("parallel.pipeline") for o in overrides) else ()
    assert_trains_as_one_device(*overrides, shape=(*GEMMA4, *more))


@pytest.mark.exhaustive
def test_a_pipeline_whose_first_layer_is_dense_and_whose_last_one_is_left_over():
    """Both run with the ends of the model; the last is a mixture, whose experts stay apart."""
    windows = ("model.num_layers=6", "model.layer_types=[sliding_attention,full_attention]", "model.sliding_window=5")
    assert_trains_as_one_device(*layout(pipeline=2, expert=2, fsdp=2), shape=(*DEEPSEEK, *windows))


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", [layout(expert=4), layout(data=2, expert=2, tensor=2)], ids=" ".join)
def test_a_capacity_drops_the_same_tokens(overrides):
    assert_trains_as_one_device(*overrides, shape=(*DEEPSEEK, *CAPACITY))


@pytest.mark.exhaustive
def test_adapters_of_experts_too():
    rules = "adapters.rules=[{path: mlp/down_proj, method: dora, rank: 4}, {path: mlp, rank: 4}]"
    assert_trains_as_one_device(*layout(fsdp=2, expert=2, tensor=2), shape=(*DEEPSEEK, rules))


@pytest.mark.exhaustive
def test_given_experts_are_followed_on_every_device():
    """Packed documents, sequences and experts split; experts next to an MLP, recomputed in the backward pass."""
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "beside_mlp": True}
    small = {"vocab_size": 64, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "num_layers": 2}
    config = ModelConfig(**small, moe=moe, post_norms=True, remat="full")
    graphdef, state = nnx.split(Transformer(config, nnx.Rngs(0)))
    batch = batch_at(0, 4)
    batch["experts"] = np.random.default_rng(0).permuted(np.tile(np.arange(4), (*batch["tokens"].shape, 2, 1)), axis=-1)
    batch["experts"] = batch["experts"][..., :2].astype(np.int32)

    def gradients(state, batch):
        return jax.value_and_grad(lambda state: language_model_loss(nnx.merge(graphdef, state), batch).total)(state)

    wanted = jax.jit(gradients)(state, batch)
    rules = make_rules(make_mesh(ParallelConfig(fsdp=2, expert=2, context=2), jax.devices()))
    with logical_axis_rules(rules):
        found = jax.jit(gradients)(state, arrange(batch, rules))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, wanted)
    other = jax.jit(gradients)(state, {**batch, "experts": batch["experts"][:, ::-1]})
    assert abs(other[0] - wanted[0]) > 1e-3


# --- the exchange -----------------------------------------------------------------------------------------------------

DEVICES = 4
TOKENS = 24
WIDTH = 3
EXPERTS = 8
CHOSEN = 2


def plainly(rows, weights, kernels, sizes, alignment):
    """Each row times its expert's number, and squared: an elementwise stand-in for the matmuls."""
    starts = jnp.cumsum(-(-sizes // alignment) * alignment)
    expert = jnp.searchsorted(starts, jnp.arange(rows.shape[0]), side="right")
    return jnp.square(rows) * weights[:, None] * kernels["up"].at[expert].get(mode="fill", fill_value=0)


LOADS = {
    "even": lambda random: random.permuted(np.tile(np.arange(EXPERTS), (TOKENS * DEVICES, 1)), axis=1)[:, :CHOSEN],
    "all_to_one_device": lambda random: np.tile([0, 1], (TOKENS * DEVICES, 1)),
    "one_pair_of_devices": lambda random: np.where(np.arange(TOKENS * DEVICES)[:, None] < TOKENS, [[6, 7]], [[2, 5]]),
    "some_dropped": lambda random: random.integers(0, EXPERTS + 1, (TOKENS * DEVICES, CHOSEN)),
    "all_dropped": lambda random: np.full((TOKENS * DEVICES, CHOSEN), EXPERTS),
}


QUICK = (("even", 0.3), ("all_to_one_device", 1.5), ("some_dropped", 4.0))
"""Several rounds for an even load, several for an uneven one, and a buffer that surely suffices."""
PAIRS = [
    pytest.param(load, factor, marks=() if (load, factor) in QUICK else pytest.mark.exhaustive)
    for load in LOADS
    for factor in (0.3, 1.5, 4.0)
]


@pytest.mark.parametrize(("load", "factor"), PAIRS)
def test_no_token_is_lost_however_uneven_the_load(load, factor):
    """The results and gradients are those of experts on one device."""
    random = np.random.default_rng(0)
    experts = jnp.asarray(LOADS[load](random), jnp.int32)
    x = jnp.asarray(random.normal(size=(TOKENS * DEVICES, WIDTH)), jnp.float32)
    weights = jnp.asarray(random.random(experts.shape), jnp.float32)
    kernels = {"up": jnp.asarray(random.normal(size=(EXPERTS, 1)), jnp.float32)}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("expert",))
    spec = jax.P("expert")

    def apart(x, weights, kernels):
        run = functools.partial(compute_on_expert_devices, plainly, devices=DEVICES, factor=factor)
        mapped = jax.shard_map(
            lambda x, w, k, e: run(x, e, w, k), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return mapped(x, weights, kernels, experts)

    def here(x, weights, kernels):
        return compute_on_this_device(plainly, x, experts, weights, kernels)

    def total(function):
        def value(*arrays):
            return (jnp.sin(out := function(*arrays)).sum(), out)

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))(x, weights, kernels)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), total(apart), total(here))


def test_slots_are_bounded_by_what_can_be_sent():
    assert count_buffer_rows(1000, 4, 1.5, 1000) == 376, "1.5 x 250, in eights"
    assert count_buffer_rows(1000, 4, 8.0, 1000) == 1000
    assert count_buffer_rows(1000, 4, 1.5, 60) == 60


@pytest.mark.longer
def test_in_a_shard_map_that_has_taken_the_axes():
    """As in a step that is manual over the batch's axes: each device's own loss, its gradients summed where whole."""
    rules = make_rules(make_mesh(ParallelConfig(data=2, expert=2, tensor=2), jax.devices()))
    parameters = {
        "up": (jax.random.normal(jax.random.key(0), (4, 6, 8)), ("expert", "embed", "expert_mlp")),
        "down": (jax.random.normal(jax.random.key(1), (4, 8, 6)), ("expert", "expert_mlp", "embed")),
        "router": (jax.random.normal(jax.random.key(2), (6, 4)), ("embed", "router")),
    }
    names = {name: names for name, (_, names) in parameters.items()}
    stored = {name: array for name, (array, _) in parameters.items()}
    x = jax.random.normal(jax.random.key(3), (8, 5, 6))

    def layer(tokens, arrays, split):
        x = tokens[0]
        logits = x @ arrays["router"]
        experts = jax.lax.top_k(logits, 2)[1].reshape(-1, 2)
        weights = jax.nn.softmax(logits).reshape(-1, 4)[jnp.arange(experts.shape[0])[:, None], experts]
        kernels = {"up": arrays["up"], "down": arrays["down"]}

        def compute(rows, weights, kernels, sizes, alignment):
            ends = jnp.cumsum(-(-sizes // alignment) * alignment)
            owner = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")
            hidden = jnp.einsum("rd,rdf->rf", rows, kernels["up"].at[owner].get(mode="fill", fill_value=0))
            hidden *= weights[:, None]
            return jnp.einsum("rf,rfd->rd", hidden, kernels["down"].at[owner].get(mode="fill", fill_value=0))

        devices = 4 // kernels["up"].shape[0]
        tokens = x.reshape(-1, 6)
        if devices == 1:
            y = compute_on_this_device(compute, tokens, experts, weights, kernels)
        else:
            y = compute_on_expert_devices(compute, tokens, experts, weights, kernels, devices=devices, factor=1.5)
        return y.reshape(x.shape), logits.sum(), None

    def loss(x, stored):
        y, share, _ = with_local_tokens(
            layer, (x, None), {name: (p, names[name]) for name, p in stored.items()}, jnp.float32
        )
        return (y**2).sum() + 0.1 * share

    def device(x, stored):
        with logical_axis_rules(rules.within(["data", "expert"])):
            value, (d_x, d_stored) = jax.value_and_grad(loss, argnums=(0, 1))(x, stored)
        d_router = jax.lax.psum(d_stored.pop("router"), ("data", "expert"))
        d_stored = jax.lax.psum(d_stored, "data")
        return jax.lax.psum(value, ("data", "expert")), d_x, {**d_stored, "router": d_router}

    held = {"up": jax.P("expert"), "down": jax.P("expert"), "router": jax.P()}
    rows = jax.P(("data", "expert"))
    found = jax.jit(
        jax.shard_map(
            device,
            mesh=rules.mesh,
            in_specs=(rows, held),
            out_specs=(jax.P(), rows, held),
            axis_names={"data", "expert"},
            check_vma=False,
        )
    )(x, stored)
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, stored)
    wanted = (value, *gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4), found, wanted)


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("parallel.expert=2",), "but this model has none; use data or fsdp"),
        ((*MIXTURE, "parallel.expert=8"), r"num_experts \(12\) must be divisible.*fit: 1, 2, 3, 4, 6, 12"),
        ((*MIXTURE, "parallel.tensor=4", "model.moe.moe_intermediate_size=30"), "nearest: 28 or 32"),
        ((*MIXTURE, *layout(data=2, expert=4), "train.gradient_accumulation=5"), "global_batch_size"),
        ((*MIXTURE, *layout(data=5, expert=2)), r"data x fsdp x expert x.*\(5 x 1 x 2 x 1 = 10\); nearest: 20 or 30"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        small_config(*overrides)
