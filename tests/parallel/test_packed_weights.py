"""Products of packed weights on several devices: each reads its own part, and the results are those of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.compress.formats.sparse import Pattern
from jaxstack.errors import ConfigError
from jaxstack.parallel import ParallelConfig, StepLayout, logical_axis_rules, make_mesh, make_rules, packed_product
from jaxstack.parallel.packed_weights import place_packed
from pallas_kernels import Choice, Grid, PackedWeight, lowering_platform, record_choices
from pallas_kernels.weight_only.formats import Float8Format, RoundedInputFloat8Format
from pallas_kernels.weight_only.packed import (
    device_bytes,
    pack_float8,
    pack_lookup,
    pack_nearest,
    pack_tile_float,
    pack_two_of_four,
    stack_packed,
)
from tests.pallas_kernels.triton_interpreter import needs_triton

OUT = 12
IN = 32
W = jax.random.normal(jax.random.key(0), (OUT, IN))


def pack(kind: str) -> PackedWeight:
    """A weight of several formats, with groups of 8 inputs, of which a device has 16, or of 32 inputs."""
    if kind.startswith("int4"):
        return pack_nearest(Grid(4, int(kind.removeprefix("int4-"))), W)
    if kind == "table":
        return pack_lookup(4, jnp.asarray(np.random.default_rng(0).integers(0, 16, W.shape)), W.reshape(-1)[None, :16])
    if kind == "tiles":  # of 4 x 16
        random = np.random.default_rng(0)
        q = random.integers(-8, 8, W.shape)
        return pack_tile_float(4, jnp.asarray(q), jnp.asarray(random.integers(-3, 3, (3, 2))))
    if kind == "2:4":
        return pack_two_of_four(Pattern(keep_of=(2, 4)).prune(W, jnp.abs(W)))
    if kind == "tables":
        return pack_lookup(4, jnp.asarray(np.random.default_rng(0).integers(0, 16, W.shape)), W.reshape(24, 16)[:3])
    if kind == "nf4":
        indices = jnp.asarray(np.random.default_rng(0).integers(0, 16, W.shape))
        return pack_lookup(4, indices, W.reshape(24, 16)[:1], scales=W[:, :4])
    if kind == "fp8-blocks":
        scales = jnp.asarray([[0.5, 2], [3, 1]])  # of 8 x 24, the last ones smaller
        return PackedWeight({"q": W.astype(jnp.float8_e4m3fn), "scales": scales}, Float8Format(8, 24), (IN,), (OUT,))
    if kind.startswith("fp8"):
        return pack_float8(W, jnp.abs(W[:, :1]), round_inputs=kind == "fp8-dynamic")
    return pack_nearest(Grid(8), W, round_inputs=kind == "w8a8")


BY_PARTS = ("int4-8", "int4-32", "int8", "fp8", "fp8-dynamic", "table", "nf4", "2:4")
BY_XLA = ("tables", "w8a8")
LAYERS = {
    "column": (("embed", "mlp"), (IN,), (OUT,)),
    "row": (("mlp", "embed"), (IN,), (OUT,)),
    "heads": (("embed", "heads", "head_dim"), (IN,), (4, 3)),
    "from_heads": (("heads", "head_dim", "embed"), (4, 8), (OUT,)),
}
"""Logical axes, inputs and outputs of dense layers."""


def rules(data: int = 1, tensor: int = 1, fsdp: int = 1):
    devices = jax.devices()[: data * tensor * fsdp]
    return make_rules(make_mesh(ParallelConfig(data=data, tensor=tensor, fsdp=fsdp), devices))


def multiply(x, weight, rules, names):
    with logical_axis_rules(rules, StepLayout(peer_sums="auto")):
        return packed_product(x, weight, names)


def multiply_jitted(x, weight, rules, names):
    return jax.jit(functools.partial(multiply, rules=rules, names=names))(x, weight)


def place(weight: PackedWeight, rules, names) -> PackedWeight:
    return place_packed(weight, rules.sharding(rules.parameter_spec(names, weight.shape)))


def packed_choices(choices: list[Choice]) -> list[Choice]:
    return [choice for choice in choices if choice.operation == "packed_matmul"]


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", [*BY_PARTS, "fp8-blocks", *BY_XLA])
def test_products_are_those_of_one_device(kind, layer, data, tensor):
    names, inputs, outputs = LAYERS[layer]
    weight = pack(kind).with_dims(inputs, outputs)
    on = rules(data, tensor)
    x = jax.random.normal(jax.random.key(1), (2, 5, *inputs))
    expected = multiply_jitted(x, weight, rules(), names)
    placed = place(weight, on, names)
    with record_choices() as choices, jax.set_mesh(on.mesh):
        found = multiply_jitted(x, placed, on, names)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    cut = (OUT, IN // tensor) if layer in ("row", "from_heads") else (OUT // tensor, IN)
    count, (rows_out, rows_in) = (10, (OUT, IN)) if kind in BY_XLA else (10 // data, cut)
    (choice,) = packed_choices(choices)
    assert f"x [{count}, {rows_in}]" in choice.call and f"[{rows_out}, {rows_in}] on cpu" in choice.call


@pytest.mark.parametrize("layer", ["column", "row"])
@pytest.mark.parametrize("kind", [*BY_PARTS, "w8a8"])
def test_each_device_has_its_share_of_the_bytes(kind, layer):
    names, inputs, outputs = LAYERS[layer]
    weight = pack(kind).with_dims(inputs, outputs)
    placed = place(weight, rules(tensor=2), names)
    np.testing.assert_array_equal(placed.matrix(), weight.matrix())
    for name, array in placed.arrays.items():
        part = array.addressable_shards[0].data
        whole = name == "codebook" or (layer == "row" and array.shape[-1] == 1)  # what all parts share
        assert device_bytes(part) == device_bytes(array) // (1 if whole else 2), name


@pytest.mark.parametrize("layer", ["column", "row"])
@pytest.mark.parametrize("kind", ["tiles", *BY_PARTS, "fp8-blocks"])
def test_what_a_device_stores_is_its_part_of_the_matrix(kind, layer):
    names, inputs, outputs = LAYERS[layer]
    weight = pack(kind).with_dims(inputs, outputs)
    placed = place(weight, rules(tensor=2), names)
    cut = np.split(np.asarray(weight.matrix()), 2, axis=0 if layer == "column" else 1)
    for device, expected in enumerate(cut):
        arrays = {name: array.addressable_shards[device].data for name, array in placed.arrays.items()}
        np.testing.assert_array_equal(dataclasses.replace(placed, arrays=arrays).matrix(), expected)


def test_a_part_of_an_expert_cannot_end_within_four_inputs_of_which_two_are_stored():
    """24 inputs, of which each of two devices has 12, and each of four 6."""
    weight = stack_packed([pack_two_of_four(Pattern(keep_of=(2, 4)).prune(W[:, :24], jnp.abs(W[:, :24])))] * 2)
    assert weight is not None
    names = ("expert", "expert_mlp", "embed")
    assert place(weight, rules(tensor=2), names).arrays["kept"].addressable_shards[0].data.shape == (2, OUT, 3)
    with pytest.raises(ConfigError, match=r"part of the inputs of an expert \(6\) must be a multiple of 4"):
        place(weight, rules(tensor=4), names)


def test_a_group_that_a_part_would_cut_is_stored_as_smaller_groups():
    """32 inputs in one group: 16 on each device, with the scale of the group on both."""
    names, _, _ = LAYERS["row"]
    weight = pack_nearest(Grid(4, 16), W[:, :16].repeat(3, 1))  # three groups, of which a device has one and a half
    placed = place(weight, rules(tensor=2), names)
    assert placed.arrays["scales"].shape == (OUT, 6) and placed.format.unit(placed.arrays) == (1, 8)
    np.testing.assert_array_equal(placed.matrix(), weight.matrix())


@pytest.mark.parametrize(("layer", "blocks"), [("column", (6, 2)), ("row", (2, 4)), (None, (2, 2))])
def test_blocks_stay_whole_along_dims_that_are_not_split(layer, blocks):
    """Blocks of 8 x 24, of which the last ones are smaller; parts are 6 outputs or 16 inputs."""
    weight = pack("fp8-blocks")
    names = LAYERS[layer or "column"][0]
    placed = place(weight, rules(tensor=1 if layer is None else 2), names)
    np.testing.assert_array_equal(placed.matrix(), weight.matrix())
    assert placed.arrays["scales"].shape == blocks


def test_gradients_are_those_of_one_device():
    for names, inputs, outputs in LAYERS.values():
        weight = pack("int4-8").with_dims(inputs, outputs)
        x = jax.random.normal(jax.random.key(1), (2, 5, *inputs))

        def loss(x, weight, on, names=names):
            return jnp.sum(jnp.sin(multiply(x, weight, on, names)))

        expected = jax.jit(jax.grad(functools.partial(loss, on=rules())))(x, weight)
        on = rules(2, 2)
        found = jax.jit(jax.grad(functools.partial(loss, on=on)))(x, place(weight, on, names))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@needs_triton
@pytest.mark.parametrize(
    ("degrees", "rows", "names", "backend", "reason"),
    [
        ({"tensor": 2}, 64, ("embed", "mlp"), "triton", None),
        ({"tensor": 2}, 64, ("mlp", "embed"), "triton", None),
        ({"tensor": 2, "data": 2}, 128, ("mlp", "embed"), "triton", None),
        ({"tensor": 2}, 65, ("embed", "mlp"), "xla", "takes 1 to 64 rows; got 65"),
        ({"tensor": 2, "data": 2}, 4096, ("mlp", "embed"), "widened", "takes 1 to 64 rows; got 2048"),
        ({"tensor": 8}, 64, ("mlp", "embed"), "xla", "inputs of 128; got 256 and 64"),
        ({"fsdp": 2}, 64, ("embed", "mlp"), "xla", "cannot partition over the mesh in context (fsdp=2)"),
    ],
    ids=["column", "row", "with_data", "many_rows", "many_with_data", "narrow_parts", "fsdp"],
)
def test_kernels_compute_the_products_of_parts(degrees, rows, names, backend, reason):
    on = rules(**degrees)
    weight = pack_nearest(Grid(8), jnp.ones((256, 512)))
    batch = degrees.get("data", 1)
    x = jax.ShapeDtypeStruct((batch, rows // batch, 512), jnp.bfloat16)
    with lowering_platform("cuda"), record_choices() as choices, jax.set_mesh(on.mesh):
        jax.eval_shape(functools.partial(multiply, rules=on, names=names), x, weight)
    (choice,) = packed_choices(choices)
    assert choice.backend == backend
    refused = dict(choice.refused)
    assert not refused if reason is None else reason in refused["triton"], choice


def test_inputs_of_many_rows_in_all_are_rounded_on_every_mesh():
    """64 rows on each of two devices are 128, whose inputs are rounded as on one device."""
    names, _, _ = LAYERS["row"]
    weight = pack("fp8-dynamic")
    assert isinstance(weight.format, RoundedInputFloat8Format)
    x = jax.random.normal(jax.random.key(1), (2, 64, IN))
    expected = multiply_jitted(x, weight, rules(), names)
    on = rules(2, 2)
    found = multiply_jitted(x, place(weight, on, names), on, names)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
