"""What a run does when something goes wrong."""

from pydantic import Field

from jaxstack.config.base import Component
from jaxstack.resilience.interval import LLAMA3_HOURS


class ResilienceConfig(Component):
    """Limits after which a run stops instead of going on, and what it expects to go wrong."""

    max_skipped_steps: int = Field(default=10, ge=1)
    """Steps in a row whose loss or gradients are not finite, or spike, are skipped; after this many the run goes back
    to the checkpoint before them and ends with an error."""
    max_skipped_share: float = Field(default=0.05, gt=0, le=1)
    """The same where more than this share of the last 1,000 steps was skipped, in a row or not."""
    spike_threshold: float | None = Field(default=None, gt=0)
    """A step is skipped where its loss or gradient norm is more than this many standard deviations (by the median
    absolute deviation, and at least 1 %) above the median of the last 128 steps, e.g. 10. null: spikes are taken."""
    checksum_every_steps: int | None = Field(default=None, ge=1)
    """So often, and before each save, the devices' copies of the state are compared; a difference ends the run."""
    accept_data_change: bool = False
    """Resume on other data, another tokenizer, seed or batch than the checkpoint's."""
    heartbeat_seconds: int = Field(default=10, ge=2, le=86_400)
    """Of several processes: one that has been silent for so long is dead, and the others end."""
    connect_seconds: int = Field(default=300, ge=1, le=86_400)
    """For which the processes of a run wait for one another at its start."""
    device_hours_between_failures: float = Field(default=LLAMA3_HOURS, gt=0)
    """For the advice on the checkpoint interval."""
