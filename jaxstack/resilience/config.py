"""What a run does when something goes wrong."""

from pydantic import Field

from jaxstack.config import Component


class ResilienceConfig(Component):
    """Limits after which a run stops instead of going on, and what it expects to go wrong."""

    max_skipped_steps: int = Field(default=10, ge=1)
    """Steps in a row whose loss or gradients are not finite are skipped; after this many the run ends with an error."""
    heartbeat_seconds: int = Field(default=10, ge=2)
    """Of several processes: one that has been silent for so long is dead, and the others end."""
    connect_seconds: int = Field(default=300, ge=1)
    """For which the processes of a run wait for one another at its start."""
    device_hours_between_failures: float = Field(default=50_700, gt=0)
    """For the advice on the checkpoint interval."""
