"""What a change of layout sends: OneFlow's table of transitions between split, broadcast and partial tensors.

Yuan et al. 2021, arXiv:2110.15032, table 2: bytes that all p devices of a group send together, for a tensor of T bytes.
Our sums and gathers are of these forms: a gradient is partial until its sum is made.
"""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

from jaxstack.observe.collectives import collectives
from tests.compilation import fully_optimized
from tests.hopper import hopper_topology

DEVICES, SHAPE = 4, (256, 512)
T = 4 * math.prod(SHAPE)
SPLIT, SPLIT_OTHERWISE, BROADCAST = P("x"), P(None, "x"), P()
PARTIAL = PartitionSpec(None, None, unreduced={"x"})


@fully_optimized()
def sent(before: PartitionSpec, after: PartitionSpec) -> dict[str, float]:
    """Kind of collective -> bytes that all devices send, in the transition compiled for H200s."""
    devices = hopper_topology(DEVICES).devices
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Explicit,), devices=devices)
    place = functools.partial(NamedSharding, mesh)

    def change(x: jax.Array, w: jax.Array) -> jax.Array:
        if before == PARTIAL:
            x = jnp.einsum("ij,jk->ik", x, w, out_sharding=place(PARTIAL))
        return jax.reshard(x, place(after))

    first = SPLIT_OTHERWISE if before == PARTIAL else before
    arguments = [
        jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=place(first)),
        jax.ShapeDtypeStruct((SHAPE[1], SHAPE[1]), jnp.float32, sharding=place(SPLIT)),
    ]
    with jax.sharding.use_mesh(mesh) if hasattr(jax.sharding, "use_mesh") else jax.set_mesh(mesh):
        compiled = jax.jit(change).lower(*arguments).compile()
    return {row.kind: float(DEVICES * row.wire_bytes) for row in collectives(compiled.as_text(), {"x": DEVICES})}


@pytest.mark.parametrize(
    ("before", "after", "kind", "volume"),
    [
        (SPLIT, SPLIT_OTHERWISE, "all-to-all", (DEVICES - 1) / DEVICES * T),
        (SPLIT, BROADCAST, "all-gather", (DEVICES - 1) * T),
        (PARTIAL, SPLIT, "reduce-scatter", (DEVICES - 1) * T),
        (PARTIAL, BROADCAST, "all-reduce", 2 * (DEVICES - 1) * T),
        (BROADCAST, SPLIT, None, 0),
        (SPLIT, SPLIT, None, 0),
    ],
    ids=["S-S", "S-B", "P-S", "P-B", "B-S", "none"],
)
def test_a_transition_sends_what_the_table_says(before, after, kind, volume):
    assert sent(before, after) == ({kind: volume} if kind else {})


@fully_optimized()
def test_a_broadcast_tensor_becomes_partial_without_sending():
    """Each of p devices counts 1/p of it, or one of them all of it."""
    devices = hopper_topology(DEVICES).devices
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=devices)

    def share(x: jax.Array) -> jax.Array:
        return jnp.where(jax.lax.axis_index("x") == 0, x, 0.0)[None]

    partial = jax.shard_map(share, mesh=mesh, in_specs=BROADCAST, out_specs=SPLIT, check_vma=False)
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(mesh, BROADCAST))
    assert not collectives(jax.jit(partial).lower(x).compile().as_text(), {"x": DEVICES})
