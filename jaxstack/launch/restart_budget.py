"""Limits how often a failing run is restarted: a number of restarts, refilled by each new checkpoint."""


class RestartBudget:
    """Number of restarts that a run may still take; a new checkpoint resets it to its full size.

    Args:
      restarts: size of the budget.
    """

    def __init__(self, restarts: int):
        self._size = self.left = restarts
        self._best = -1

    def spend(self, saved: int) -> bool:
        """Take one restart from the budget, refilled first if checkpoint `saved` is new; False if none is left."""
        if saved > self._best:
            self._best = saved
            self.left = self._size
        if self.left <= 0:
            return False
        self.left -= 1
        return True

    @property
    def delay_seconds(self) -> float:
        """Seconds to wait before the next start: longer with each failure in a row, up to half a minute."""
        return min(30.0, 2.0 ** (self._size - self.left - 1))
