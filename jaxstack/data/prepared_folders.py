"""Directories of token shards as data sources: local ones, remote ones read through TensorStore, and the cache."""

import functools
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers as tokenizers_library

from jaxstack.data.build_shards import TOKENIZER, BuildOptions, build, build_key
from jaxstack.data.chat_format import CONFIG as CHAT_CONFIG
from jaxstack.data.config import SourceConfig, TokenizerConfig
from jaxstack.data.load_tokenizer import load_tokenizer, read_tokenizer_file, train_bpe
from jaxstack.data.shard_files import ObjectStore, RemoteFiles, is_object_url
from jaxstack.data.shards import FORMAT, INDEX, TokenStream, open_split, parse_index, read_index, verify_shards
from jaxstack.data.tokenization_plan import TokenizationPlan, make_plan
from jaxstack.data.tokenize_documents import sample_texts
from jaxstack.data.tokenizer import CONFIG_FILE, MODEL_FILE, ByteTokenizer, Tokenizer
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.files import exclusive, writing_to
from jaxstack.observe.number_format import byte_size

TRAINING_SAMPLE_BYTES = 16 * 2**20
Report = Callable[[str], None]


def cache_folder(configured: str | None) -> Path:
    """Return the data cache directory, created private to the user (mode 0700), as its content is trusted later.

    Raises:
      ConfigError: it cannot be created or written, or belongs to another user.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxstack" / "data"
    folder = Path(configured) if configured else default
    try:
        folder = folder.expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = folder.stat().st_uid
    except (OSError, RuntimeError) as e:
        raise ConfigError(f"cannot make the data cache {folder}: {e}; set data.cache_dir to another place") from None
    if owner not in (os.getuid(), 0):
        raise ConfigError(f"the data cache {folder} belongs to user id {owner}: set data.cache_dir to a private place")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the data cache {folder} cannot be written: set data.cache_dir to another place")
    return folder


def ensure_tokenizer(
    config: TokenizerConfig, plans: Sequence[TokenizationPlan], folder: Path, report: Report
) -> Tokenizer:
    """Return the configured tokenizer; a BPE is trained once on the training documents of `plans` and cached.

    Args:
      config: the choice of tokenizer.
      plans: the sources for training a BPE.
      folder: the cache directory.
      report: called with a line of text when something takes time.
    """
    if config.name == "byte":
        return ByteTokenizer()
    if config.path:
        return read_tokenizer_file(config.path, config.document_start)
    recipe = [
        config.vocab_size,
        TRAINING_SAMPLE_BYTES,
        tokenizers_library.__version__,
        *(p.identity for p in plans),
    ]
    place = folder / "tokenizers" / hashlib.sha256(repr(recipe).encode()).hexdigest()[:24]
    if (place / CONFIG_FILE).is_file():
        return _load_or_drop(place, report) or ensure_tokenizer(config, plans, folder, report)
    waiting = "waiting for another process that trains the tokenizer"
    with writing_to(place.parent), exclusive(place.with_suffix(".lock"), lambda: report(waiting)):
        if not (place / CONFIG_FILE).is_file():
            report(f"training a BPE tokenizer of {config.vocab_size} ids")
            train_tokenizer(plans, config.vocab_size).save(place)
    return load_tokenizer(place)


def _load_or_drop(place: Path, report: Report) -> Tokenizer | None:
    try:
        return load_tokenizer(place)
    except JaxstackError as e:
        report(f"the cached tokenizer is made again: {e}")
        shutil.rmtree(place)
        return None


def train_tokenizer(plans: Sequence[TokenizationPlan], vocab_size: int) -> Tokenizer:
    """Train a BPE tokenizer on a bounded sample of the training documents; the same files give the same sample."""
    budget = TRAINING_SAMPLE_BYTES // max(len(plans), 1)
    texts = (text for plan in plans for text in sample_texts(plan.units, budget))
    return train_bpe(texts, vocab_size)


def ensure_tokens(plan: TokenizationPlan, tokenizer: Tokenizer, folder: Path, options: BuildOptions) -> Path:
    """Return the cache directory with the token shards of some raw text, tokenizing it now if it is not cached yet.

    One process writes; others wait for it.
    """
    place = folder / "tokens" / build_key(plan, tokenizer, options.shard_tokens)[:24]
    if not (place / INDEX).is_file():
        waiting = "waiting for another process that prepares the data"
        with writing_to(place.parent), exclusive(place.with_suffix(".lock"), lambda: options.report(waiting)):
            if not (place / INDEX).is_file():
                options.report(f"tokenizing {byte_size(plan.size)} of text into {place}")
                build(plan, place, tokenizer, options)
    return place


def plan_source(source: SourceConfig, held_out_fraction: float) -> TokenizationPlan:
    """Return the plan for tokenizing one source of raw text: its files, cut or grouped into units of work."""
    return make_plan([source], held_out_fraction)


def load_prepared_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer stored with token shards, and check that it is the one that made them.

    Raises:
      JaxstackError: it is another tokenizer than the one that made the shards.
    """
    tokenizer = load_tokenizer(folder / TOKENIZER)
    expected = read_index(folder)["tokenizer"]["hash"]
    if tokenizer.hash != expected:
        raise JaxstackError(f"{folder}/{TOKENIZER} is not the tokenizer that its shards were made with: restore it")
    return tokenizer


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
        return _is_index(Path(path).expanduser() / INDEX)
    is_file = os.path.splitext(path.rstrip("/").rsplit("/", 1)[-1])[1] != ""
    if not is_object_url(path) or glob.has_magic(path) or is_file:
        return False
    return _holds_index(path)


def _is_index(path: Path) -> bool:
    """Return True if a file is an index of token shards, perhaps a damaged one; False for JSON of something else."""
    try:
        found = json.loads(path.read_bytes())
    except OSError:
        return path.is_file()
    except (ValueError, RecursionError):
        return True
    return isinstance(found, dict) and found.get("format") == FORMAT


@functools.lru_cache(maxsize=256)
def _holds_index(url: str) -> bool:
    return ObjectStore(url).exists(INDEX)
