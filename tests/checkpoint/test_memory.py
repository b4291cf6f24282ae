"""Copies of a state in host memory: who holds whose, room, hashes, transfers, and what of them is restored."""

import errno
import hashlib
import itertools
import socket
import ssl
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxstack.checkpoint import manifest, memory_folder, neighbour, shard_files
from jaxstack.checkpoint.commit import make_index
from jaxstack.checkpoint.leaves import abstract_state, describe, name_leaves, to_stored
from jaxstack.checkpoint.memory import MemoryCheckpoints
from jaxstack.checkpoint.memory_folder import Part, held_copies, own_copies
from jaxstack.checkpoint.neighbour import (
    CopyClient,
    CopyServer,
    Member,
    TransferError,
    check_room,
    find_holders,
    known_copies,
    locate,
    needed_bytes,
)
from jaxstack.errors import ConfigError
from jaxstack.observe import nvml
from tests.checkpoint.states import raw

FIRST = Part(0, 2)
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The launcher's folder, as its processes see it."""
    path = memory_folder.make_folder(tmp_path)
    assert path is not None and path.stat().st_mode & 0o077 == 0
    monkeypatch.setenv(memory_folder.VARIABLE, str(path))
    return path


def opened(state, folder: Path, said: list[str] | None = None, run: str = "run") -> MemoryCheckpoints:
    report = print if said is None else said.append
    return MemoryCheckpoints(2, folder.parent / run, abstract_state(state), report=report)


def state_of(step: int) -> dict:
    return {"w": jnp.arange(6.0).reshape(2, 3) + step, "low": jnp.full(3, step, jnp.bfloat16), "key": jax.random.key(7)}


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("hosts", "holders"),
    [
        ("a", [0]),
        ("aaa", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("aab", [2, 2, 0]),
    ],
)
def test_the_second_copy_is_on_the_next_node(hosts, holders):
    assert find_holders(hosts) == holders


def member(node: str, num_bytes: int = 100, free: int = 10_000, **copies) -> Member:
    return Member(node, num_bytes, free, {place.replace("_", "/"): steps for place, steps in copies.items()})


def test_needed_room_counts_own_and_second_copies_twice_each():
    assert needed_bytes([member("a:x")]) == {"a:x": 200}
    assert needed_bytes([member("a:x"), member("a:x", 50)]) == {"a:x": 600}
    assert needed_bytes([member("a:x"), member("b:y", 50)]) == {"a:x": 300, "b:y": 300}


def test_a_node_without_room_is_refused_with_numbers():
    check_room([member("a:/dev/shm/x", 2**30, 4 * 2**30), member("b:/dev/shm/y", 2**30, 4 * 2**30)])
    with pytest.raises(ConfigError, match=r"up to 4.0 GiB in /dev/shm/y on b, .* it has 3.0 GiB"):
        check_room([member("a:/dev/shm/x", 2**30, 4 * 2**30), member("b:/dev/shm/y", 2**30, 3 * 2**30)])


def test_copies_are_found_in_the_memory_of_any_node():
    first = member("a", own_0of2=[4, 6], neighbour_1of2=[4, 6])
    assert known_copies([first, member("b", own_1of2=[4], neighbour_0of2=[4])], 2) == [(6, 2), (4, 2)]
    found = locate([first, member("b", own_1of2=[4], neighbour_0of2=[4])], 4, 2)
    assert found == {
        Part(0, 2): [(0, "own/0of2"), (1, "neighbour/0of2")], Part(1, 2): [(1, "own/1of2"), (0, "neighbour/1of2")],
    }  # fmt: skip
    assert locate([first, member("b")], 6, 2) == {Part(0, 2): [(0, "own/0of2")], Part(1, 2): [(0, "neighbour/1of2")]}
    same = [member("a", own_0of2=[4]), member("a", own_0of2=[4])]
    assert locate(same, 4, 2) == {Part(0, 2): [(0, "own/0of2")]}, "two processes of one node tell of the same folder"


def test_of_two_starts_at_one_step_that_with_as_many_processes_comes_first():
    members = [member("a", own_0of1=[6], own_1of2=[6, 9]), member("b", neighbour_0of2=[6])]
    assert known_copies(members, 1) == [(9, 2), (6, 1), (6, 2)]
    assert known_copies(members, 2) == [(9, 2), (6, 2), (6, 1)]
    assert locate(members, 6, 1) == {Part(0, 1): [(0, "own/0of1")]}


@pytest.mark.quick
def test_a_copy_is_restored_bit_equal_with_its_extra_data_and_files(folder):
    with opened(state_of(0), folder) as copies:
        assert copies.latest_step(0) is None
        assert not copies.is_due(0) and not copies.is_due(3) and copies.is_due(4)
        for step in (2, 4):
            copies.copy(step, state_of(step), {"batches": step}, {"samples.npz": b"abc"})
        copies.wait()
        assert copies.figures()["memory_copy_step"] == 4 and copies.figures()["memory_copy_bytes"] == 30
    assert sorted(path.name for path in (folder / "own" / "0of1").iterdir()) == ["4"]
    with opened(state_of(0), folder) as copies:
        assert copies.latest_step(5) is None and copies.latest_step(4) == 4 and copies.sources == "own 1, neighbour 0"
        assert copies.extra(4) == {"batches": 4} and copies.read_file(4, "samples.npz") == b"abc"
        found = name_leaves(copies.restore(4))[0]
        assert {name: raw(leaf) for name, leaf in found.items()} == {
            name: raw(leaf) for name, leaf in name_leaves(state_of(4))[0].items()
        }
        copies.keep(None)
        assert opened(state_of(0), folder).latest_step(0) is None


def test_a_state_may_be_donated_while_it_is_copied(folder):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros((1000, 1000))
    with opened({"x": x}, folder) as copies:
        for number in range(1, 6):
            x = step(x)
            copies.copy(number, {"x": x}, None)
        step(x)
        copies.wait()
        assert copies.latest_step(0) is None, "what was there at the start is what counts"
    with opened({"x": jnp.zeros((1000, 1000))}, folder) as copies:
        assert copies.latest_step(0) == 5 and (copies.restore(5)["x"] == 5).all()


@pytest.mark.parametrize("on_device", [False, True])
def test_shards_on_several_devices_are_stored_once(tmp_path, monkeypatch, on_device):
    """On the devices, in parts of 100 bytes: the array that is everywhere has 128."""
    monkeypatch.setattr(shard_files, "_PART_BYTES", 100)
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    values = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    arrays = {
        "split": jax.device_put(values, NamedSharding(mesh, P("a", "b"))),
        "partly": jax.device_put(values, NamedSharding(mesh, P("a"))),
        "everywhere": jax.device_put(values, NamedSharding(mesh, P())),
        "scalar": jax.device_put(np.float32(3), NamedSharding(mesh, P())),
        "host": values.copy(),
        "eight": jax.device_put(values.astype(jnp.float8_e4m3fn), NamedSharding(mesh, P("a"))),
        "four": jax.device_put((values % 8).astype(jnp.int4), NamedSharding(mesh, P("a"))),
    }
    targets = abstract_state(arrays)
    expected = {name: np.asarray(array) for name, array in arrays.items()}
    shards = shard_files.start_copy(arrays, on_device=on_device)
    copies = [parts for name in arrays if name != "host" for parts in shards[name].values()]
    assert max(map(len, copies)) == (2 if on_device else 1)
    kind = "device" if on_device else "pinned_host"
    assert {part.sharding.memory_kind for parts in copies for part in parts} == {kind}
    for array in arrays.values():
        if isinstance(array, jax.Array):
            array.delete()
    assert sorted(shards["split"]) == ["0:2,0:4", "0:2,4:8", "2:4,0:4", "2:4,4:8"]
    assert {name: len(pieces) for name, pieces in shards.items()} == {
        "split": 4, "partly": 2, "everywhere": 1, "scalar": 1, "host": 1, "eight": 2, "four": 2,
    }  # fmt: skip
    index = {"format": manifest.FORMAT, "step": 1, "saved_at": "", "leaves": {}}
    written = shard_files.write(tmp_path, shards, index, {})
    assert written == 4 * values.nbytes + 4 + 2 * values.size == shard_files.local_bytes(targets)
    index = manifest.check(tmp_path, 1)
    files, missing = shard_files.find_files([index], targets)
    assert missing is None and len(files[0]) == 7
    folder = shard_files.Folder(tmp_path, index, files[0])
    bounded = []
    monkeypatch.setattr(shard_files.Transfers, "add", lambda self, array: bounded.append(array.nbytes) or array)
    found = shard_files.read([folder], targets)
    on_devices = [
        shard.data.nbytes for x in found.values() if isinstance(x, jax.Array) for shard in x.addressable_shards
    ]
    assert sorted(bounded) == sorted(on_devices), "all that is on its way to a device is bounded"
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], expected[name])
        assert name == "host" or found[name].sharding == array.sharding
    for parts in (P("b", "a"), P(("a", "b")), P(None, ("b", "a")), P()):
        moved = {"split": jax.ShapeDtypeStruct((4, 8), np.float32, sharding=NamedSharding(mesh, parts))}
        assert shard_files.find_files([index], moved) == ([{"arrays/0"}], None)
        assert (shard_files.read([folder], moved)["split"] == values).all(), parts


@pytest.mark.parametrize(("peaks", "room"), [((70, 70), True), ((70, 71), False), ((None, None), False)])
def test_a_device_holds_a_copy_if_steps_leave_room_for_it(monkeypatch, peaks, room):
    """Two devices of 100 bytes, each with shards of 30."""
    shards = {}
    for number, peak in enumerate(peaks):
        known = None if peak is None else {"bytes_limit": 100, "peak_bytes_in_use": peak}
        device = Mock(memory_stats=Mock(return_value=known))
        for name, size in (("a", 10), ("b", 20)):
            shards[name, str(number)] = SimpleNamespace(nbytes=size, devices=Mock(return_value={device}))
    monkeypatch.setattr(shard_files, "_distinct_shards", lambda arrays: shards)
    assert shard_files.has_room({}) == room


@pytest.mark.parametrize(("free", "room"), [(20, True), (19, False), (None, True)])
def test_memory_that_other_programs_hold_is_no_room_for_a_copy(monkeypatch, free, room):
    """A GPU of which XLA may take 100 bytes and has taken 80; steps need 70, and the shards 30."""
    known = {"bytes_limit": 100, "peak_bytes_in_use": 70, "pool_bytes": 80}
    device = Mock(memory_stats=Mock(return_value=known))
    shard = SimpleNamespace(nbytes=30, devices=Mock(return_value={device}))
    monkeypatch.setattr(shard_files, "_distinct_shards", lambda arrays: {("a", "0"): shard})
    monkeypatch.setattr(nvml, "free_bytes", lambda devices: [free])
    assert shard_files.has_room({}) == room


def copy_as_two(folder: Path, state: dict, step: int, files_of_second: Mapping[str, bytes] | None = None) -> None:
    """Makes the copies of two processes, each with two of four devices, and on one node all that is left: of process 0
    its own, of process 1 the second one, with further files."""
    leaves, _ = name_leaves(state)
    specs = {name: describe(name, leaf) for name, leaf in leaves.items()}
    shards = shard_files.start_copy({name: to_stored(leaves[name], spec) for name, spec in specs.items()})
    for rank, copies in enumerate((own_copies(folder, Part(0, 2)), held_copies(folder, Part(1, 2)))):
        mine = {
            name: dict(list(pieces.items())[-2:] if rank else list(pieces.items())[:2])
            for name, pieces in shards.items()
        }
        index = {**make_index(step, specs, {"batches": step}), "run": str(folder.parent / "run")}
        further = files_of_second if rank and files_of_second else {}
        shard_files.write(copies.begin(step), mine, index, {"samples.npz": b"abc", **further})
        copies.commit(step)


def on_devices(count: int, step: int) -> dict:
    """The same values on a mesh of `count` devices."""
    mesh = jax.make_mesh((count,), ("fsdp",), devices=jax.devices()[:count])
    key = jax.device_put(jax.random.key(step), NamedSharding(mesh, P()))
    rows = np.arange(64.0, dtype=np.float32).reshape(8, 8) + step
    return {
        "rows": jax.device_put(rows, NamedSharding(mesh, P("fsdp"))),
        "columns": jax.device_put(rows.astype(jnp.bfloat16), NamedSharding(mesh, P(None, "fsdp"))),
        "everywhere": jax.device_put(rows, NamedSharding(mesh, P())),
        "key": key,
    }  # fmt: skip


def test_a_file_that_one_process_alone_gave_is_found_in_its_copy(folder):
    """Of either node's memory; not if it is damaged."""
    copy_as_two(folder, on_devices(4, 12), 12, {"metrics": b"of process 1"})
    with opened(on_devices(1, 12), folder) as copies:
        assert copies.latest_step(10) == 12 and copies.read_file(12, "metrics") == b"of process 1"
        assert copies.read_file(12, "others") is None
        damage(held_copies(folder, Part(1, 2)).path(12) / "metrics")
        assert copies.read_file(12, "metrics") is None


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_copies_of_two_processes_are_put_together_in_another_layout(folder, devices):
    copy_as_two(folder, on_devices(4, 12), 12)
    wanted = on_devices(devices, 12)
    with opened(wanted, folder) as copies:
        assert copies.latest_step(10) == 12 and copies.sources == "own 0, neighbour 0, other layout 1"
        assert copies.extra(12) == {"batches": 12} and copies.read_file(12, "samples.npz") == b"abc"
        found = name_leaves(copies.restore(12))[0]
        for name, leaf in name_leaves(wanted)[0].items():
            assert raw(found[name]) == raw(leaf) and found[name].sharding == leaf.sharding, name
        copies.keep(12)
        assert copies.newest == 12 and own_copies(folder, Part(0, 2)).steps() == [12], "until there is a newer one"
        copies.copy(14, on_devices(devices, 14), {"batches": 14})
        copies.wait()
    left = {place: copies.steps() for place, copies in memory_folder.all_copies(folder).items()}
    assert left == {"own/0of1": [14], "own/0of2": [], "neighbour/1of2": []}


def test_damage_and_loss_of_parts_of_another_layout(folder):
    said: list[str] = []
    copy_as_two(folder, on_devices(4, 12), 12)
    copy_as_two(folder, on_devices(4, 9), 9)
    damage(folder / "neighbour" / "1of2" / "12" / "arrays" / "0")
    with opened(on_devices(2, 0), folder, said) as copies:
        assert copies.latest_step(0) == 9
    assert said[0].startswith(
        "the copy of step 12 of process 1 in its neighbour's memory cannot be used and is passed over: arrays/0"
    )
    said.clear()
    held_copies(folder, Part(1, 2)).keep([])
    with opened(on_devices(2, 0), folder, said) as copies:
        assert copies.latest_step(0) is None
    (line,) = said
    assert line.startswith(
        "copies in memory are incomplete: of no step are all shards left; step 9 lacks columns[0:8,4:8]"
    )
    with opened({"everywhere": on_devices(2, 0)["everywhere"]}, folder, said) as copies:
        assert copies.latest_step(0) is None and "columns: bfloat16[8, 8] in the checkpoint, not wanted" in said[-1]


def test_a_damaged_copy_is_named_and_passed_over(folder):
    said: list[str] = []
    with opened(state_of(0), folder) as copies:
        copies.copy(2, state_of(2), None)
    damage(folder / "own" / "0of1" / "2" / "arrays" / "1")
    assert opened(state_of(0), folder, said).latest_step(0) is None
    (line,) = said
    assert line.startswith(
        "the copy of step 2 of process 0 in its own memory cannot be used and is passed over: arrays/1"
    )


def test_a_copy_that_does_not_fit_the_run_is_not_used(folder):
    with opened(state_of(0), folder) as copies:
        copies.copy(2, state_of(2), None)
    for state, run, reason in (
        (state_of(0), "another", f"they are of {folder.parent / 'run'}"),
        ({**state_of(0), "w": jnp.zeros(5)}, "run", "w: shape [2, 3] in the checkpoint, [5] wanted"),
    ):
        said: list[str] = []
        assert opened(state, folder, said, run).latest_step(0) is None
        assert said == [f"the copies of step 2 in memory do not fit this run: {reason}"]
    said = []
    assert opened(state_of(0), folder, said).latest_step(0) == 2 and not said


def test_a_copy_that_cannot_be_written_leaves_the_older_one(folder, monkeypatch):
    said: list[str] = []
    with opened(state_of(0), folder, said) as copies:
        copies.copy(2, state_of(2), None)
        copies.wait()
        (folder / "own" / "0of1" / ".writing-4").write_text("in the way")  # rmtree leaves a file
        copies.copy(4, state_of(4), None)
        copies.wait()
        assert copies.newest == 2
    assert len(said) == 1 and said[0].startswith("the copy of step 4 in memory failed and is dropped: process 0:")
    assert opened(state_of(0), folder).latest_step(0) == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (RuntimeError("INTERNAL: why\nwhere"), "INTERNAL: why"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_copy_that_fails_is_told_in_one_line(folder, monkeypatch, error, reason):
    said: list[str] = []
    write = Mock(side_effect=error)
    with opened(state_of(0), folder, said) as copies:
        copies.copy(2, state_of(2), None)
        copies.wait()
        monkeypatch.setattr(shard_files, "_write_parts", write)
        copies.copy(4, state_of(4), None)
        copies.leave_devices()
    assert said == [f"the copy of step 4 in memory failed and is dropped: process 0: {reason}"]
    assert [path.name for path in (folder / "own" / "0of1").iterdir()] == ["2"]


@pytest.mark.parametrize("at", ["start", "end"])
def test_without_room_on_the_devices_after_all_copies_go_to_the_host(folder, monkeypatch, at):
    """XLA may tell only when a copy is read that there was no memory for it."""
    said: list[str] = []
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    monkeypatch.setattr(shard_files, "has_room", lambda arrays: True)
    with opened(state_of(0), folder, said) as copies, monkeypatch.context() as patch:
        patch.setattr(shard_files, "_clone_on_one" if at == "start" else "_write_parts", Mock(side_effect=error))
        copies.copy(2, state_of(2), None)
        copies.wait()
        assert copies.newest == (2 if at == "start" else -1) and len(said) == (at == "end")
        patch.undo()
        patch.setattr(shard_files, "_clone_on_one", Mock(side_effect=AssertionError))
        copies.copy(4, state_of(4), None)
        copies.wait()
        assert copies.newest == 4


def test_without_host_memory_a_copy_is_dropped_and_the_run_goes_on(folder, monkeypatch):
    said: list[str] = []
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")
    with opened(state_of(0), folder, said) as copies:
        copies.copy(2, state_of(2), None)
        copies.wait()
        with monkeypatch.context() as patch:
            patch.setattr(shard_files, "_to_host", Mock(side_effect=error))
            copies.copy(4, state_of(4), None)
            copies.wait()
        assert said == [f"the copy of step 4 in memory failed and is dropped: process 0: {error}"]
        assert copies.newest == 2
        copies.copy(6, state_of(6), None)
        copies.leave_devices()
        copies.wait()
        assert copies.newest == 6


def test_copies_are_on_devices_only_when_steps_have_their_full_size_and_no_other_program_runs(folder, monkeypatch):
    used: list[bool] = []
    written = threading.Event()
    start, write = shard_files.start_copy, shard_files.write

    def started(arrays, *, on_device: bool = False):
        used.append(on_device)
        return start(arrays, on_device=on_device)

    def write_later(*arguments):
        time.sleep(0.1)
        written.set()
        return write(*arguments)

    monkeypatch.setattr(shard_files, "has_room", lambda arrays: True)
    monkeypatch.setattr(shard_files, "start_copy", started)
    monkeypatch.setattr(shard_files, "write", write_later)
    with opened(state_of(0), folder) as copies:
        copies.leave_devices()
        copies.copy(2, state_of(2), None, steps_grow=True)
        copies.leave_devices()
        assert not written.is_set()
        copies.wait()
        written.clear()
        copies.copy(4, state_of(4), None)
        copies.leave_devices()
        assert written.is_set()
    assert used == [False, True]


@pytest.mark.parametrize(("ahead", "most"), [(0, 1), (100, 3), (10_000, 9)])
def test_parts_are_on_their_way_to_the_host_within_the_bytes_ahead(tmp_path, monkeypatch, ahead, most):
    """Of 40 bytes each, of three arrays one after the other; one more may be with the thread that writes it."""
    begun: list[weakref.ref[np.ndarray]] = []
    counts: list[int] = []

    def to_host(part: jax.Array) -> np.ndarray:
        array = np.array(part)
        begun.append(weakref.ref(array))
        counts.append(sum(found() is not None for found in begun))
        return array

    monkeypatch.setattr(shard_files, "_to_host", to_host)
    parts = shard_files._bring([jnp.arange(10.0) + 10 * number for number in range(9)], ahead)
    for name in range(3):
        digest, size = shard_files._write_parts(tmp_path / str(name), itertools.islice(parts, 3))
        content = np.arange(30 * name, 30 * name + 30, dtype=np.float32).tobytes()
        assert (tmp_path / str(name)).read_bytes() == content
        assert (digest, size) == (hashlib.sha256(content).hexdigest(), 120)
    assert max(counts) == most
    assert next(parts, None) is None and not any(array() is not None for array in begun)


def test_threads_have_about_as_many_bytes_to_write():
    groups = shard_files._even_groups({"a": 5, "b": 4, "c": 3, "d": 3, "e": 0}, 2)
    assert sorted(sorted(group) for group in groups) == [["a", "d"], ["b", "c", "e"]]
    assert shard_files._even_groups({"a": 1}, 8) == [["a"]] and shard_files._even_groups({}, 8) == [[]]


def test_without_the_launcher_the_key_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(memory_folder.VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"needs the launcher.*python -m jaxstack.launch -- COMMAND"):
        MemoryCheckpoints(2, tmp_path, abstract_state(state_of(0)), report=print)


@pytest.fixture
def copy_of_two(tmp_path) -> Path:
    root = tmp_path / "copy"
    root.mkdir()
    index = {"format": manifest.FORMAT, "step": 2, "saved_at": "", "leaves": {}}
    shard_files.write(root, {"w": {"0:4": [jnp.arange(4.0)]}}, index, {"samples.npz": b"abc"})
    return root


@pytest.fixture
def server(folder):
    running = CopyServer(folder, "127.0.0.1")
    yield running
    running.close()


def send(client: CopyClient, part: Part, root: Path, step: int) -> None:
    """Sends a copy that is written already."""
    with client.sending(part, root, step) as written:
        for name in set(manifest.list_files(root)) - {manifest.INDEX, manifest.MANIFEST}:
            written(name)


def contents(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in manifest.list_files(root)}


def test_a_copy_is_sent_fetched_and_deleted(folder, server, copy_of_two, tmp_path):
    part = Part(3, 4)
    client = CopyClient(server.address, server.token)
    send(client, part, copy_of_two, 2)
    held = held_copies(folder, part)
    assert list(memory_folder.all_copies(folder)) == ["neighbour/3of4"] and held.steps() == [2]
    back = tmp_path / "back"
    back.mkdir()
    client.fetch("neighbour/3of4", 2, back)
    assert contents(back) == contents(copy_of_two) == contents(held.path(2))
    client.keep(part, [2, 5])
    assert held.steps() == [2]
    client.keep(part, [])
    assert held.steps() == []
    with pytest.raises(TransferError, match="refused /neighbour/3of4/2/checkpoint.json: no such file"):
        client.fetch("neighbour/3of4", 2, back)
    own = own_copies(folder, Part(0, 4))
    own.begin(5).joinpath("samples.npz").write_bytes(b"abc")
    own.commit(5)
    client.fetch_files("own/0of4", 5, back / "some", ["samples.npz"])
    assert (back / "some" / "samples.npz").read_bytes() == b"abc"


def test_a_copy_that_arrives_damaged_or_in_part_does_not_replace_the_older_one(folder, server, copy_of_two):
    client = CopyClient(server.address, server.token)
    send(client, FIRST, copy_of_two, 2)
    damage(copy_of_two / "arrays" / "0")
    with pytest.raises(TransferError, match="arrays/0: it, or its line in SHA256SUMS, has changed"):
        send(client, FIRST, copy_of_two, 2)
    held = held_copies(folder, FIRST)
    assert held.steps() == [2] and manifest.check(held.path(2), 2)


def test_a_byte_that_changes_on_the_way_is_found_without_reading_what_was_stored(
    folder, server, copy_of_two, monkeypatch
):
    def change(connection: socket.socket, file: BinaryIO) -> None:
        content = bytearray(file.read())
        content[0] ^= len(content) == 16  # the array
        connection.sendall(content)

    client = CopyClient(server.address, server.token)
    hashed: list[str] = []
    hash_files = manifest.hash_files
    monkeypatch.setattr(manifest, "hash_files", lambda root, names: hashed.extend(names) or hash_files(root, names))
    send(client, FIRST, copy_of_two, 2)
    monkeypatch.setattr(neighbour, "_send_content", change)
    with pytest.raises(TransferError, match="SHA256SUMS: arrays/0: it, or its line in SHA256SUMS, has changed"):
        send(client, FIRST, copy_of_two, 2)
    held = held_copies(folder, FIRST)
    assert held.steps() == [2] and hashed == []
    monkeypatch.undo()
    assert manifest.check(held.path(2), 2) and contents(held.path(2)) == contents(copy_of_two)


def test_of_a_sender_that_dies_in_the_middle_no_copy_counts(folder, server, copy_of_two):
    """It dies while a file arrives; a later copy of the same step is another one, from its first file on."""
    client, held = CopyClient(server.address, server.token), held_copies(folder, FIRST)
    target = "/neighbour/0of2/2"
    client._ask("POST", target)
    dead = client._connect()
    dead.request("PUT", f"{target}/arrays/0", headers=client._headers | {"Content-Length": "16"})
    dead.sock.sendall(bytes(8))
    while not (held.staging(2) / "arrays" / "0").exists():
        time.sleep(0.001)
    with pytest.raises(TransferError, match=r"refused .*/arrays/0: File exists"):
        client._ask("PUT", f"{target}/arrays/0")
    dead.close()
    with pytest.raises(TransferError, match="missing"), client.sending(FIRST, copy_of_two, 2):
        pass
    assert held.steps() == []
    send(client, FIRST, copy_of_two, 2)
    assert held.steps() == [2]
    for step, reason in ((2, "No such file"), (3, "this copy was not begun")):
        with pytest.raises(TransferError, match=reason):
            client._ask("PUT", f"/neighbour/0of2/{step}/arrays/0")
    assert [path.name for path in held.path(2).parent.iterdir()] == ["2"]


def test_files_are_sent_while_others_are_written_and_the_folder_is_renamed(folder, server, monkeypatch):
    """The second array is written only after the holder has the first one, and the last file sent after the rename."""
    client, copies, held = (
        CopyClient(server.address, server.token),
        own_copies(folder, FIRST),
        held_copies(folder, FIRST),
    )
    write_parts = shard_files._write_parts

    def write_after(path: Path, parts) -> tuple[str, int]:
        arrived = held.staging(2) / "arrays" / "0"
        while path.name == "1" and not (arrived.exists() and arrived.stat().st_size == 16):
            time.sleep(0.001)
        return write_parts(path, parts)

    monkeypatch.setattr(shard_files, "_write_parts", write_after)
    index = {"format": manifest.FORMAT, "step": 2, "saved_at": "", "leaves": {}}
    shards = {name: {"0:4": [np.arange(4, dtype=np.float32)]} for name in "ab"}
    with client.sending(FIRST, copies.begin(2), 2) as written:
        shard_files.write(copies.staging(2), shards, index, {"samples.npz": b"abc"}, written)
        copies.commit(2)
        assert held.steps() == []
    assert contents(held.path(2)) == contents(copies.path(2))


def test_a_copy_that_cannot_be_written_is_sent_no_further(folder, server, copy_of_two, monkeypatch):
    """Beyond the files that are being sent, one by each connection."""
    exchange = CopyClient._exchange
    sent: list[str] = []
    go_on = threading.Event()

    def wait_and_exchange(client, connection, method, target, file=None):
        if method == "PUT":
            sent.append(target)
            assert go_on.wait(60)
        return exchange(client, connection, method, target, file)

    monkeypatch.setattr(CopyClient, "_exchange", wait_and_exchange)
    client = CopyClient(server.address, server.token)
    with pytest.raises(OSError, match="No space left"), client.sending(FIRST, copy_of_two, 2) as written:
        for _ in range(3 * neighbour._CONNECTIONS):
            written("arrays/0")
        while len(sent) < neighbour._CONNECTIONS:
            time.sleep(0.001)
        threading.Timer(0.2, go_on.set).start()
        raise OSError(errno.ENOSPC, "No space left on device")
    assert len(sent) == neighbour._CONNECTIONS and held_copies(folder, FIRST).steps() == []


def test_strangers_are_refused(folder, server, copy_of_two):
    with pytest.raises(TransferError, match="another token"):
        send(CopyClient(server.address, "guess"), FIRST, copy_of_two, 2)
    client = CopyClient(server.address, server.token)
    connection = client._connect()
    for method, target in (
        ("PUT", "/neighbour/0of2/2/../../x"), ("PUT", "/own/0of2/2/x"), ("GET", "/own/0of2/../../2/x"),
        ("PUT", "/neighbour/0of2/2/x"), ("POST", "/own/0of2/2"), ("POST", "/neighbour/../2"),
        ("POST", "/neighbour/0of2/2/x"), ("GET", "/fetched/0of2/2/x"), ("DELETE", "/neighbour/../x?keep="),
        ("DELETE", "/own/0of2?keep="), ("GET", "/"),
    ):  # fmt: skip
        with pytest.raises(TransferError, match="refused"):
            client._exchange(connection, method, target)
        connection.close()
    assert list(folder.iterdir()) == []


def refuse_large_files(monkeypatch, root: Path) -> None:
    """The first array of a copy becomes larger than what a holder without room reads of it."""
    store = neighbour._Handler._store

    def refuse(handler, path, length):
        if length == 2**25:
            raise OSError(errno.ENOSPC, "No space left on device")
        return store(handler, path, length)

    (root / "arrays" / "0").write_bytes(bytes(2**25))
    monkeypatch.setattr(neighbour._Handler, "_store", refuse)


def test_a_holder_that_refuses_a_file_while_it_is_sent_says_why(server, copy_of_two, monkeypatch):
    refuse_large_files(monkeypatch, copy_of_two)
    with pytest.raises(TransferError, match="refused /neighbour/0of2/2/arrays/0: No space left on device"):
        send(CopyClient(server.address, server.token), FIRST, copy_of_two, 2)


@pytest.mark.longer
def test_processes_of_another_authority_are_refused(folder, copy_of_two, tmp_path, monkeypatch):
    files = {}
    for name in ("ours", "theirs"):
        subprocess.run([REPOSITORY / "scripts" / "make_tls.sh", tmp_path / name, name], check=True)
        files[name] = [str(tmp_path / name / file) for file in ("cert.pem", "key.pem", "ca.pem")]
    server = CopyServer(folder, "127.0.0.1", files["ours"])
    try:
        for tls in (None, files["theirs"]):
            with pytest.raises((TransferError, ssl.SSLError)):
                send(CopyClient(server.address, server.token, tls), FIRST, copy_of_two, 2)
        assert list(folder.iterdir()) == []
        ours = CopyClient(server.address, server.token, files["ours"])
        send(ours, FIRST, copy_of_two, 2)
        assert held_copies(folder, FIRST).steps() == [2]
        refuse_large_files(monkeypatch, copy_of_two)
        with pytest.raises(TransferError, match="refused .*: No space left on device"):
            send(ours, FIRST, copy_of_two, 2)
        monkeypatch.setenv(neighbour.TLS_PEER_PREFIX, "spiffe://jaxstack/another/")
        with pytest.raises(TransferError):
            send(ours, FIRST, copy_of_two, 2)
    finally:
        server.close()
