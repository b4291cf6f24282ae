"""Reads objects from cloud storage and HTTP, through TensorStore's key-value stores."""

import functools
import os
import re
from typing import Any

import tensorstore

from jaxstack.errors import JaxstackError

SCHEMES = ("file", "memory", "gs", "s3", "http", "https")
RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "8s"}
"""Retries of a request that failed, about 24 seconds in all."""
_WAYS_OUT = {
    "gs": "the bucket's name, the network, and the credentials (gcloud auth application-default login, or a key file "
    "in GOOGLE_APPLICATION_CREDENTIALS)",
    "s3": "the bucket's name, the network, and the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "~/.aws); another service than Amazon's needs AWS_ENDPOINT_URL",
    "http": "the address and the network",
    "https": "the address and the network",
}
"""Scheme -> what to check if its objects cannot be read."""


class RangesIgnored(JaxstackError):
    """Raised when the server ignores HTTP range requests and sends whole objects only."""


def is_object_url(path: str) -> bool:
    """Return True if `path` is a URL that TensorStore reads."""
    return path.partition("://")[0] in SCHEMES and "://" in path


class ObjectStore:
    """Read-only access to the objects below a URL. Picklable and thread-safe; no request is made before a read.

    Args:
      url: `gs://bucket/folder`, `s3://bucket/folder`, `https://host/folder`, `file:///folder`, or `memory://folder`.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/") + "/"

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the content of an object, or its bytes from `start` to `stop` (exclusive).

        Raises:
          RangesIgnored: the server sends whole objects only.
          JaxstackError: there is no such object, it is too short, or it cannot be reached; the message has the way out.
        """
        try:
            store = _open(self.url)
            result = store.read(name, byte_range=slice(start, stop)).result()
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise self._failure(name, str(error)) from None
        if result.state != "value":
            raise JaxstackError(f"{self.url}{name} does not exist: check the URL, or prepare and copy the data again")
        return result.value

    def exists(self, name: str) -> bool:
        """Return True if the object exists. Reads the whole object, so use it for small ones.

        Raises:
          JaxstackError: the store cannot be reached.
        """
        try:
            return _open(self.url).read(name).result().state == "value"
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise self._failure(name, str(error)) from None

    def _failure(self, name: str, reason: str) -> JaxstackError:
        reason = re.sub(r"\s*\[[a-z_]+=.*\]", "", reason).strip()
        if "was ignored by server" in reason:
            return RangesIgnored(
                f"the server of {self.url}{name} sends whole files only, no parts of them: set data.shard_cache to a "
                "local directory, into which whole shards are copied"
            )
        if "OUT_OF_RANGE" in reason or "Unexpected Content-Range" in reason:
            return JaxstackError(f"{self.url}{name} is shorter than its index says: copy the data again ({reason})")
        way_out = _WAYS_OUT.get(self.url.partition("://")[0], "the path and its permissions")
        return JaxstackError(f"cannot read {self.url}{name}: {reason}; check {way_out}")


@functools.lru_cache(maxsize=64)
def _open(url: str) -> tensorstore.KvStore:
    spec: str | dict[str, Any] = url
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if url.startswith("s3://") and endpoint:
        bucket, _, path = url.removeprefix("s3://").partition("/")
        spec = {"driver": "s3", "bucket": bucket, "path": path, "endpoint": endpoint.rstrip("/")}
    return tensorstore.KvStore.open(spec, context=_context()).result()


@functools.cache
def _context() -> tensorstore.Context:
    return tensorstore.Context({f"{store}_request_retries": RETRIES for store in ("http", "gcs", "s3")})
