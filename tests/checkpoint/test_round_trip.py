"""What is saved comes back bit by bit: dtypes, keys, structures, meshes, states donated meanwhile."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxstack.checkpoint.leaves import STORABLE_DTYPES, abstract_state
from jaxstack.errors import JaxstackError
from tests.checkpoint.states import assert_same, make_state


def test_state_and_extra_come_back(open_manager, warnings):
    manager = open_manager()
    state = make_state(3)
    extra = {"data": {"position": 12345678901234}, "note": "ü", "loss": 0.1}
    assert manager.latest_step() is None
    manager.save(7, state, extra)
    assert manager.latest_step() == 7
    found, found_extra = manager.restore(7, abstract_state(state))
    assert_same(found, state)
    assert found_extra == extra == open_manager().extra(7)
    assert manager.last_save.step == 7 and manager.last_save.num_bytes > 4000
    assert warnings == []


def test_every_dtype_of_jax_and_numpy(open_manager):
    bits = np.random.default_rng(0).integers(0, 256, 64, np.uint8)
    state = {"numpy": {}, "jax": {}, "scalar": {}}
    for name in sorted(STORABLE_DTYPES):
        dtype = jnp.dtype(name)
        if name == "bool" or name in ("int2", "int4", "float4_e2m1fn"):
            array = (bits[:8] % 2).astype(dtype)
        else:
            array = bits.view(dtype)
        state["numpy"][name] = array
        state["scalar"][name] = array[0]
        if dtype.itemsize < 8:
            state["jax"][name] = jnp.asarray(array)
    manager = open_manager()
    manager.save(1, state)
    found, _ = manager.restore(1, abstract_state(state))
    assert_same(found, state)
    assert all(isinstance(leaf, np.ndarray) for leaf in found["numpy"].values())


def test_keys_values_and_empty_leaves(open_manager):
    state = {
        "threefry": jax.random.key(1),
        "many": jax.random.split(jax.random.key(2, impl="rbg"), (2, 3)),
        "values": [True, -(2**80), 0.1, float("inf"), "text", None],
        "empty": (jnp.zeros((0, 4)), np.zeros((3, 0), np.int16)),
        "odd names": {"a.b": jnp.ones(1), "": jnp.zeros(1), "../x": jnp.ones(2), "ü\n": jnp.ones(3)},
        "numbers": {5: jnp.ones(4)},
    }
    manager = open_manager()
    manager.save(1, state)
    found, _ = manager.restore(1, abstract_state(state))
    assert_same(found, state)
    drawn = jax.random.uniform(found["threefry"], (4,))
    assert (drawn == jax.random.uniform(state["threefry"], (4,))).all()


def test_a_state_without_arrays(open_manager):
    manager = open_manager()
    manager.save(1, {"step": 1}, wait=True)
    assert manager.restore(1, {"step": 0}) == ({"step": 1}, None)


def place(tree, mesh, spec_of):
    def put(path, leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        spec = spec_of if leaf.ndim == 2 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(put, tree)


def test_restores_onto_other_meshes(open_manager):
    state = make_state(1)
    state["keys"] = jax.random.split(jax.random.key(4), (8, 16))
    eight = place(state, jax.make_mesh((8,), ("fsdp",)), PartitionSpec("fsdp"))
    two_devices = jax.make_mesh((2,), ("d",), devices=jax.devices()[6:])
    four_by_two = jax.make_mesh((2, 4), ("data", "tensor"))
    manager = open_manager()
    manager.save(1, eight)
    targets = {
        "tensor 4 x data 2": place(state, four_by_two, PartitionSpec(None, "tensor")),
        "both axes": place(state, four_by_two, PartitionSpec("data", "tensor")),
        "two devices": place(state, two_devices, PartitionSpec(None, "d")),
        "one device": jax.tree.map(lambda x: x, state),
    }
    for step, (name, target) in enumerate(targets.items(), start=2):
        found, _ = manager.restore(step - 1, abstract_state(target))
        assert_same(found, state)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(target), strict=True):
            if isinstance(other, jax.Array):
                assert one.sharding.is_equivalent_to(other.sharding, other.ndim), name
        manager.save(step, found)


def test_a_large_array_is_cut_into_chunks_that_other_meshes_read(open_manager, monkeypatch):
    monkeypatch.setattr("jaxstack.checkpoint.arrays._MEBIBYTE", 2**10)
    mesh = jax.make_mesh((8,), ("d",))
    state = {"x": jnp.arange(2**18, dtype=jnp.float32).reshape(512, 512)}
    manager = open_manager()
    manager.save(1, state)
    found, _ = manager.restore(1, abstract_state(state, NamedSharding(mesh, PartitionSpec(None, "d"))))
    assert_same(found, state)
    assert len(list(manager.directory.glob("1/arrays/state/ocdbt.process_0/d/*"))) > 2


def test_buffers_may_be_donated_as_soon_as_save_returns(open_manager):
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 - 7, tree), donate_argnums=0)
    mesh = jax.make_mesh((8,), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec("d"))

    def fill(seed):
        return {f"w{i}": jnp.full((256, 512), seed + i) for i in range(8)}

    make = jax.jit(fill, out_shardings=sharding)
    manager = open_manager()
    for step in (1, 2):
        state = make(float(step))
        host = np.arange(1000.0)
        manager.save(step, {"device": state, "host": host})
        for _ in range(5):
            state = overwrite(state)
        jax.block_until_ready(state)
        host[:] = -1
        found, _ = manager.restore(step, abstract_state({"device": state, "host": host}))
        assert_same(found["device"], make(float(step)))
        assert (found["host"] == np.arange(1000.0)).all()


@pytest.mark.longer
def test_restored_arrays_may_be_donated(open_manager):
    manager = open_manager()
    state = {"x": jnp.arange(4096.0)}
    manager.save(1, state)
    found, _ = manager.restore(1, abstract_state(state))
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    for _ in range(10):
        found = add(found)
        gc.collect()
    assert (np.asarray(found["x"]) == np.arange(4096.0) + 10).all()


def test_a_part_is_loaded_without_the_rest(open_manager):
    manager = open_manager()
    state = make_state(2)
    manager.save(1, state)
    found, _ = manager.restore(1, {"params": abstract_state(state["params"])}, subset=True)
    assert_same(found, {"params": state["params"]})
    with pytest.raises(JaxstackError, match="not wanted"):
        manager.restore(1, {"params": abstract_state(state["params"])})


def test_differences_are_told_before_anything_is_loaded(open_manager, monkeypatch):
    manager = open_manager()
    state = make_state()
    manager.save(1, state, wait=True)
    monkeypatch.setattr("jaxstack.checkpoint.arrays.read", lambda *_: pytest.fail("it read the arrays"))
    other = make_state()
    other["params"]["embedding"] = jnp.zeros((32, 16))
    other["params"]["layers"]["bias"] = jnp.zeros(16)
    with pytest.raises(JaxstackError) as caught:
        manager.restore(1, abstract_state(other))
    message = str(caught.value)
    assert "params/embedding: shape [32, 8] in the checkpoint, [32, 16] wanted" in message
    assert "params/layers/bias: dtype bfloat16 in the checkpoint, float32 wanted" in message
    assert "2 differences, the run has 13 leaves" in message


def test_numbers_are_never_cut_to_32_bits(open_manager):
    manager = open_manager()
    manager.save(1, {"big": np.array([2**40])})
    with pytest.raises(JaxstackError, match="big is int64"):
        manager.restore(1, {"big": jax.ShapeDtypeStruct((1,), np.int64)})


@pytest.mark.parametrize("extra", [{"a": np.float32(1)}, {"a": {1, 2}}, object()])
def test_extra_data_that_is_not_json_is_refused(open_manager, extra):
    with pytest.raises(JaxstackError, match="plain JSON"):
        open_manager().save(1, {"a": 1}, extra)
