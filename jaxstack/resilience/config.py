"""The configuration of a run's reactions to failures."""

from pydantic import Field

from jaxstack.config.base import Component
from jaxstack.resilience.save_interval import LLAMA3_HOURS


class ResilienceConfig(Component):
    """Limits after which a run stops, and the expected rate of failures."""

    max_skipped_steps: int = Field(default=10, ge=1)
    """Largest number of steps skipped in a row, as their loss or gradients are not finite or spike. After these the run
    goes back to the checkpoint before them and stops with an error."""
    max_skipped_share: float = Field(default=0.05, gt=0, le=1)
    """As max_skipped_steps, if more than this share of the last 1,000 steps was skipped, in a row or not."""
    spike_threshold: float | None = Field(default=None, gt=0)
    """Skip a step if its loss or gradient norm is more than this many standard deviations (from the median absolute
    deviation, and at least 1 %) above the median of the last 128 steps, e.g. 10. null: spikes are not skipped."""
    checksum_every_steps: int | None = Field(default=None, ge=1)
    """Interval, in addition to each save, of comparing the replicas of the state; a difference stops the run."""
    accept_data_change: bool = False
    """Resume with other data, another tokenizer, seed or batch size than the checkpoint's."""
    heartbeat_seconds: int = Field(default=10, ge=2, le=86_400)
    """With several processes: one that is silent for this long counts as dead, and the others exit."""
    connect_seconds: int = Field(default=300, ge=1, le=86_400)
    """Limit on the time that the processes of a run wait for one another at its start."""
    device_hours_between_failures: float = Field(default=LLAMA3_HOURS, gt=0)
    """Expected device-hours between failures, for the advice on the checkpoint interval."""
