"""How often to start again: a budget that progress refills."""


class Budget:
    """Restarts that a run may take in a row without a new checkpoint.

    Args:
      restarts: how many.
    """

    def __init__(self, restarts: int):
        self._size = self.left = restarts
        self._best = -1

    def spend(self, saved: int) -> bool:
        """Whether another start is allowed after one that ended with `saved` as its newest checkpoint."""
        if saved > self._best:
            self._best, self.left = saved, self._size
        if self.left <= 0:
            return False
        self.left -= 1
        return True

    @property
    def delay_seconds(self) -> float:
        """To wait before the next start: longer with each failure in a row, up to half a minute."""
        return min(30.0, 2.0 ** (self._size - self.left - 1))
