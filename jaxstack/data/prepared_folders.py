"""Directories of token shards as data sources: local ones, and remote ones that are read through TensorStore."""

import functools
import glob
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxstack.data.build_shards import TOKENIZER
from jaxstack.data.cache import load_prepared_tokenizer
from jaxstack.data.chat_format import CONFIG as CHAT_CONFIG
from jaxstack.data.object_store import ObjectStore, is_object_url
from jaxstack.data.shard_files import RemoteFiles
from jaxstack.data.shards import INDEX, TokenStream, open_split, parse_index, read_index, verify_shards
from jaxstack.data.tokenizer import CONFIG_FILE, MODEL_FILE, Tokenizer
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.files import writing_to


class PreparedFolder(Protocol):
    """Interface of a directory of token shards with the tokenizer that made them."""

    def read_index(self) -> dict[str, Any]:
        """Read and check the index.json that lists the shards; see `jaxstack.data.shards.read_index`."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that made the shards; raise an error if its hash differs from the one in index.json."""
        ...

    def open_split(self, split: str) -> TokenStream:
        """Open all token ids of a split, "train" or "held_out", as one stream."""
        ...

    def path_of(self, shard: str) -> str:
        """Return the path or URL of a shard."""
        ...


class LocalFolder:
    """A directory of token shards on a local disk or a mounted file system."""

    def __init__(self, path: Path):
        self._path = path

    def read_index(self) -> dict[str, Any]:
        return read_index(self._path)

    def tokenizer(self) -> Tokenizer:
        return load_prepared_tokenizer(self._path)

    def open_split(self, split: str) -> TokenStream:
        return open_split(self._path, self.read_index(), split)

    def path_of(self, shard: str) -> str:
        return str(self._path / shard)


class RemoteFolder:
    """A directory of token shards behind a URL, read through TensorStore.

    Args:
      url: of the directory.
      cache: local directory for copies of shards; None: no copies.
    """

    def __init__(self, url: str, cache: str | None):
        self._store = ObjectStore(url)
        self._cache = Path(cache).expanduser() if cache else None

    @functools.cached_property
    def _index(self) -> bytes:
        return self._store.read(INDEX)

    def read_index(self) -> dict[str, Any]:
        return parse_index(self._index, self._store.url + INDEX)

    def tokenizer(self) -> Tokenizer:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / TOKENIZER).mkdir()
            (folder / INDEX).write_bytes(self._index)
            kind = self.read_index()["tokenizer"].get("kind")
            for file in (CONFIG_FILE, MODEL_FILE, CHAT_CONFIG):
                place = f"{TOKENIZER}/{file}"
                needed = file == CONFIG_FILE or (file == MODEL_FILE and kind in ("bpe", "file"))
                if needed or self._store.exists(place):
                    (folder / place).write_bytes(self._store.read(place))
            return load_prepared_tokenizer(folder)

    def open_split(self, split: str) -> TokenStream:
        index = self.read_index()
        shards = index["splits"][split]["shards"]
        dtype = np.dtype(index["dtype"]).newbyteorder("<")
        cache = self._cache_folder(shards, dtype.itemsize)
        files = RemoteFiles(self._store, {s["name"]: s["sha256"] for s in shards}, cache)
        return TokenStream(files, shards, dtype, index["shard_tokens"], index["tokenizer"]["document_start"])

    def path_of(self, shard: str) -> str:
        return self._store.url + shard

    def _cache_folder(self, shards: list[dict], item_size: int) -> Path | None:
        """Return the local directory for copies of these shards (None: no cache), after deleting damaged copies."""
        if self._cache is None:
            return None
        hashes = json.dumps([s["sha256"] for s in shards])
        folder = self._cache / hashlib.sha256(hashes.encode()).hexdigest()[:24]
        with writing_to(folder):
            for shard in shards:
                if (folder / shard["name"]).is_file():
                    try:
                        verify_shards(folder, [shard], item_size)
                    except JaxstackError:
                        (folder / shard["name"]).unlink(missing_ok=True)
        return folder


def open_folder(path: str, cache: str | None) -> PreparedFolder:
    """Open the directory of token shards at a path or URL.

    Args:
      path: a local path, or a URL that TensorStore reads.
      cache: local directory for copies of remote shards; None: no copies.

    Raises:
      ConfigError: TensorStore does not read such URLs.
    """
    if is_object_url(path):
        return RemoteFolder(path, cache)
    if "://" in path:
        scheme = path.partition("://")[0]
        raise ConfigError(
            f"no prepared tokens can be read from {scheme}://; copy them, or use gs://, s3:// or https://"
        )
    return LocalFolder(Path(path).expanduser())


def is_prepared(path: str) -> bool:
    """Return True if `path`, a local path or a URL, is a directory of token shards with an index.

    Raises:
      JaxstackError: the URL cannot be reached.
    """
    if "://" not in path:
        return (Path(path).expanduser() / INDEX).is_file()
    is_file = os.path.splitext(path.rstrip("/").rsplit("/", 1)[-1])[1] != ""
    if not is_object_url(path) or glob.has_magic(path) or is_file:
        return False
    return _holds_index(path)


@functools.lru_cache(maxsize=256)
def _holds_index(url: str) -> bool:
    return ObjectStore(url).exists(INDEX)
