"""How many programs of a looping kernel are started."""

import jax
import pytest

from pallas_kernels import lowering_platform
from pallas_kernels.target import most_programs


@pytest.mark.parametrize(("devices", "most"), [(1, 132), (2, 2**31 - 1)], ids=["alone", "beside collectives"])
def test_alone_one_program_a_multiprocessor_else_one_a_tile(devices, most):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    with lowering_platform("cuda", compute_capability=(9, 0)), jax.set_mesh(mesh):
        found = []
        jax.jit(lambda x: found.append(most_programs()) or x).trace(jax.ShapeDtypeStruct((2,), "float32"))
        note = jax.shard_map(lambda x: found.append(most_programs()) or x, in_specs=jax.P(), out_specs=jax.P())
        jax.jit(note).trace(jax.ShapeDtypeStruct((2,), "float32"))
    assert len(found) > 1
    assert set(found) == {most}
