"""What a change of layout sends: OneFlow's table of transitions between split, broadcast and partial tensors.

Yuan et al. 2021, arXiv:2110.15032, table 2: bytes that all p devices of a group send together, for a tensor of T bytes.
Our sums and gathers are of these forms: a gradient is partial until its sum is made.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from jaxstack.observe.collectives import collectives
from jaxstack.parallel import broadcast, partial, redistribute, sbp_einsum, sbp_sharding, split
from jaxstack.parallel.sbp import ShardingType
from tests.compilation import fully_optimized
from tests.hopper import hopper_topology

DEVICES = 4
SHAPE = (256, 512)
T = 4 * math.prod(SHAPE)
S0 = split(0)
S1 = split(1)
B = broadcast
P = partial
SENT = {
    (S0, S1): ("all-to-all", (DEVICES - 1) / DEVICES * T),
    (S1, S0): ("all-to-all", (DEVICES - 1) / DEVICES * T),
    (S0, B): ("all-gather", (DEVICES - 1) * T),
    (S1, B): ("all-gather", (DEVICES - 1) * T),
    (P, S0): ("reduce-scatter", (DEVICES - 1) * T),
    (P, S1): ("reduce-scatter", (DEVICES - 1) * T),
    (P, B): ("all-reduce", 2 * (DEVICES - 1) * T),
}
"""(type before, type after) -> kind of collective and bytes; all other transitions send nothing."""


@fully_optimized()
def sent(before: ShardingType, after: ShardingType) -> dict[str, float]:
    """Kind of collective -> bytes that all devices send, in the transition compiled for H200s."""
    devices = hopper_topology(DEVICES).devices
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Explicit,), devices=devices)

    def change(x: jax.Array, w: jax.Array) -> jax.Array:
        if before == partial:
            x = sbp_einsum("ij,jk->ik", x, w)
        return redistribute(x, {"x": after})

    first = split(1) if before == partial else before
    arguments = [
        jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=sbp_sharding(mesh, {"x": first}, 2)),
        jax.ShapeDtypeStruct((SHAPE[1], SHAPE[1]), jnp.float32, sharding=sbp_sharding(mesh, {"x": split(0)}, 2)),
    ]
    compiled = jax.jit(change).lower(*arguments).compile()
    return {row.kind: float(DEVICES * row.wire_bytes) for row in collectives(compiled.as_text(), {"x": DEVICES})}


@pytest.mark.parametrize(("before", "after"), itertools.product((S0, S1, B, P), repeat=2), ids=str)
def test_a_transition_sends_what_the_table_says(before, after):
    kind, volume = SENT.get((before, after), (None, 0))
    assert sent(before, after) == ({kind: volume} if kind else {})
