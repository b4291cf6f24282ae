"""The collectives of the whole train step, compiled for four H200s: those that the layout implies, and their bytes."""

import functools
from collections import Counter
from typing import Any

import jax
import pytest

from jaxstack.observe.collectives import Collective, collectives
from tests.hopper_steps import compile_step
from tests.small_runs import small_config

LAYERS = 3
D = 256
HEADS = 8
H = 64
F = 1024
V = 4096
B = 16
T = 256
SHAPE = (
    f"model.num_layers={LAYERS}", f"model.hidden_size={D}", f"model.num_heads={HEADS}", f"model.head_dim={H}",
    f"model.intermediate_size={F}", f"model.vocab_size={V}", f"train.sequence_length={T}",
    f"train.global_batch_size={B}", "model.remat=full",
)  # fmt: skip

LAYER = 4 * D * HEADS * H + 3 * D * F
"""Weights of the matrices of a layer; its two norms are vectors of D."""
VECTORS = (2 * LAYERS + 1) * D
PARAMETERS = LAYERS * LAYER + VECTORS + 2 * V * D
ACTIVATIONS = 2 * B * T * D
"""Bytes of the residual stream of the global batch in bfloat16."""
SCALARS = 64
"""Bytes at most of an all-reduce of the loss, the number of tokens and the pieces of the gradient's norm."""

Row = tuple[str, str, int, tuple[str, ...], bool]


@functools.cache
def compiled_for_hopper(*overrides: str) -> tuple[list[Collective], int]:
    """The collectives of a step, and the number of parameters."""
    trainer, compiled = compile_step(small_config(*SHAPE, *overrides))
    return collectives(compiled.as_text(), dict(trainer.rules.mesh.shape)), trainer.count_parameters()


def table(*overrides: str) -> Counter[Row]:
    """(kind, dtype, payload bytes, axes, in a loop) -> times that a step runs it; all-reduces of scalars left out."""
    found: Counter[Row] = Counter()
    for row in compiled_for_hopper(*overrides)[0]:
        assert row.exact
        if row.kind != "all-reduce" or row.payload_bytes > SCALARS:
            found[row.kind, row.dtype, row.payload_bytes, row.axes, row.in_loop] += row.calls
    return found


def total_bytes(kind: str, *overrides: str, **wanted: Any) -> int:
    """Payload bytes of a step's collectives of a kind, as they are combined differently between versions of XLA."""
    rows = [row for row in compiled_for_hopper(*overrides)[0] if row.kind == kind]
    rows = [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]
    return sum(row.payload_bytes * row.calls for row in rows if row.payload_bytes > SCALARS)


def kinds(*overrides: str) -> set[str]:
    return {kind for kind, *_ in table(*overrides)}


def about(number: int) -> Any:
    """Equal but for the scalars that XLA may put into the same collective."""
    return pytest.approx(number, abs=2 * SCALARS)


@pytest.mark.exhaustive
@pytest.mark.trains
def test_the_formula_counts_the_parameters():
    assert compiled_for_hopper("parallel.data=4")[1] == PARAMETERS


MATRICES = PARAMETERS - VECTORS


def volume(*overrides: str) -> float:
    """Elements that a device sends in a step, times n / (n - 1) for the n devices: P of a gather or a scatter of P."""
    size = {"bf16": 2, "f32": 4}
    rows = [row for row in compiled_for_hopper(*overrides)[0] if row.payload_bytes > SCALARS]
    return sum(row.calls * row.wire_bytes / size[row.dtype] * row.group_size / (row.group_size - 1) for row in rows)


@pytest.mark.exhaustive
def test_data_parallel_reduces_every_gradient_once():
    over = ("parallel.data=4",)
    assert kinds(*over) == {"all-reduce"}
    assert total_bytes("all-reduce", *over, dtype="f32") == about(4 * PARAMETERS), "in float32, each once"
    layers = total_bytes("all-reduce", *over, in_loop=True)
    assert layers >= 4 * LAYERS * LAYER, "those of a layer as its backward pass ends, so that the next one hides them"
    assert volume(*over) == pytest.approx(2 * PARAMETERS, rel=1e-3), "2P (Rajbhandari et al. 2020)"


@pytest.mark.exhaustive
def test_gradients_may_be_summed_in_bfloat16():
    over = ("parallel.data=4", "precision.reduce=bfloat16")
    assert total_bytes("all-reduce", *over) == about(2 * PARAMETERS)


@pytest.mark.exhaustive
def test_accumulation_reduces_once_a_step_in_float32():
    over = ("parallel.data=4", "train.gradient_accumulation=4")
    assert kinds(*over) == {"all-reduce"}
    assert total_bytes("all-reduce", *over) == about(4 * PARAMETERS)
    assert total_bytes("all-reduce", *over, in_loop=True) == 0
    assert total_bytes("all-reduce", *over, dtype="f32") == total_bytes("all-reduce", *over)


@pytest.mark.exhaustive
def test_zero_1_scatters_gradients_once_a_step_and_gathers_one_copy_in_bfloat16():
    over = ("parallel.data=4", "parallel.zero=1", "train.gradient_accumulation=4")
    assert kinds(*over) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert total_bytes("all-gather", *over, dtype="bf16") == 2 * MATRICES
    assert total_bytes("reduce-scatter", *over, dtype="f32", in_loop=False) == 4 * MATRICES
    assert total_bytes("all-reduce", *over) == about(4 * VECTORS), "vectors are whole on every device"
    assert volume(*over) == pytest.approx(2 * PARAMETERS, rel=1e-3), "2P, as data parallelism"


@pytest.mark.exhaustive
def test_zero_2_scatters_the_gradients_of_a_layer_as_its_backward_pass_ends():
    over = ("parallel.data=4", "parallel.zero=2")
    assert total_bytes("all-gather", *over, dtype="bf16") == 2 * MATRICES == total_bytes("all-gather", *over)
    assert total_bytes("all-gather", *over, in_loop=True) >= 2 * (LAYERS - 1) * LAYER, "a layer at a time"
    assert total_bytes("reduce-scatter", *over, dtype="f32") == 4 * MATRICES
    assert total_bytes("reduce-scatter", *over, in_loop=True) >= 4 * (LAYERS - 1) * LAYER
    assert total_bytes("all-reduce", *over) == about(4 * VECTORS)
    assert volume(*over) == pytest.approx(2 * PARAMETERS, rel=1e-3), "2P, as data parallelism"


@pytest.mark.exhaustive
def test_copies_send_weights_and_gradients_in_bfloat16_once():
    over = ("parallel.data=4", "parallel.zero=2", "model.scan_layers=false")
    assert kinds(*over) == {"collective-permute", "all-reduce"}
    assert {row[1] for row in table(*over) if row[0] == "collective-permute"} == {"bf16"}
    sent = total_bytes("collective-permute", *over)
    assert sent == 3 / 4 * 2 * 2 * MATRICES, "a copy of every weight and its gradient, but for each device's own part"
    reduced = total_bytes("all-reduce", *over)
    assert 4 * VECTORS <= reduced <= 4 * (VECTORS + SCALARS), "vectors are whole on every device"


@pytest.mark.exhaustive
def test_copies_send_weights_and_gradients_where_sequences_are_split():
    over = ("parallel.context=4", "model.scan_layers=false")
    assert "reduce-scatter" not in kinds(*over)
    gathered = {row[1] for row in table(*over) if row[0] == "all-gather"}
    assert "bf16" not in gathered and "collective-permute" in kinds(*over), "only segment ids by NCCL"


@pytest.mark.exhaustive
def test_zero_2_scatters_every_microbatch():
    over = ("parallel.data=4", "parallel.zero=2", "train.gradient_accumulation=2")
    assert total_bytes("all-gather", *over) == 2 * MATRICES, "the copy is made once a step"
    assert total_bytes("reduce-scatter", *over, dtype="f32") == 2 * 4 * MATRICES


def test_fsdp_gathers_weights_in_bfloat16_and_scatters_gradients_in_float32():
    over = ("parallel.fsdp=4",)
    assert kinds(*over) == {"all-gather", "reduce-scatter", "all-reduce"}
    # A layer's weights are gathered forward, and again when its forward is recomputed; head and embedding once.
    assert total_bytes("all-gather", *over, dtype="bf16") == 2 * (2 * LAYERS * LAYER + 2 * V * D)
    assert total_bytes("all-gather", *over, dtype="f32") == 0
    assert total_bytes("reduce-scatter", *over, dtype="f32") == 4 * MATRICES
    assert total_bytes("all-reduce", *over) == about(4 * VECTORS), "only the vectors are whole on every device"
    # 3P (Rajbhandari et al. 2020), but 2P for head and embedding, which the backward pass does not gather again.
    assert volume(*over) == pytest.approx(3 * PARAMETERS - 2 * V * D, rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scan", ["true", pytest.param("false", marks=pytest.mark.exhaustive)])
def test_fsdp_without_rematerialisation_gathers_weights_again_instead_of_keeping_them(scan):
    over = ("parallel.fsdp=4", "model.remat=none", f"model.scan_layers={scan}", "parallel.copy_engines=never")
    assert total_bytes("all-gather", *over, dtype="bf16") == 2 * (2 * LAYERS * LAYER + 2 * V * D)


@pytest.mark.exhaustive
def test_fsdp_with_large_logits_scatters_the_head_once():
    """With the loss in chunks the head's gradient is summed up on the device, and scattered once."""
    large = 131072
    over = ("parallel.fsdp=4", f"model.vocab_size={large}", "model.num_layers=2")
    head_and_embedding = 2 * large * D
    assert total_bytes("reduce-scatter", *over) == 4 * (head_and_embedding + 2 * LAYER)
    assert total_bytes("all-gather", *over) == 2 * (head_and_embedding + 2 * 2 * LAYER)
    assert total_bytes("all-reduce", *over) == about(4 * 5 * D)


@pytest.mark.exhaustive
def test_hybrid_sharding_scatters_over_fsdp_and_reduces_the_parts_over_data():
    over = ("parallel.data=2", "parallel.fsdp=2")
    assert kinds(*over) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert total_bytes("reduce-scatter", *over, axes=("fsdp",)) == 4 * MATRICES
    assert total_bytes("all-reduce", *over, axes=("data",)) == about(4 * MATRICES // 2), "half of it, in float32"
    assert total_bytes("all-reduce", *over, axes=("data", "fsdp")) == about(4 * VECTORS)
    assert total_bytes("all-gather", *over, axes=("fsdp",)) == total_bytes("all-gather", *over)


@pytest.mark.exhaustive
def test_hybrid_sharding_with_accumulation_reduces_over_data_once():
    over = ("parallel.data=2", "parallel.fsdp=2", "train.gradient_accumulation=2")
    data = [row for row in compiled_for_hopper(*over)[0] if "data" in row.axes and row.payload_bytes > SCALARS]
    assert not any(row.in_loop for row in data)
    assert sum(row.payload_bytes for row in data) == about(4 * (MATRICES // 2 + VECTORS))


def test_tensor_parallel_follows_megatron():
    """Two all-reduces of the residual stream a layer forward and two backward, one more for recomputed attention."""
    over = ("parallel.tensor=4",)
    assert kinds(*over) == {"all-reduce"}
    assert total_bytes("all-reduce", *over, in_loop=True, dtype="bf16") == LAYERS * (2 + 1 + 2) * ACTIVATIONS
    # The embedding forward, the head backward; the loss exchanges maximum, sum and label's logit of each token.
    assert total_bytes("all-reduce", *over, in_loop=False, dtype="bf16") == 2 * ACTIVATIONS
    assert total_bytes("all-reduce", *over, in_loop=False, dtype="f32") == 3 * 4 * B * T
    assert total_bytes("all-reduce", *over, in_loop=True, dtype="f32") == 0


@pytest.mark.exhaustive
def test_sequence_parallel_splits_every_all_reduce():
    over = ("parallel.tensor=4", "parallel.sequence=true")
    assert kinds(*over) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert total_bytes("all-reduce", *over) == about(3 * 4 * B * T + 4 * VECTORS), "the loss, gradients of the norms"
    assert total_bytes("reduce-scatter", *over, in_loop=True) == LAYERS * (2 + 1 + 2) * ACTIVATIONS
    # Forward 2, recomputed 2, and the 2 incoming gradients.
    assert total_bytes("all-gather", *over, in_loop=True) == LAYERS * (2 + 2 + 2) * ACTIVATIONS
    assert total_bytes("reduce-scatter", *over, in_loop=False) == 2 * ACTIVATIONS
    assert total_bytes("all-gather", *over, in_loop=False) == 2 * ACTIVATIONS


@pytest.mark.exhaustive
def test_fsdp_and_tensor_keep_to_their_axes():
    """Weights move along fsdp only, each device its part of the tensor axis; activations along tensor only."""
    over = ("parallel.fsdp=2", "parallel.tensor=2", "parallel.sequence=true")
    # Half of every matrix is this device's part of the tensor axis.
    assert total_bytes("all-gather", *over, axes=("fsdp",)) == (2 * LAYERS * LAYER + 2 * V * D)
    assert total_bytes("reduce-scatter", *over, axes=("fsdp",)) == 4 * MATRICES // 2
    rows = ACTIVATIONS // 2
    assert total_bytes("all-gather", *over, axes=("tensor",)) == (6 * LAYERS + 2) * rows
    assert total_bytes("reduce-scatter", *over, axes=("tensor",)) == (5 * LAYERS + 2) * rows
    assert kinds(*over) == {"all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.exhaustive
def test_split_sequences_send_keys_around_and_weights_as_fsdp_does():
    """A hop is the keys and values of a device: three forward, recomputed, and backward, and of float32 gradients."""
    over = ("parallel.context=4", "parallel.context_method=ring")
    assert kinds(*over) == {"collective-permute", "all-gather", "reduce-scatter", "all-reduce"}
    hop = 2 * 2 * B * T // 4 * HEADS * H
    # XLA takes one turn of a loop over layers out of it where that lets collectives start earlier.
    assert total_bytes("collective-permute", *over) == LAYERS * 3 * (3 * hop + 2 * hop)
    # Segment ids of all devices are gathered too, in the forward of a layer, again in its backward, and for the loss.
    segments = total_bytes("all-gather", *over) - 2 * (2 * LAYERS * LAYER + 2 * V * D)
    assert segments % (4 * B * T) == 0 and 0 < segments <= (2 * LAYERS + 1) * 4 * B * T
    assert total_bytes("reduce-scatter", *over, dtype="f32") == 4 * MATRICES
    assert total_bytes("all-reduce", *over) == about(4 * VECTORS)
    assert all(row.axes == ("context",) for row in compiled_for_hopper(*over)[0])


@pytest.mark.exhaustive
def test_one_device_has_no_collectives():
    assert not table()


@pytest.mark.exhaustive
def test_no_float32_weight_is_ever_gathered():
    for over in (("parallel.fsdp=4",), ("parallel.fsdp=2", "parallel.tensor=2", "parallel.sequence=true")):
        gathered = [row for row in compiled_for_hopper(*over)[0] if row.kind == "all-gather"]
        assert gathered and all("f32" not in row.dtype for row in gathered)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
def test_a_kernel_that_xla_cannot_partition_moves_nothing_more():
    over = ("parallel.fsdp=2", "parallel.tensor=2", "parallel.sequence=true")
    assert table(*over, "model.attention_implementation=mosaic") == table(*over)
