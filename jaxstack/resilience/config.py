"""The configuration of a run's reactions to failures."""

from pydantic import Field

from jaxstack.config.base import Component
from jaxstack.resilience.save_interval import LLAMA3_HOURS


class ResilienceConfig(Component):
    """Reaction of a run to failures: limits on skipped steps and waiting, replica checks, expected failure rate."""

    max_skipped_steps: int = Field(default=10, ge=1)
    """Largest number of steps in a row that may be skipped because their loss or gradients are not finite, or spike.
    After that the run goes back to the checkpoint before them and stops with an error."""
    max_skipped_share: float = Field(default=0.05, gt=0, le=1)
    """Largest share of skipped steps among the last 1,000; with more the run stops as after max_skipped_steps."""
    spike_threshold: float | None = Field(default=None, gt=0)
    """Skip a step whose loss or gradient norm exceeds the median of the last 128 steps by more than this many standard
    deviations, e.g. 10. The deviation is estimated from the median absolute one, and is at least 1 % of the median.
    null: spikes are not skipped."""
    checksum_every_steps: int | None = Field(default=None, ge=1)
    """Compare the replicas of the state every so many steps, and before each save; a difference stops the run. null:
    never."""
    accept_data_change: bool = False
    """Resume with other data, another tokenizer, seed or batch size than the checkpoint's."""
    heartbeat_seconds: int = Field(default=10, ge=2, le=86_400)
    """Time after which a silent process counts as dead, and the other processes exit."""
    connect_seconds: int = Field(default=300, ge=1, le=86_400)
    """Limit on the time that the processes of a run wait for one another at its start."""
    device_hours_between_failures: float = Field(default=LLAMA3_HOURS, gt=0)
    """Expected device-hours between failures, for the advice on the checkpoint interval."""
