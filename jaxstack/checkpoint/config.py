"""The configuration of checkpoints."""

from pydantic import ConfigDict, Field

from jaxstack.config.base import Component


class CheckpointConfig(Component):
    """Configuration of checkpoints: when to save them, and how many to keep."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    every_steps: int = Field(default=1000, ge=1)
    """Save at every multiple of this many steps, and at the last one; never at step 0."""

    memory_every_steps: int = Field(default=0, ge=0)
    """Copy the state to the host memory of this node and of another one at every multiple of this many steps, for
    restarts by the launcher; 0: never."""

    keep: int = Field(default=3, ge=1)
    """Number of newest checkpoints to keep. An older one is deleted only after a newer one is committed."""

    keep_every_steps: int | None = Field(default=None, ge=1)
    """Checkpoints at multiples of this many steps are kept forever."""

    asynchronous: bool = Field(default=True, alias="async")
    """Write in the background. A step waits only for the copy from the devices to host memory."""

    save_on_exit: bool = True
    """Save once more when the run is asked to stop (SIGTERM, Ctrl-C)."""

    timeout_minutes: int = Field(default=120, ge=1, le=10_080)
    """Limit on the duration of a save; one that is not committed by then has failed."""
