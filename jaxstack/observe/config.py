"""Configuration of what a run records and shows: metrics, trackers, profile and progress."""

from typing import Literal

from pydantic import Field, model_validator

from jaxstack.config.base import Component
from jaxstack.config.features import Excludes, Feature


class ObserveConfig(Component):
    """Configuration of what a run records and shows: metrics, trackers, profile and progress (section `observe`)."""

    log_every: int = Field(default=10, ge=1)
    """Number of steps between two logged lines; throughput is the mean over them."""
    trackers: tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow"], ...] = ("jsonl", "tensorboard")
    """Destinations of the metrics: `metrics.jsonl`, `tensorboard/`, Weights & Biases, MLflow."""
    profile_steps: tuple[int, int] | None = None
    """First and last step of a `jax.profiler` trace, written to `profile/` in the run directory, with the memory of the
    devices after the last step."""
    fail_on_fallback: bool = False
    """Raise an error if XLA computes an operation on a GPU because the kernel for it cannot."""
    progress: bool = True
    """Print the progress: a live line on a terminal, plain lines elsewhere."""
    noise_scale: bool = False
    """Measure the gradient noise scale, the batch size in tokens above which larger batches save few steps, from the
    microbatches of each step; needs train.gradient_accumulation of at least 2."""
    pue: float = Field(default=1.0, ge=1, le=10)
    """Power usage effectiveness of the data centre: its energy over that of the GPUs. It multiplies `energy_kwh`."""
    price_per_gpu_hour: float | None = Field(default=None, ge=0)
    """Price of one hour of one GPU, in any currency, for the metric `cost`. Default: no cost is logged."""

    @model_validator(mode="after")
    def _check(self) -> "ObserveConfig":
        if len(set(self.trackers)) != len(self.trackers):
            raise ValueError(f"trackers names one tracker twice: {', '.join(self.trackers)}; name each once")
        if self.profile_steps is not None:
            first, last = self.profile_steps
            if not 1 <= first <= last:
                raise ValueError(
                    f"profile_steps must be [first, last] with 1 <= first <= last, not [{first}, {last}]; "
                    "steps are counted from 1, e.g. [10, 12]"
                )
        return self


FEATURES = (
    Feature(
        "gradient noise scale",
        "observe",
        lambda observe: observe.noise_scale,
        ("observe.noise_scale=true", "train.gradient_accumulation=4"),
        excludes=tuple(
            Excludes(
                other,
                reason,
                f"observe.noise_scale does not support parallel.{axis}={{parallel.{axis}}}; set parallel.{axis}=1 or "
                "observe.noise_scale=false.",
            )
            for other, axis, reason in (
                ("pipeline", "pipeline", "a stage sees the gradients of its own layers only"),
                ("context parallelism", "context", "a device sees a part of each sequence's gradient only"),
            )
        ),
    ),
)
"""Features of what a run records, see `jaxstack.config.features`."""
