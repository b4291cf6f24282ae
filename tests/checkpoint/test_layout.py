import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.checkpoint.leaves import LeafSpec, abstract_state, check_layout, compare, describe, name_leaves
from jaxstack.errors import ConfigError, JaxstackError


def specs(tree):
    return {name: describe(name, leaf) for name, leaf in name_leaves(tree)[0].items()}


def test_every_kind_of_difference_is_named():
    held = specs({"a": jnp.zeros((2, 3)), "b": jnp.zeros(2), "c": jnp.zeros(4), "d": 1})
    wanted = specs({"a": jnp.zeros((3, 2)), "b": jnp.zeros(2, jnp.bfloat16), "d": 1.0, "e": jnp.zeros(1)})
    assert compare(wanted, held) == [
        "a: shape [2, 3] in the checkpoint, [3, 2] wanted",
        "b: dtype float32 in the checkpoint, bfloat16 wanted",
        "d: dtype python int in the checkpoint, python float wanted",
        "e: float32[1] wanted, not in the checkpoint",
        "c: float32[4] in the checkpoint, not wanted",
    ]
    assert compare({"c": held["c"]}, held, subset=True) == []


def test_ten_lines_then_a_count():
    wanted = {f"layer{i}": LeafSpec((i,), "float32") for i in range(25)}
    with pytest.raises(JaxstackError) as caught:
        check_layout("runs/x/7", wanted, {})
    message = str(caught.value)
    assert "runs/x/7" in message and "25 differences, the run has 25" in message and "... and 15 more" in message
    assert "layer9:" in message and "layer10:" not in message


def test_keys_of_another_generator_differ():
    held = specs({"rng": jax.random.key(0)})
    assert compare(specs({"rng": jax.random.key(0)}), held) == []
    assert compare(specs({"rng": jax.random.key(0, impl="rbg")}), held)
    assert compare(specs({"rng": jax.random.key_data(jax.random.key(0))}), held)


def test_fields_that_came_later_begin_anew_where_the_checkpoint_is_older(open_manager, warnings):
    """Laid out as they are wanted; what else is missing is an error still."""
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    split = jax.NamedSharding(mesh, jax.P("d"))
    manager = open_manager()
    manager.save(1, {"old": jnp.ones(4)}, wait=True)
    state = {"old": jnp.zeros(4), "new": {"a": jnp.zeros(4), "b": jnp.zeros((2, 2), jnp.int32)}}
    wanted = abstract_state(state, split)
    later = {"new": lambda: {"a": jnp.arange(4.0), "b": jnp.eye(2, dtype=int)}}
    found, _ = manager.restore(1, wanted, later=later)
    np.testing.assert_array_equal(found["old"], np.ones(4))
    np.testing.assert_array_equal(found["new"]["a"], np.arange(4.0))
    np.testing.assert_array_equal(found["new"]["b"], np.eye(2))
    assert found["new"]["b"].dtype == jnp.int32 and found["new"]["a"].sharding.is_equivalent_to(split, 1)
    assert len(warnings) == 1 and warnings[0].endswith("is older than 'new', which begins anew")
    with pytest.raises(ConfigError, match=r"new/a: float32\[4\] wanted, not in the checkpoint"):
        manager.restore(1, wanted)
    manager.save(2, {"old": jnp.ones(4), "new": {"a": jnp.ones(4)}}, wait=True)
    with pytest.raises(ConfigError, match=r"new/b: int32\[2, 2\] wanted, not in the checkpoint"):
        manager.restore(2, wanted, later=later)  # torn, not older


def test_abstract_state_takes_one_sharding_or_a_tree_of_them():
    mesh = jax.make_mesh((8,), ("fsdp",))
    named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    tree = {"a": jnp.zeros(8), "b": jnp.zeros(16), "host": np.zeros(2), "step": 3}
    whole = abstract_state(tree, named)
    assert whole["a"].sharding == named and whole["b"].sharding == named
    assert whole["step"] == 3 and isinstance(whole["host"], np.ndarray)
    some = abstract_state(tree, {"a": named, "b": None, "host": None, "step": None})
    assert some["a"].sharding == named and some["b"].sharding == tree["b"].sharding


def test_two_leaves_with_one_path_are_refused():
    with pytest.raises(JaxstackError, match="a/b"):
        name_leaves({"a": {"b": 1}, "a/b": 2})


@pytest.mark.parametrize("leaf", [object(), 1j, np.array(["x"]), np.zeros(2, "M8[s]"), b"bytes"])
def test_what_cannot_be_stored_is_named(leaf):
    with pytest.raises(JaxstackError, match="some/leaf"):
        describe("some/leaf", leaf)
