"""Copies of arrays from host memory to devices, with a bound on the host memory that they hold."""

import collections

import jax


class Transfers:
    """Arrays on their way from host memory to devices, at most so many bytes of them at a time.

    `jax.device_put` returns before the copy, and its source stays in host memory until then: a loop that reads files
    faster than a device takes arrays would otherwise hold all of them.

    Args:
      most_bytes: bytes of arrays that may be on their way; a larger array is waited for.
    """

    def __init__(self, most_bytes: int):
        self._most_bytes = most_bytes
        self._bytes = 0
        self._arrays: collections.deque[jax.Array] = collections.deque()

    def add(self, array: jax.Array) -> jax.Array:
        """Return an array, the result of `jax.device_put`, once few enough bytes are on their way."""
        self._arrays.append(array)
        self._bytes += array.nbytes
        while self._bytes > self._most_bytes:
            first = self._arrays.popleft()
            self._bytes -= first.nbytes
            first.block_until_ready()
        return array
