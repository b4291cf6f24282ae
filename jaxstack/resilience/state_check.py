"""Checks of a training state before it is saved: its parameters are finite, and its replicas are equal."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxstack.checkpoint.leaves import name_leaves
from jaxstack.errors import JaxstackError
from jaxstack.resilience.replica_check import ReplicaCheck

_SHOWN = 5
_GO_BACK = "This state is not saved; run the same command again to continue from the newest checkpoint"


class SilentCorruption(JaxstackError):
    """Raised when replicas of an array of the training state differ between devices."""


class StateCheck:
    """Checks the training state for replicas that differ between devices and for parameters that are not finite.

    Every process calls it in the same way; it waits for the state to be computed.

    Args:
      checksum_every_steps: interval of comparing replicas, which are then compared before each save too; None: never.
    """

    def __init__(self, checksum_every_steps: int | None = None):
        self._every = checksum_every_steps
        self._replicas: ReplicaCheck | None = None
        # A scalar is replicated to every device, and so to every process; a vector of them may be sharded.
        self._finite = jax.jit(lambda arrays: {name: jnp.isfinite(x).all() for name, x in arrays.items()})

    def check(self, step: int, state: PyTree, before_save: bool) -> None:
        """Check that replicas are equal, if due at this step, and before a save that parameters are finite.

        Args:
          step: number of steps done.
          state: a `TrainState`.
          before_save: the state is about to be saved.

        Raises:
          SilentCorruption: replicas differ; the message names the leaves and devices.
          JaxstackError: a parameter is not finite.
        """
        if self._every is not None and (before_save or step % self._every == 0):
            self._replicas = self._replicas or ReplicaCheck(state)
            found = self._replicas.find(state)
            if found:
                raise SilentCorruption(
                    f"silent corruption: after step {step} copies of the state are not the same:\n  {_list(found)}\n"
                    f"{_GO_BACK}. That one was compared before it was saved. If the same device is named again, take "
                    "it out of the run and test it (dcgmi diag -r 3)."
                )
        if before_save:
            self._check_finite(step, state.params)

    def _check_finite(self, step: int, params: PyTree) -> None:
        arrays = {name: x for name, x in name_leaves(params)[0].items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        bad = [name for name, finite in jax.device_get(self._finite(arrays)).items() if not finite]
        if bad:
            raise JaxstackError(
                f"after step {step} parameters are not finite: {_list(bad, ', ')}. {_GO_BACK}. Lower the learning rate."
            )


def _list(lines: list[str], mark: str = "\n  ") -> str:
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return mark.join([*lines[:_SHOWN], *more])
