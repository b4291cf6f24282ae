"""Every layout trains as one device does: the same losses, the same parameters."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxstack.models.remat import OFFLOADED
from jaxstack.state import TrainState
from pallas_kernels import record_choices
from tests.small_runs import LENGTH, make_trainer, metrics_of_steps, small_config, unpacked_batch_at

pytestmark = pytest.mark.longer  # a few seconds each

STEPS = 10
ROWS = 16


@functools.cache
def initial_state(*overrides: str) -> TrainState:
    """Of one device, as host arrays; the key has to be copied, as a step takes its buffer."""
    return jax.device_get(make_trainer(small_config(*overrides)).state)


class Trained(NamedTuple):
    losses: list[float]
    gradient_norms: list[float]
    mtp_losses: list[float]
    balance: dict[str, float]
    params: dict[str, np.ndarray]


def train(*overrides: str, shape: tuple[str, ...] = (), packed: bool = True) -> Trained:
    """Ten steps from the same initial state in every layout, and the parameters after them."""
    # Adam divides by sqrt(v) + eps: with a small eps the rounding of a gradient close to 0 would be seen in full.
    shape = (f"train.global_batch_size={ROWS}", "optimizer.eps=1e-4", *shape)
    config = small_config(*shape, *overrides)
    sizes = config.train.global_batch_size, config.train.sequence_length, config.model.vocab_size or 0
    trainer = make_trainer(config, None if packed else lambda step: unpacked_batch_at(step, *sizes))
    start = initial_state(*shape)
    shardings = jax.tree.map(lambda x: x.sharding, trainer.abstract_stored_state)
    trainer.stored_state = jax.device_put(start._replace(key=jax.random.clone(start.key)), shardings)
    metrics = metrics_of_steps(trainer, STEPS)
    params = jax.device_get(trainer.stored_state.params)
    losses, norms, mtp = ([m[name] for m in metrics if name in m] for name in ("loss", "grad_norm", "mtp_loss"))
    balance = {name: x for name, x in metrics[0].items() if name.startswith(("router", "expert"))}
    return Trained(losses, norms, mtp, balance, params)


@functools.cache
def reference(*shape: str, packed: bool = True) -> Trained:
    return train(shape=shape, packed=packed)


def assert_trains_as_one_device(*overrides: str, shape: tuple[str, ...] = (), packed: bool = True) -> None:
    found = train(*overrides, shape=shape, packed=packed)
    wanted = reference(*shape, packed=packed)
    assert wanted.losses[-1] < wanted.losses[0] - 0.02, "the reference learns"
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-5)
    np.testing.assert_allclose(found.mtp_losses, wanted.mtp_losses, rtol=1e-5)
    # Later ones have a tenfold larger share of what the parameters were rounded to.
    np.testing.assert_allclose(found.gradient_norms[:3], wanted.gradient_norms[:3], rtol=1e-5)
    assert found.balance == pytest.approx(wanted.balance, rel=1e-5)
    assert bool(wanted.balance) == any(text.startswith("model.moe") for text in shape)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), found.params, wanted.params)


def triples(devices: int) -> list[tuple[int, int, int]]:
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    return [(a, b, devices // a // b) for a in divisors for b in divisors if devices % (a * b) == 0]


def layout(data: int, fsdp: int, tensor: int, sequence: bool = False) -> tuple[str, ...]:
    found = (f"parallel.data={data}", f"parallel.fsdp={fsdp}", f"parallel.tensor={tensor}")
    return (*found, "parallel.sequence=true") if sequence else found


def every_layout_of_eight() -> list[tuple[str, ...]]:
    """All degrees, also with sequence parallelism where there is a tensor axis; accumulations that fit, in turn."""
    found = []
    for data, fsdp, tensor in triples(8):
        for sequence in (False, True) if tensor > 1 else (False,):
            pieces = [p for p in (1, 2, 4) if ROWS % (data * fsdp * p) == 0]
            accumulation = pieces[len(found) % len(pieces)]
            found.append((*layout(data, fsdp, tensor, sequence), f"train.gradient_accumulation={accumulation}"))
    return found


@pytest.mark.parametrize("overrides", every_layout_of_eight(), ids=" ".join)
def test_eight_devices_give_the_loss_curve_of_one(overrides):
    assert_trains_as_one_device(*overrides)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        (*layout(8, 1, 1), "parallel.zero=1", "train.gradient_accumulation=2"),
        (*layout(4, 1, 2, True), "parallel.zero=1"),
        (*layout(2, 2, 2), "parallel.zero=2", "train.gradient_accumulation=2"),
        (*layout(4, 2, 1), "parallel.zero=2"),
    ],
    ids=" ".join,
)
def test_zero_over_data(overrides):
    assert_trains_as_one_device(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        (*layout(2, 2, 2, True), "train.gradient_accumulation=2"),
        (*layout(4, 2, 1), "train.gradient_accumulation=2"),
        (*layout(2, 4, 1), "parallel.zero=2", "train.gradient_accumulation=2"),
        layout(1, 2, 4),
    ],
    ids=" ".join,
)
def test_unrolled_layers_too(overrides):
    assert_trains_as_one_device(*overrides, shape=("model.scan_layers=false",))


SHARED_KEYS = (
    "model.num_layers=6",  # the last four are scanned
    "model.num_kv_heads=2",
    "model.num_kv_shared_layers=4",
    "model.use_double_wide_mlp=true",
    "model.hidden_size_per_layer_input=8",
    "model.attention={name: gemma4, global_head_dim: 8}",
    "model.layer_types=[sliding_attention,full_attention]",
    "model.sliding_window=5",
    "model.rope_local_base_freq=100.0",
    "model.qk_norm=true",
    "model.post_norms=true",
    "optimizer.eps=1e-3",  # norms of values and of updates: smaller gradients, of which rounding is a larger part
    "train.global_batch_size=8",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", [layout(1, 2, 2), ("parallel.context=2", "model.remat=full")], ids=" ".join)
def test_keys_of_earlier_layers_and_embeddings_of_each_layer_too(overrides):
    assert_trains_as_one_device(*overrides, shape=(*SHARED_KEYS, *(o for o in overrides if o.startswith("model."))))


@pytest.mark.parametrize(
    "overrides",
    [
        (*layout(1, 8, 1), "train.gradient_accumulation=2"),
        layout(2, 2, 2, True),
        (*layout(4, 1, 2), "parallel.zero=1"),
        pytest.param((*layout(2, 2, 1), "parallel.pipeline=2"), marks=pytest.mark.exhaustive),
        pytest.param((*layout(2, 1, 1), "parallel.context=4"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
@pytest.mark.exhaustive
def test_muon_on_matrices_in_parts(overrides):
    assert_trains_as_one_device(*overrides, shape=("optimizer.name=muon",))


@pytest.mark.parametrize(
    "overrides",
    [
        (*layout(1, 2, 1), "parallel.context=2", "train.gradient_accumulation=2"),
        pytest.param((*layout(2, 1, 2, True), "parallel.zero=2"), marks=pytest.mark.exhaustive),
        pytest.param((*layout(1, 1, 3), "train.gradient_accumulation=4"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
@pytest.mark.exhaustive
def test_dropout_masks_do_not_depend_on_the_layout(overrides):
    shape = ("model.dropout=0.2", "model.num_heads=6", "model.head_dim=4")
    assert_trains_as_one_device(*overrides, shape=shape)
    assert abs(reference(*shape).losses[0] - reference(*shape[1:]).losses[0]) > 1e-4


ODD_SHAPE = (
    "train.global_batch_size=12",
    "model.num_heads=6",
    "model.num_kv_heads=1",
    "model.head_dim=6",
    "model.num_layers=3",
    "model.layer_types=[sliding_attention,full_attention]",
    "model.sliding_window=5",
    "model.vocab_size=61",
    "model.tie_word_embeddings=true",
    "model.qkv_bias=true",
    "model.post_norms=true",
    "model.positions=learned",
    "model.max_position_embeddings=16",
    "model.remat=full",
    "train.z_loss=0.001",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        layout(2, 1, 1),
        (*layout(1, 3, 1), "train.gradient_accumulation=2"),
        layout(1, 1, 3),
        layout(1, 2, 2, True),
        (*layout(3, 1, 2, True), "train.gradient_accumulation=2"),
        layout(1, 3, 2),
        (*layout(3, 2, 1), "parallel.zero=2"),
        (*layout(2, 3, 1), "parallel.zero=1", "train.gradient_accumulation=2"),
    ],
    ids=" ".join,
)
def test_degrees_that_divide_neither_vocabulary_nor_heads(overrides):
    """Two to six devices; 61 ids and one key head that no degree divides; layers of two kinds and one over."""
    assert_trains_as_one_device(*overrides, shape=ODD_SHAPE)


@pytest.mark.parametrize("policy", OFFLOADED)
@pytest.mark.parametrize("overrides", [layout(2, 2, 2, True), ("parallel.context=2", "parallel.data=2")], ids=" ".join)
def test_layer_inputs_wait_in_host_memory(policy, overrides):
    assert_trains_as_one_device(*overrides, f"model.remat={policy}")


def test_accumulation_on_one_device():
    assert_trains_as_one_device("train.gradient_accumulation=4")


# --- sequences that are split -----------------------------------------------------------------------------------------


def every_context_of_eight() -> list[tuple[str, ...]]:
    """Every context degree with all others, in every method in turn, also with sequence parallelism."""
    found = []
    for context in (2, 4, 8):
        for data, fsdp, tensor in triples(8 // context):
            method = ("ring", "all_gather", "all_to_all", "auto")[len(found) % 4]
            method = "ring" if 8 // tensor % context and method == "all_to_all" else method
            sequence = tensor > 1 and context * tensor <= LENGTH
            found.append((
                *layout(data, fsdp, tensor, sequence),
                f"parallel.context={context}", f"parallel.context_method={method}",
                f"train.gradient_accumulation={2 if data * fsdp < 8 else 1}",
            ))  # fmt: skip
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        (*layout(1, 1, 1), "parallel.context=4", "parallel.context_method=ring"),
        (*layout(2, 1, 2, True), "parallel.context=2", "train.gradient_accumulation=2"),
    ],
    ids=" ".join,
)
def test_split_sequences_train_as_whole_ones(overrides):
    """The batches are packed documents that begin and end anywhere."""
    assert_trains_as_one_device(*overrides)


LATENT = (
    "model.attention={name: latent, kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 6}",
    "model.head_dim=12",
)


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.context=2", "parallel.context_method=ring"),
        pytest.param(("parallel.context=4", "parallel.context_method=ring"), marks=pytest.mark.exhaustive),
        pytest.param(("parallel.context=4", "parallel.context_method=all_gather"), marks=pytest.mark.exhaustive),
        pytest.param((*layout(1, 2, 2, True), "parallel.context=2"), marks=pytest.mark.exhaustive),
        pytest.param(("parallel.context=2", "parallel.context_method=all_to_all"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
def test_latents_that_devices_send_each_other(overrides):
    """In place of keys and values, which each device expands, except for an exchange of heads."""
    with record_choices() as choices:
        assert_trains_as_one_device(*overrides, shape=LATENT)
    assert any(" from [" in str(choice) for choice in choices if choice.operation == "context_attention")


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", every_context_of_eight(), ids=" ".join)
def test_every_layout_with_split_sequences(overrides):
    assert_trains_as_one_device(*overrides)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        (*layout(1, 1, 1), "parallel.context=3"),
        (*layout(1, 1, 1), "parallel.context=6", "parallel.context_method=ring"),
        (*layout(1, 3, 1), "parallel.context=2", "parallel.context_method=all_gather"),
        (*layout(1, 1, 3, True), "parallel.context=2", "parallel.context_method=all_to_all"),
        (*layout(2, 1, 1), "parallel.context=3", "train.gradient_accumulation=2"),
    ],
    ids=" ".join,
)
def test_context_degrees_of_three_and_six(overrides):
    """With windows, learned positions, one key head, tied embeddings."""
    longer = ("train.sequence_length=24", "model.max_position_embeddings=24")
    assert_trains_as_one_device(*overrides, shape=(*ODD_SHAPE, *longer))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind",
    [
        ("model.attention={name: projected, block_size: 2, summaries: 3}",),
        (
            "model.attention={name: projected, block_size: 4, summaries: 1}",
            "train.sequence_length=64",
            "model.max_position_embeddings=64",
        ),
        ("model.attention={name: linear}",),
        (
            "model.layer_types=[chunked_attention,full_attention_no_rope]",
            "model.attention_chunk_size=6",
            "model.floor_scale=4",
            "model.qk_norm=without_gain",
        ),
        ("model.attention={name: longformer, window: 4, global_tokens: 2}",),
    ],
    ids=" ".join,
)
def test_other_kinds_of_attention_with_split_sequences(kind):
    assert_trains_as_one_device(*layout(1, 2, 1), "parallel.context=4", shape=kind)
