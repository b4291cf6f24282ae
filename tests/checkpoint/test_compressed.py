"""Weights of compressed models on disk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.checkpoint.compressed import (
    FOLDER,
    MANIFEST,
    describe_compressed,
    is_compressed,
    read_compressed,
    stored_bytes,
    write_compressed,
)
from jaxstack.compress.after_training.stored_weights import as_stored
from jaxstack.compress.config import Keep, Recipe
from jaxstack.compress.formats.sparse import Pattern
from jaxstack.errors import JaxstackError
from pallas_kernels import Grid
from pallas_kernels.weight_only.packed import pack_integers, pack_lookup, pack_low_rank, pack_two_of_four


def parameters():
    w = jax.random.normal(jax.random.key(0), (6, 16))
    grid = Grid(3, 8)
    scales = grid.scales(w)
    indices = jnp.asarray(np.random.default_rng(0).integers(0, 8, (6, 16)))
    return {
        "a": {"kernel": pack_integers(grid, grid.quantize(w, scales), scales).with_dims((4, 4), (2, 3))},
        "b": {"kernel": pack_lookup(3, indices, w[:1, :8]), "bias": w[0]},
        "c": pack_low_rank(w[:, :2].astype(jnp.bfloat16), w[:2].astype(jnp.bfloat16)),
        "d": w.astype(jnp.bfloat16),
        "e": {"pruned": jnp.where(jnp.abs(w) < 0.7, 0, w).at[0, 0].set(-0.0).astype(jnp.bfloat16)},
        "f": pack_two_of_four(Pattern(keep_of=(2, 4)).prune(w, jnp.abs(w)).astype(jnp.bfloat16)),
    }


def test_a_round_trip_keeps_every_bit_and_format(tmp_path):
    before = parameters()
    write_compressed(tmp_path, before, 17)
    after, step = read_compressed(tmp_path)
    assert step == 17 and is_compressed(tmp_path)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))
        np.testing.assert_array_equal(np.signbit(one), np.signbit(other))


def test_a_vector_in_integers_is_a_plain_array_again(tmp_path):
    w = 1 + 0.1 * jax.random.normal(jax.random.key(0), (192,))
    packed = as_stored(w, Recipe(layers=(Keep(path="."),), vectors="bfp8"))
    assert packed.shape == w.shape and packed.stored_bytes == 192 + 3
    write_compressed(tmp_path, {"norm": {"scale": packed}}, 1)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    for options in ({}, {"mesh": mesh, "place": lambda path, shape: jax.P("data")}):
        found = read_compressed(tmp_path, **options)[0]["norm"]["scale"]
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, packed.dense())
        np.testing.assert_allclose(found, w, atol=2 / 256)


def test_integers_take_their_bits_on_disk(tmp_path):
    write_compressed(tmp_path, {"a": parameters()["b"]["kernel"]}, 1)
    size = (tmp_path / FOLDER / "model.safetensors").stat().st_size
    assert 36 + 32 < size < 36 + 32 + 300, "96 indices of 3 bits, 8 float32, and a header"


def test_zeros_of_a_pruned_matrix_take_a_bit_on_disk(tmp_path):
    pruned = jnp.zeros((30, 20), jnp.bfloat16).at[3, 4:8].set(1.5)
    write_compressed(tmp_path, {"a": pruned, "dense": jnp.ones((3, 4))}, 1)
    size = (tmp_path / FOLDER / "model.safetensors").stat().st_size
    assert stored_bytes(pruned) == 75 + 4 * 2 and stored_bytes(jnp.ones((3, 4))) == 48
    assert 83 + 48 < size < 83 + 48 + 300, "and a header"
    assert describe_compressed(tmp_path) == {}
    found = read_compressed(tmp_path)[0]
    np.testing.assert_array_equal(found["a"], pruned)


def test_a_changed_file_is_one_message(tmp_path):
    write_compressed(tmp_path, parameters(), 1)
    path = tmp_path / FOLDER / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(JaxstackError, match="has changed since it was written"):
        read_compressed(tmp_path)


def test_a_folder_without_a_manifest_is_not_compressed(tmp_path):
    write_compressed(tmp_path, parameters(), 1)
    (tmp_path / FOLDER / MANIFEST).unlink()
    assert not is_compressed(tmp_path)
