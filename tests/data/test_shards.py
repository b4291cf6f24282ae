"""Shards: a stream across files, and a typed error for every kind of damage."""

import json
import os

import numpy as np
import pytest

from jaxstack.data.build_shards import BuildOptions, prepare_tokens
from jaxstack.data.config import SourceConfig
from jaxstack.data.shard_files import LocalFiles
from jaxstack.data.shards import ShardWriter, TokenStream, open_split, read_index
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.errors import JaxstackError


@pytest.fixture
def prepared(corpus, tmp_path):
    folder = tmp_path / "tokens"
    source = SourceConfig(path=str(corpus))
    prepare_tokens([source], folder, ByteTokenizer(), 0.05, BuildOptions(shard_tokens=5000))
    return folder


def open_train(folder):
    return open_split(folder, read_index(folder), "train")


def test_a_stream_reads_across_shard_borders(tmp_path):
    ids = np.arange(2500) % 257
    writer = ShardWriter(tmp_path, "train", np.dtype("<u2"), 1000)
    for part in np.array_split(ids, 7):
        writer.append(part)
    shards = writer.finish()
    assert [s["tokens"] for s in shards] == [1000, 1000, 500]
    stream = TokenStream(LocalFiles(tmp_path), shards, np.dtype("<u2"), 1000, 256)
    np.testing.assert_array_equal(stream.read(0, 9999), ids)
    np.testing.assert_array_equal(stream.read(990, 1020), ids[990:2010])
    assert stream.read(2500, 10).size == 0


def test_shards_are_plain_little_endian_ids(prepared, corpus):
    index = read_index(prepared)
    assert index["dtype"] == "uint16" and len(index["splits"]["train"]["shards"]) > 3
    raw = b"".join((prepared / s["name"]).read_bytes() for s in index["splits"]["train"]["shards"])
    ids = np.frombuffer(raw, "<u2")
    assert len(ids) == index["splits"]["train"]["tokens"]
    first = ids[1 : 1 + int(np.argmax(ids[1:] == 256))]
    texts = {p.read_bytes() for p in corpus.iterdir()}
    assert ids[0] == 256 and ByteTokenizer().decode_bytes(first) in texts
    total = index["splits"]["train"]["bytes"] + index["splits"]["held_out"]["bytes"]
    assert total == sum(map(len, texts))
    assert index["splits"]["train"]["documents"] + index["splits"]["held_out"]["documents"] == 240


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


DAMAGE = {
    "cut off": lambda p: os.truncate(p, 4000),
    "of odd length": lambda p: os.truncate(p, os.path.getsize(p) - 1),
    "longer": lambda p: p.write_bytes(p.read_bytes() + b"\0\0"),
    "empty": lambda p: p.write_bytes(b""),
    "flipped": flip,
    "deleted": lambda p: p.unlink(),
    "a directory": lambda p: (p.unlink(), p.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_shard_is_named(prepared, damage):
    open_train(prepared)
    damage(prepared / "train-00001.bin")
    with pytest.raises(JaxstackError, match=r"token shard .*train-00001\.bin"):
        open_train(prepared)


def test_a_flip_is_noticed_without_stamps_and_with_the_old_times(prepared):
    (prepared / ".verified.json").unlink()
    path = prepared / "train-00000.bin"
    times = path.stat()
    flip(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(JaxstackError, match="is corrupt"):
        open_train(prepared)


def test_a_file_that_shrinks_while_in_use_gives_an_error(prepared):
    stream = open_train(prepared)
    stream.read(0, 10)
    os.truncate(prepared / "train-00000.bin", 100)
    with pytest.raises(JaxstackError, match="became shorter while it was in use"):
        stream.read(1000, 10)


def test_hashes_are_not_computed_twice(prepared, monkeypatch):
    open_train(prepared)
    monkeypatch.setattr("jaxstack.data.shards.file_sha256", lambda path: pytest.fail("hashed again"))
    open_train(prepared)


def change(index, *keys, value):
    inner = index
    for k in keys[:-1]:
        inner = inner[k]
    inner[keys[-1]] = value
    return index


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda i: change(i, "version", value=99), "version 99"),
        (lambda i: change(i, "format", value="x"), "not an index of token shards"),
        (lambda i: change(i, "dtype", value="float32"), "damaged"),
        (lambda i: change(i, "splits", "train", "tokens", value=1), "do not add up"),
        (lambda i: change(i, "splits", "train", "shards", 0, "name", value="../../x.bin"), "shard name"),
        (lambda i: change(i, "splits", "train", "shards", 0, "tokens", value=-1), "shard sizes"),
        (lambda i: change(i, "splits", value=[]), "damaged"),
        (lambda i: [], "not an index"),
    ],
)
def test_a_damaged_index_is_refused(prepared, edit, message):
    path = prepared / "index.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(JaxstackError, match=message):
        open_train(prepared)


def test_an_unreadable_index_is_refused(prepared):
    (prepared / "index.json").write_bytes(b"\xff{")
    with pytest.raises(JaxstackError, match="not readable"):
        read_index(prepared)
    with pytest.raises(JaxstackError, match="no prepared tokens"):
        read_index(prepared / "tokenizer")


def test_many_shards_need_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxstack.data.shard_files.MOST_OPEN_FILES", 3)
    writer = ShardWriter(tmp_path, "train", np.dtype("<u4"), 10)
    writer.append(np.arange(200))
    stream = TokenStream(LocalFiles(tmp_path), writer.finish(), np.dtype("<u4"), 10, 0)
    np.testing.assert_array_equal(stream.read(0, 200), np.arange(200))
    assert len(_open_files(tmp_path)) <= 3


def _open_files(folder):
    """Return the open files of this process in a folder; other threads may open and close files meanwhile."""
    links = []
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [link for link in links if link.startswith(str(folder))]
