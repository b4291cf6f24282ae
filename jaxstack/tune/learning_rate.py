"""The learning-rate finder: trains while the learning rate rises exponentially, and picks a rate from the losses."""

import contextlib
import dataclasses
import html
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import optax

from jaxstack.data.build_shards import available_cores
from jaxstack.data.loader import open_data
from jaxstack.errors import ConfigError, JaxstackError, cannot_write
from jaxstack.files import write_file
from jaxstack.observe.report.chart import Point, Scatter, render_scatter
from jaxstack.observe.report.page import page_head, render_tiles
from jaxstack.optim.schedules import Schedule
from jaxstack.run.build import make_trainer, resolve_model
from jaxstack.run.companions import companions
from jaxstack.run.load import start_parameters
from jaxstack.run.memory_check import check_memory
from jaxstack.run.reference import add_references
from jaxstack.run.setting import Setting
from jaxstack.run_config import RunConfig
from jaxstack.trainer import Trainer

_DECAY = 0.98
"""Weight of the past in the moving average of the losses that decides when to stop."""
_NEIGHBOUR = 0.8
"""Weight of a step's loss in the smoothed loss of the step before or after it, from which rates are suggested."""
_DIVERGED = 4.0
"""Multiple of the smallest averaged loss at which the search stops."""
_LEAST_STEPS = 10


@dataclasses.dataclass(frozen=True)
class RateRange:
    """Geometrically spaced learning rates from `low` to `high`, one for each step of the learning-rate finder.

    Raises:
      ConfigError: the range is empty, or has too few steps.
    """

    low: float = 1e-7
    high: float = 1.0
    steps: int = 150

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise ConfigError(f"--low ({self.low}) must be more than 0 and less than --high ({self.high}).")
        if not _LEAST_STEPS <= self.steps <= 100_000:
            raise ConfigError(f"--steps must be from {_LEAST_STEPS} to 100,000; found {self.steps}.")

    def rates(self) -> np.ndarray:
        """Return the learning rate of each step as float64 [steps]."""
        return np.geomspace(self.low, self.high, self.steps)


class ExponentialRise(Schedule):
    """Learning-rate schedule that rises exponentially from `initial_fraction` x peak to the peak."""

    name: Literal["exponential_rise"] = "exponential_rise"
    initial_fraction: float

    def decay(self, steps: int) -> optax.Schedule:
        ratio = self.initial_fraction ** (-1.0 / max(steps - 1, 1))
        return lambda step: self.initial_fraction * ratio ** jax.numpy.asarray(step, jax.numpy.float32)


@dataclasses.dataclass(frozen=True)
class LearningRateResult:
    """Result of the learning-rate finder: the loss at each learning rate, and suggested rates.

    Attributes:
      rates: learning rate of each step that was taken, float64 [steps].
      losses: training loss of each step, float64 [steps].
      averages: losses, limited to that of the first step and averaged over the steps before and after each, float64
        [steps].
      steepest: learning rate at which the average falls fastest over the logarithm of the rate.
      tenth_of_minimum: a tenth of the learning rate with the smallest average.
      page: the written HTML page; None: none was written.
    """

    rates: np.ndarray
    losses: np.ndarray
    averages: np.ndarray
    steepest: float
    tenth_of_minimum: float
    page: Path | None = None

    @property
    def suggestion(self) -> float:
        """The suggested learning rate: geometric mean of the two candidates, `steepest` and `tenth_of_minimum`."""
        return math.sqrt(self.steepest * self.tenth_of_minimum)


def find_learning_rate(
    config: RunConfig, rates: RateRange | None = None, *, report: Callable[[str], None] = print
) -> LearningRateResult:
    """Train a fresh model while the learning rate rises exponentially, and suggest a rate from the losses.

    The warm-up and the schedule of the configuration are not used, its optimizer, batch and data are; checkpoints and
    metrics of the run are not touched. Writes `learning_rate.html` into the run directory.

    Args:
      config: the run's configuration.
      rates: the learning rates to try.
      report: called with each line of progress.

    Raises:
      ConfigError: the configuration cannot run here.
      JaxstackError: the loss is not finite from the first steps on, or never falls.
    """
    rates = rates or RateRange()
    trainer, config = _make_trainer(config, rates, report)
    report(f"{rates.steps} steps with learning rates from {rates.low:g} to {rates.high:g}")
    finding = suggest_rates(rates.rates(), _losses(trainer, rates.steps))
    taken = len(finding.losses)
    if taken < rates.steps:
        report(f"stopped after step {taken}, at {finding.rates[-1]:.3g}: the loss is {_DIVERGED:g} times its minimum")
    page = config.directory / "learning_rate.html"
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_file(page, _render(config, finding).encode(), durable=False)
    except OSError as error:
        raise cannot_write(page, error) from None
    return dataclasses.replace(finding, page=page)


def suggest_rates(rates: Sequence[float] | np.ndarray, losses: Sequence[float] | np.ndarray) -> LearningRateResult:
    """Return learning rates suggested by the losses of a run with rising rate; steps after divergence are ignored.

    Args:
      rates: learning rate of each step, rising.
      losses: loss of each step; may be fewer than the rates, as a search stops early.

    Raises:
      JaxstackError: the averaged loss never falls.
    """
    kept = diverged_at(average(np.asarray(losses, np.float64)))
    found = np.asarray(rates, np.float64)[:kept]
    kept_losses = np.asarray(losses, np.float64)[:kept]
    # Losses are limited to the first one: a steep rise would otherwise distort the averages of the steps before it.
    averages = smooth(np.minimum(kept_losses, kept_losses[:1])) if kept else kept_losses
    lowest = int(np.argmin(averages)) if kept else 0
    if kept < 3 or lowest == 0:
        raise JaxstackError("the loss never falls in this range of learning rates; start from a smaller --low.")
    # The slope is taken where the loss still falls; over the logarithm of the rate, as the steps are.
    slopes = np.gradient(averages[: lowest + 1], np.log(found[: lowest + 1]))
    return LearningRateResult(
        rates=found,
        losses=np.asarray(losses, np.float64)[:kept],
        averages=averages,
        steepest=float(found[int(np.argmin(slopes))]),
        tenth_of_minimum=float(found[lowest] / 10),
    )


def average(losses: np.ndarray, decay: float = _DECAY) -> np.ndarray:
    """Smooth losses by an exponential moving average with bias correction; NaN from the first NaN loss on."""
    mean = 0.0
    averages = []
    for count, loss in enumerate(losses, start=1):
        mean = decay * mean + (1 - decay) * float(loss)
        averages.append(mean / (1 - decay**count))
    return np.array(averages, np.float64)


def smooth(losses: np.ndarray, weight: float = _NEIGHBOUR) -> np.ndarray:
    """Average losses over the steps on both sides, with weights that fall exponentially with the distance.

    A moving average of the past would lag: the loss would seem to fall at larger rates than it does.

    Args:
      losses: loss of each step, float64 [steps].
      weight: weight of a neighbouring step.

    Returns:
      The averages, float64 [steps].
    """

    def decayed_sums(values: np.ndarray) -> np.ndarray:
        return np.array(list(itertools.accumulate(values, lambda total, value: weight * total + value)))

    def both_sides(values: np.ndarray) -> np.ndarray:
        return decayed_sums(values) + decayed_sums(values[::-1])[::-1] - values

    return both_sides(losses) / both_sides(np.ones_like(losses))


def diverged_at(averages: np.ndarray) -> int:
    """Return the number of steps before divergence, where the averaged loss is not finite or far above its minimum."""
    for index, value in enumerate(averages):
        if not math.isfinite(value) or (index and value > _DIVERGED * np.min(averages[:index])):
            return index
    return len(averages)


def _make_trainer(config: RunConfig, rates: RateRange, report: Callable[[str], None]) -> tuple[Trainer, RunConfig]:
    """Return a trainer of a fresh model with a rising learning rate, and the complete configuration."""
    config = Setting.of(config, "train").config
    length = config.train.sequence_length
    seed = config.run.seed
    data = open_data(
        config.data,
        sequence_length=length,
        seed=seed,
        report=report,
        workers=available_cores(),
        mismatched=config.preference.method.mismatched,
    )
    changed = {
        "model": resolve_model(config.model, data.vocab_size),
        "optimizer": config.optimizer.model_copy(update={"learning_rate": rates.high}),
        "schedule": ExponentialRise(initial_fraction=rates.low / rates.high),
        "train": config.train.model_copy(update={"steps": rates.steps}),
    }
    config = config.model_copy(update=changed)
    add_references(config, data, report)
    trainer = make_trainer(config, data)
    check_memory(trainer)
    for companion in companions(config):
        companion.load(trainer, report)
    if config.run.init_from is not None:
        wanted, _ = trainer.start_shapes
        trainer.start_from(start_parameters(config.run.init_from, config.model, wanted, report))
    return trainer, config


def _losses(trainer: Trainer, steps: int) -> list[float]:
    """Train with rising learning rates; return the losses up to the first step that diverges."""
    losses: list[float] = []
    with contextlib.closing(trainer.batches(0)) as batches:
        for _ in range(steps):
            batch, _ = next(batches, (None, 0.0))
            if batch is None:
                raise JaxstackError(f"the data ended after {len(losses)} batches; choose fewer --steps.")
            losses.append(float(trainer.train_step(batch)["loss"]))
            if diverged_at(average(np.array(losses))) < len(losses):
                break
    return losses


def _render(config: RunConfig, finding: LearningRateResult) -> str:
    """Return the HTML page of the result: averaged loss over learning rate, with the suggestions marked."""
    name = f"Learning rates of {config.run.name}"
    marked = {int(np.searchsorted(finding.rates, at)) for at in (finding.steepest, finding.suggestion)}
    points = [
        Point(float(rate), float(loss), f"{rate:.3g}: {loss:.4f}", "second" if index in marked else "first")
        for index, (rate, loss) in enumerate(zip(finding.rates, finding.averages, strict=True))
    ]
    low = float(finding.rates[0])
    high = float(finding.rates[-1])
    chart = Scatter("Averaged training loss over the learning rate", points, low, high, True, joined=True, wide=True)
    tiles = render_tiles(
        [
            ("Try", f"{finding.suggestion:.2g}", "between the two below"),
            ("Steepest descent", f"{finding.steepest:.3g}", ""),
            ("Minimum / 10", f"{finding.tenth_of_minimum:.3g}", ""),
        ]
    )
    figure = f'<div class="charts">{render_scatter(chart)}</div>'
    return f"{page_head(name)}<h1>{html.escape(name)}</h1>{tiles}{figure}</main></body></html>"
