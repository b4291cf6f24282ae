"""Copies of a state in host memory: who holds whose, room, hashes, transfers, and what of them is restored."""

import ssl
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxstack.checkpoint import manifest, memory_folder, neighbour, shard_files
from jaxstack.checkpoint.leaves import abstract_state, name_leaves
from jaxstack.checkpoint.memory import Member, MemoryCheckpoints, check_room, common_steps, needed_bytes
from jaxstack.checkpoint.neighbour import CopyClient, CopyServer, TransferError, find_holders
from jaxstack.errors import ConfigError
from tests.checkpoint.states import raw

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
    return Member(node, num_bytes, free, copies.get("own", ()), copies.get("held", {}))


def test_needed_room_counts_own_and_second_copies_twice_each():
    assert needed_bytes([member("a:x")]) == {"a:x": 200}
    assert needed_bytes([member("a:x"), member("a:x", 50)]) == {"a:x": 600}
    assert needed_bytes([member("a:x"), member("b:y", 50)]) == {"a:x": 300, "b:y": 300}


def test_a_node_without_room_is_refused_with_numbers():
    check_room([member("a:/dev/shm/x", 2**30, 4 * 2**30), member("b:/dev/shm/y", 2**30, 4 * 2**30)])
    with pytest.raises(ConfigError, match=r"up to 4.0 GiB in /dev/shm/y on b, .* it has 3.0 GiB"):
        check_room([member("a:/dev/shm/x", 2**30, 4 * 2**30), member("b:/dev/shm/y", 2**30, 3 * 2**30)])


def test_only_steps_of_which_all_shards_are_left_are_common():
    first = member("a", own=[4, 6], held={"1": [4, 6]})
    assert common_steps([first, member("b", own=[4], held={"0": [4]})]) == [6, 4]
    assert common_steps([first, member("b")]) == [6, 4], "the lost node's copies are on the other"
    assert common_steps([member("a", own=[6]), member("b", own=[4])]) == []


@pytest.mark.quick
def test_a_copy_is_restored_bit_equal_with_its_extra_data_and_files(folder):
    with opened(state_of(0), folder) as copies:
        assert copies.latest_step(0) is None
        assert not copies.is_due(0) and not copies.is_due(3) and copies.is_due(4)
        for step in (2, 4):
            copies.copy(step, state_of(step), {"batches": step}, {"samples.npz": b"abc"})
        copies.wait()
        assert copies.figures()["memory_copy_step"] == 4 and copies.figures()["memory_copy_bytes"] == 30
    assert sorted(path.name for path in (folder / "own" / "0").iterdir()) == ["4"]
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


def test_shards_on_several_devices_are_stored_once(tmp_path):
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
    shards = shard_files.start_copy(arrays)
    assert sorted(shards["split"]) == ["0:2,0:4", "0:2,4:8", "2:4,0:4", "2:4,4:8"]
    assert {name: len(pieces) for name, pieces in shards.items()} == {
        "split": 4, "partly": 2, "everywhere": 1, "scalar": 1, "host": 1, "eight": 2, "four": 2,
    }  # fmt: skip
    index = {"format": manifest.FORMAT, "step": 1, "saved_at": "", "leaves": {}}
    written = shard_files.write(tmp_path, shards, index, {})
    targets = abstract_state(arrays)
    assert written == 4 * values.nbytes + 4 + 2 * values.size == shard_files.local_bytes(targets)
    index = manifest.check(tmp_path, 1)
    assert shard_files.missing_shard(index, targets) is None
    found = shard_files.read(tmp_path, index, targets)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert name == "host" or found[name].sharding == array.sharding
    moved = {"split": jax.ShapeDtypeStruct((4, 8), np.float32, sharding=NamedSharding(mesh, P("b", "a")))}
    assert shard_files.missing_shard(index, moved) is None
    assert (shard_files.read(tmp_path, index, moved)["split"] == values).all()
    other = {"split": jax.ShapeDtypeStruct((4, 8), np.float32, sharding=NamedSharding(mesh, P(("a", "b"))))}
    assert shard_files.missing_shard(index, other) == "split[0:1,0:8]"


def test_a_damaged_copy_is_named_and_passed_over(folder):
    said: list[str] = []
    with opened(state_of(0), folder) as copies:
        copies.copy(2, state_of(2), None)
    damage(folder / "own" / "0" / "2" / "arrays" / "1")
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
        (folder / "own" / "0" / ".writing-4").write_text("in the way")  # rmtree leaves a file
        copies.copy(4, state_of(4), None)
        copies.wait()
        assert copies.newest == 2
    assert len(said) == 1 and said[0].startswith("the copy of step 4 in memory failed and is dropped: process 0:")
    assert opened(state_of(0), folder).latest_step(0) == 2


def test_without_the_launcher_the_key_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(memory_folder.VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"needs the launcher.*python -m jaxstack.launch -- COMMAND"):
        MemoryCheckpoints(2, tmp_path, abstract_state(state_of(0)), report=print)


@pytest.fixture
def copy_of_two(tmp_path) -> Path:
    root = tmp_path / "copy"
    root.mkdir()
    index = {"format": manifest.FORMAT, "step": 2, "saved_at": "", "leaves": {}}
    shard_files.write(root, {"w": {"0:4": jnp.arange(4.0)}}, index, {"samples.npz": b"abc"})
    return root


@pytest.fixture
def server(folder):
    running = CopyServer(folder, "127.0.0.1")
    yield running
    running.close()


def contents(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in manifest.list_files(root)}


def test_a_copy_is_sent_fetched_and_deleted(folder, server, copy_of_two, tmp_path):
    client = CopyClient(3, server.address, server.token)
    client.send(copy_of_two, 2)
    held = memory_folder.held_copies(folder, 3)
    assert memory_folder.held_ranks(folder) == [3] and held.steps() == [2]
    back = tmp_path / "back"
    back.mkdir()
    client.fetch(back, 2)
    assert contents(back) == contents(copy_of_two) == contents(held.path(2))
    client.keep([2, 5])
    assert held.steps() == [2]
    client.keep([])
    assert held.steps() == []
    with pytest.raises(TransferError, match="refused /3/2/checkpoint.json: no such file"):
        client.fetch(back, 2)


def test_a_copy_that_arrives_damaged_or_in_part_does_not_replace_the_older_one(folder, server, copy_of_two):
    client = CopyClient(0, server.address, server.token)
    client.send(copy_of_two, 2)
    damage(copy_of_two / "arrays" / "0")
    with pytest.raises(TransferError, match="arrays/0: it, or its line in SHA256SUMS, has changed"):
        client.send(copy_of_two, 2)
    held = memory_folder.held_copies(folder, 0)
    assert held.steps() == [2] and manifest.check(held.path(2), 2)


def test_strangers_are_refused(folder, server, copy_of_two):
    with pytest.raises(TransferError, match="another token"):
        CopyClient(0, server.address, "guess").send(copy_of_two, 2)
    client = CopyClient(0, server.address, server.token)
    connection = client._connect()
    for method, target in (("PUT", "/0/2/../../x"), ("GET", "/0/../../2/x"), ("DELETE", "/../x?keep="), ("GET", "/")):
        with pytest.raises(TransferError, match="refused"):
            client._exchange(connection, method, target, b"" if method == "PUT" else None)
        connection.close()
    assert list(folder.iterdir()) == []


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
                CopyClient(0, server.address, server.token, tls).send(copy_of_two, 2)
        assert list(folder.iterdir()) == []
        ours = CopyClient(0, server.address, server.token, files["ours"])
        ours.send(copy_of_two, 2)
        assert memory_folder.held_copies(folder, 0).steps() == [2]
        monkeypatch.setenv(neighbour.TLS_PEER_PREFIX, "spiffe://jaxstack/another/")
        with pytest.raises(TransferError):
            ours.send(copy_of_two, 2)
    finally:
        server.close()
