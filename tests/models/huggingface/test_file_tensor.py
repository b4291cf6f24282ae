"""Slices of tensors in safetensors files: those of the array that was written, and none of the file stays mapped."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxstack.models.huggingface.file_tensor import file_tensors

INDICES = [
    *(..., slice(None), slice(1, 3), slice(3, 1), slice(0, 5, 2), (slice(2, 2),)),
    *((slice(1, 4), slice(0, 4)), (slice(0, 5), slice(1, 3)), (slice(1, 3), slice(0, 4), slice(2, 3))),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_slices_are_those_of_the_array(tmp_path, dtype, index):
    whole = np.arange(60).reshape(5, 4, 3).astype(jnp.dtype(dtype))
    save_file({"before": np.ones(7, np.float32), "x": whole}, tmp_path / "x.safetensors", {"format": "pt"})
    found = file_tensors(tmp_path / "x.safetensors")["x"][index]
    assert found.dtype == whole.dtype
    np.testing.assert_array_equal(found, whole[index])


@pytest.mark.parametrize("array", [np.array(3, np.float32), np.zeros((0, 3), np.float32)], ids=["scalar", "empty"])
def test_arrays_without_rows_are_read(tmp_path, array):
    save_file({"x": array}, tmp_path / "x.safetensors")
    np.testing.assert_array_equal(file_tensors(tmp_path / "x.safetensors")["x"][...], array)


def test_a_file_that_has_become_shorter_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": np.ones(100, np.float32)}, path)
    tensor = file_tensors(path)["x"]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(OSError, match="x.safetensors has become shorter: 40 bytes"):
        tensor[:]


def test_what_was_read_does_not_stay_mapped(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": np.ones((64, 1024), np.float32)}, path)
    tensor = file_tensors(path)["x"]
    assert tensor[:, 3:5].sum() == 128 and tensor[3:9].sum() == 6 * 1024
    assert path.name not in Path("/proc/self/maps").read_text()
