"""Learning-rate schedules, which give the fraction of the peak learning rate at each step.

All schedules warm up linearly over `warmup_steps`, from peak / warmup_steps at the first step.
"""

import functools
import operator
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from jaxstack.config.base import Component

Multiplier = Callable[[jax.typing.ArrayLike], jax.Array]
"""Function from a step to a factor of the peak learning rate."""


class Schedule(Component):
    """Base class of learning-rate schedules over a run of a known number of steps."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps of the linear warm-up, part of the run's steps."""

    @abstractmethod
    def decay(self, steps: int) -> optax.Schedule:
        """Return the schedule after warm-up: a function from steps since the warm-up to a fraction of the peak rate.

        Args:
          steps: number of steps from the end of the warm-up to the end of the run.
        """

    def make_multiplier(self, total_steps: int) -> Multiplier:
        """Return the function from step to fraction of the peak learning rate, for a run of `total_steps`.

        The first step is 0; the factor is float32.

        Args:
          total_steps: number of steps of the run.
        """
        warmup = self.warmup_steps
        after = self.decay(max(total_steps - warmup, 1))

        def at(step: jax.typing.ArrayLike) -> jax.Array:
            step = jnp.asarray(step, jnp.float32)
            rising = (step + 1) / max(warmup, 1)
            return jnp.where(step < warmup, rising, after(jnp.maximum(step - warmup, 0))).astype(jnp.float32)

        return at


class Constant(Schedule):
    """Constant schedule: the peak learning rate throughout."""

    name: Literal["constant"] = "constant"

    def decay(self, steps: int) -> optax.Schedule:
        return optax.constant_schedule(1.0)


class Linear(Schedule):
    """Linear decay from the peak to final_fraction of it."""

    name: Literal["linear"] = "linear"
    final_fraction: float = Field(default=0.0, ge=0)

    def decay(self, steps: int) -> optax.Schedule:
        return optax.linear_schedule(1.0, self.final_fraction, steps)


class Cosine(Schedule):
    """Cosine decay from the peak to final_fraction of it (Loshchilov & Hutter 2017)."""

    name: Literal["cosine"] = "cosine"
    final_fraction: float = Field(default=0.1, ge=0)

    def decay(self, steps: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(1.0, steps, alpha=self.final_fraction)


class Cooled(Schedule):
    """Base class of schedules that end with a decay over the last steps, beside the fall that they have before it.

    Before the decay the rate does not depend on the length of the run, so a run can be made longer, and a decay can
    begin at any kept checkpoint (`run.branch_from`).
    """

    decay_fraction: float = Field(default=0.0, ge=0, le=1)
    """Length of the decay as a fraction of the steps after the warm-up; 0: no decay."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Length of the decay in steps, in place of decay_fraction."""
    final_fraction: float = Field(default=0.0, ge=0)
    """Factor at the end of the decay, of the rate that the schedule would have without it."""
    shape: Literal["linear", "sqrt"] = "linear"
    """`sqrt`: 1 - sqrt(progress), which Haegele et al. 2024 found to be better."""

    @abstractmethod
    def before_decay(self, step: jax.Array) -> jax.Array:
        """Return the fraction of the peak without the decay, at float32 steps since the warm-up."""

    def decay(self, steps: int) -> optax.Schedule:
        wanted = round(steps * self.decay_fraction) if self.decay_steps is None else self.decay_steps
        length = min(max(wanted, 1), steps) if self.decay_steps or self.decay_fraction else 0

        def at(step: jax.typing.ArrayLike) -> jax.Array:
            step = jnp.asarray(step, jnp.float32)
            if not length:
                return self.before_decay(step)
            progress = jnp.clip((step - (steps - length)) / length, 0.0, 1.0)
            fall = 1 - (jnp.sqrt(progress) if self.shape == "sqrt" else progress)
            return self.before_decay(step) * (self.final_fraction + (1 - self.final_fraction) * fall)

        return at


class WarmupStableDecay(Cooled):
    """Warmup-stable-decay (WSD, Hu et al. 2024): the peak rate, then a decay over the last steps of the run."""

    name: Literal["wsd"] = "wsd"
    decay_fraction: float = Field(default=0.2, gt=0, le=1)

    def before_decay(self, step: jax.Array) -> jax.Array:
        return jnp.ones_like(step)


class OneCycle(Schedule):
    """The one-cycle schedule (Smith & Topin 2018): a cosine rise over rise_fraction of the run, then a cosine decay."""

    name: Literal["one_cycle"] = "one_cycle"
    rise_fraction: float = Field(default=0.3, gt=0, lt=1)
    initial_divisor: float = Field(default=25.0, ge=1)
    final_divisor: float = Field(default=1e4, ge=1)
    """Ratio of the first learning rate to the last."""

    def decay(self, steps: int) -> optax.Schedule:
        return optax.cosine_onecycle_schedule(steps, 1.0, self.rise_fraction, self.initial_divisor, self.final_divisor)


class InverseSqrt(Cooled):
    """Inverse square-root decay: peak x sqrt(timescale / (timescale + step)) (Vaswani et al. 2017).

    Zhai et al. 2021 take a timescale that is much longer than the warm-up, and a decay at the end, for which
    `decay_fraction` or `decay_steps` asks.
    """

    name: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale: int | None = Field(default=None, ge=1)
    """Default: warmup_steps, or 1 without a warm-up."""

    def before_decay(self, step: jax.Array) -> jax.Array:
        scale = float(self.timescale or max(self.warmup_steps, 1))
        return jnp.sqrt(scale / (scale + step))


SCHEDULES = (Cosine, Constant, Linear, WarmupStableDecay, OneCycle, InverseSqrt)
"""Every schedule that `schedule.name` can choose. A new one is added here."""

if TYPE_CHECKING:
    AnySchedule: TypeAlias = Schedule
else:
    AnySchedule = Annotated[functools.reduce(operator.or_, SCHEDULES), Field(discriminator="name")]
