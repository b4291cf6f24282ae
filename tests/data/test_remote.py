"""Prepared directories behind URLs: every kind of store, local copies of shards, and errors with a way out."""

import contextlib
import http.server
import re
import shutil
import threading
import time

import numpy as np
import pytest
import tensorstore

from jaxstack.data import prepared_folders, shard_files
from jaxstack.data.build_shards import BuildOptions, prepare_tokens
from jaxstack.data.config import DataConfig, SourceConfig
from jaxstack.data.loader import open_data
from jaxstack.data.shard_files import ObjectStore, RangesIgnored
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.errors import ConfigError, JaxstackError

LENGTH = 32
ASK = {"global_batch_size": 4, "rows": range(4)}


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A prepared directory with several shards."""
    folder = tmp_path_factory.mktemp("remote") / "tokens"
    prepare_tokens([SourceConfig(path=str(corpus))], folder, ByteTokenizer(), 0.05, BuildOptions(shard_tokens=5000))
    return folder


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    """Fails after one retry, and forgets stores of other tests."""
    monkeypatch.setattr(shard_files, "RETRIES", {"max_retries": 1, "initial_delay": "10ms", "max_delay": "10ms"})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    for cached in (shard_files._open, shard_files._context, prepared_folders._holds_index):
        cached.cache_clear()


class Server:
    """Serves files by the protocols of a web server, S3 and Cloud Storage, for reading."""

    def __init__(self, folder, ranges=True):
        self.requests = []
        self.delay = 0.0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):  # which region the bucket is in
                self.reply(200, b"", {"x-amz-bucket-region": "us-east-1"})

            def do_GET(self):
                name = self.path.split("?")[0].replace("%2F", "/").rsplit("tokens/", 1)[-1]
                part = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
                outer.requests.append((name, part is not None))
                time.sleep(outer.delay)
                path = folder / name
                if not path.is_file():
                    return self.reply(404, b"", {})
                content = path.read_bytes()
                if not part or not ranges:
                    return self.reply(200, content, {})
                begin = int(part[1])
                end = int(part[2] or len(content) - 1)
                end = min(end, len(content) - 1)
                return self.reply(
                    206, content[begin : end + 1], {"content-range": f"bytes {begin}-{end}/{len(content)}"}
                )

            def reply(self, status, content, headers):
                self.send_response(status)
                for name, value in {"ETag": '"1"', "x-goog-generation": "1", **headers}.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(content)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(folder):
    server = Server(folder)
    yield server
    server.close()


def opened(path, **values):
    return open_data(DataConfig(sources=(SourceConfig(path=str(path)),), **values), sequence_length=LENGTH, seed=7)


def check_equal(remote, local):
    assert remote.fingerprint == local.fingerprint
    iterator = remote.batches(start=3, **ASK)
    for number in range(3, 9):
        batch = next(iterator)
        expected = local.batch(number, **ASK)
        for name in expected:
            np.testing.assert_array_equal(batch[name], expected[name])
    iterator.close()
    assert remote.held_out_bytes() == local.held_out_bytes()


@pytest.mark.parametrize("scheme", ["file", "memory", "gs", "s3", "http"])
def test_every_store_gives_the_batches_of_the_local_directory(scheme, folder, server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
    url = {
        "file": f"file://{folder}", "memory": "memory://bucket/tokens", "gs": "gs://bucket/tokens",
        "s3": "s3://bucket/tokens", "http": f"{server.url}/tokens",
    }[scheme]  # fmt: skip
    if scheme == "memory":
        store = tensorstore.KvStore.open(url + "/", context=shard_files._context()).result()
        for path in filter(lambda path: path.is_file(), folder.rglob("*")):
            store.write(str(path.relative_to(folder)), path.read_bytes()).result()
    check_equal(opened(url), opened(folder))
    if scheme in ("gs", "s3", "http"):
        assert sum(name.startswith("train-") and part for name, part in server.requests) > 10


def test_shards_are_copied_once_and_then_read_locally(folder, server, tmp_path):
    local = prepared_folders.LocalFolder(folder)
    shards = local.read_index()["splits"]["train"]["shards"][:2]
    count = sum(shard["tokens"] for shard in shards)
    expected = local.open_split("train").read(0, count)
    for number in range(2):
        stream = prepared_folders.open_folder(f"{server.url}/tokens", str(tmp_path)).open_split("train")
        np.testing.assert_array_equal(stream.read(0, count), expected)
        end = time.monotonic() + 10
        while len(stream._files._copied) < len(shards):
            assert time.monotonic() < end
            time.sleep(0.005)
        whole = sorted(name for name, part in server.requests if name.startswith("train-") and not part)
        assert whole == ([] if number else sorted(shard["name"] for shard in shards))
        server.requests.clear()
        np.testing.assert_array_equal(stream.read(0, count), expected)
        assert server.requests == []
    for path in tmp_path.glob("*/*.bin"):
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_a_damaged_copy_is_made_again(folder, server, tmp_path):
    url = f"{server.url}/tokens"
    cache = str(tmp_path)
    remote = prepared_folders.open_folder(url, cache)
    stream = remote.open_split("train")
    stream._files._copy("train-00001.bin")
    copy = next(tmp_path.glob("*/train-00001.bin"))
    copy.write_bytes(copy.read_bytes()[:-2] + b"\0\0")
    again = prepared_folders.open_folder(url, cache).open_split("train")
    assert not copy.exists()
    expected = prepared_folders.LocalFolder(folder).open_split("train")
    np.testing.assert_array_equal(again.read(5000, 5000), expected.read(5000, 5000))


def test_a_shard_that_was_changed_in_the_store_is_not_copied(folder, server, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "train-00000.bin").write_bytes(b"\0" * (folder / "train-00000.bin").stat().st_size)
    stream = prepared_folders.open_folder(f"file://{broken}", str(tmp_path / "cache")).open_split("train")
    with pytest.raises(JaxstackError, match=r"token shard file://.*train-00000\.bin is corrupt"):
        stream._files._copy("train-00000.bin")


def test_a_read_does_not_wait_for_the_copy_of_its_shard(folder, server, tmp_path, monkeypatch):
    stream = prepared_folders.open_folder(f"{server.url}/tokens", str(tmp_path)).open_split("train")
    copying = threading.Event()
    read = ObjectStore.read

    def slow(self, name, start=None, stop=None):
        if start is None:
            copying.wait(10)
        return read(self, name, start, stop)

    monkeypatch.setattr(ObjectStore, "read", slow)
    assert stream.read(0, 10).size == 10 and not copying.is_set()
    copying.set()


def test_a_server_without_ranges_needs_a_cache(folder, tmp_path):
    server = Server(folder, ranges=False)
    with pytest.raises(RangesIgnored, match="sends whole files only.* set data.shard_cache to a local directory"):
        opened(f"{server.url}/tokens").batch(0, **ASK)
    remote = opened(f"{server.url}/tokens", shard_cache=str(tmp_path))
    local = opened(folder)
    np.testing.assert_array_equal(remote.batch(0, **ASK)["tokens"], local.batch(0, **ASK)["tokens"])
    server.close()


def test_missing_and_unreachable_objects_are_named_with_the_way_out(folder, server, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(JaxstackError, match=r"cannot read s3://b/x/index\.json: .*check .* credentials .*AWS_ACCESS"):
        opened("s3://b/x")
    with pytest.raises(
        JaxstackError, match=r"cannot read http://127\.0\.0\.1:9/x/index\.json: .*connect.*check the ad"
    ):
        opened("http://127.0.0.1:9/x")
    tokens = (SourceConfig(path=f"{server.url}/nothing", format="tokens"),)
    with pytest.raises(ConfigError, match=r"has format tokens, but there is no index\.json in it"):
        open_data(DataConfig(sources=tokens), sequence_length=LENGTH, seed=0)
    with pytest.raises(ConfigError, match="no prepared tokens can be read from ftp://"):
        prepared_folders.open_folder("ftp://x/y", None)
    lost = tmp_path / "lost"
    shutil.copytree(folder, lost)
    data = opened(f"file://{lost}")
    (lost / "train-00001.bin").unlink()
    with pytest.raises(JaxstackError, match=r"file://.*/train-00001\.bin does not exist: check the URL"):
        [data.batch(number, **ASK) for number in range(40)]
    (lost / "train-00001.bin").write_bytes(b"\0" * 100)
    with pytest.raises(JaxstackError, match=r"train-00001\.bin is shorter than its index says: copy the data again"):
        [data.batch(number, **ASK) for number in range(40)]


def test_a_shard_that_ends_early_behind_http_is_named(folder, server):
    store = ObjectStore(f"{server.url}/tokens")
    size = (folder / "train-00000.bin").stat().st_size
    with pytest.raises(JaxstackError, match=r"train-00000\.bin is shorter than its index says"):
        store.read("train-00000.bin", size - 2, size + 2)
