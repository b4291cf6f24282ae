"""Rows on devices: every sharding gets its own rows, values survive, waiting is measured."""

import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxstack.data.device_batches import BatchPlacement, device_batches, local_rows, put_rows
from jaxstack.errors import JaxstackError
from jaxstack.parallel import make_mesh, make_rules


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "context"))


SPECS = [
    PartitionSpec(),
    PartitionSpec(("data", "fsdp")),
    PartitionSpec("data", "context"),
    PartitionSpec(("fsdp", "data"), "context"),
    PartitionSpec(None, "context"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rows_arrive_where_the_sharding_wants_them(mesh, spec):
    sharding = NamedSharding(mesh, spec)
    rows = np.arange(8 * 6, dtype=np.int32).reshape(8, 6)
    array = put_rows(sharding, rows, rows.shape)
    np.testing.assert_array_equal(array, rows)
    assert array.sharding == sharding
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, rows[shard.index])
    assert local_rows(sharding, rows.shape).tolist() == list(range(8))


class TwoOfEight:
    """A sharding as one of two processes sees it: its devices hold rows 2..3 and 6..7."""

    def __init__(self, inner, mesh):
        self._map = {
            mesh.devices.flat[0]: (slice(2, 4), slice(None)),
            mesh.devices.flat[1]: (slice(6, 8), slice(0, 3)),
        }

    def addressable_devices_indices_map(self, shape):
        return self._map


@pytest.mark.quick
def test_a_number_for_each_row_may_be_called_labels():
    """Sequences are split along their length only where `context` has several devices."""
    rules = make_rules(make_mesh(devices=jax.devices()[:2]))
    batch = BatchPlacement(rules).put({"x": np.ones((4, 3), np.float32), "labels": np.arange(4)})
    assert batch["labels"].tolist() == [0, 1, 2, 3] and len(batch["labels"].addressable_shards) == 2


def test_a_process_reads_only_its_rows(mesh, monkeypatch):
    sharding = TwoOfEight(None, mesh)
    assert local_rows(sharding, (8, 6)).tolist() == [2, 3, 6, 7]
    rows = np.arange(48).reshape(8, 6)[[2, 3, 6, 7]]
    placed = []
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda *a: placed.extend(a[2]))
    put_rows(sharding, rows, (8, 6))
    np.testing.assert_array_equal(placed[0], rows[:2])
    np.testing.assert_array_equal(placed[1], rows[2:, :3])
    with pytest.raises(JaxstackError, match="holds 4 rows of the global batch, but was given 3"):
        put_rows(sharding, rows[:3], (8, 6))


def test_batches_stay_in_order_and_ahead(mesh):
    taken = []

    def source():
        for i in range(20):
            taken.append(i)
            yield {"tokens": np.full((8, 4), i, np.int32), "labels": np.full((8, 4), -i, np.int32)}

    shardings = {"tokens": NamedSharding(mesh, SPECS[1]), "labels": NamedSharding(mesh, SPECS[2])}
    found = []
    for batch, waited in device_batches(source(), shardings, depth=3, host_depth=2):
        assert waited >= 0 and batch["tokens"].sharding == shardings["tokens"]
        ahead = min(len(found) + 3, 20)
        wait_until(lambda ahead=ahead: len(taken) >= ahead)
        assert len(taken) <= len(found) + 1 + 3 + 1 + 2  # taken, on the devices, on its way there, on the host
        found.append(int(batch["tokens"][0, 0]))
        assert int(batch["labels"][-1, -1]) == -found[-1]
    assert found == list(range(20))


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_batch_that_is_ready_does_not_wait_for_a_later_one(mesh):
    stalled = threading.Event()

    def source():
        for i in range(4):
            if i == 2:
                stalled.wait(10)
            yield {"tokens": np.full((8, 2), i, np.int32)}

    iterator = device_batches(source(), NamedSharding(mesh, SPECS[0]), depth=2)
    # while the third is still being read
    first = next(iterator)[0]
    second = next(iterator)[0]
    assert not stalled.is_set()
    stalled.set()
    numbers = [int(batch["tokens"][0, 0]) for batch in (first, second, *(batch for batch, _ in iterator))]
    assert numbers == [0, 1, 2, 3]


def test_an_error_of_the_source_comes_after_the_batches_before_it(mesh):
    def source():
        yield {"tokens": np.zeros((8, 2), np.int32)}
        raise JaxstackError("the disk is gone")

    iterator = device_batches(source(), NamedSharding(mesh, SPECS[0]))
    next(iterator)
    with pytest.raises(JaxstackError, match="the disk is gone"):
        next(iterator)


def test_waiting_is_measured_and_the_source_is_closed(mesh):
    closed = []

    def slow():
        try:
            while True:
                time.sleep(0.05)
                yield {"tokens": np.zeros((8, 2), np.int32)}
        finally:
            closed.append(True)

    iterator = device_batches(slow(), NamedSharding(mesh, SPECS[0]), depth=1)
    # Ten batches take half a second to read, less what the reader is ahead while this thread does not run.
    assert sum(next(iterator)[1] for _ in range(10)) >= 0.1
    iterator.close()
    assert closed == [True]
