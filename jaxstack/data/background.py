"""Reads an iterator ahead of its consumer, in a thread of its own."""

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

_CLOSE_SECONDS = 5.0
"""Longest wait of `close` for a read that is under way; the thread is a daemon, so a stalled read cannot keep a program
from ending."""


class BackgroundIterator(Iterator[T], Generic[T]):
    """Reads an iterator in a background thread, up to `depth` items ahead, and yields the items in order.

    An item that is ready is returned at once, even while a later one is still being read. An error of the source is
    raised at its place in the order. The source is closed by the thread that reads it.

    Args:
      source: any iterator.
      depth: items that are read and not yet taken, at most; at least 1.
      name: name of the thread.
    """

    def __init__(self, source: Iterator[T], depth: int, name: str):
        self._source = source
        self._items: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._closed = self._ended = False
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while self._room.acquire() and not self._closed:
                self._items.put((next(self._source),))
        except BaseException as error:  # StopIteration too; the consumer raises it
            self._items.put(error)
        finally:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()
            self._items.put(StopIteration())

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        item = self._items.get()
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        self._room.release()
        return item[0]

    def close(self) -> None:
        """Stop reading; wait for a read that is under way, but only a few seconds."""
        self._closed = True
        self._room.release()
        # A reader that waits for this iterator, in a thread of its own, sees its end.
        self._items.put(StopIteration())
        self._thread.join(_CLOSE_SECONDS)
