"""Forecasts for layouts: memory, step time, throughput, and time, cost and energy of a training run."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jaxstack.cost_model.cluster import Cluster, Efficiency, load_efficiency
from jaxstack.cost_model.layouts import Floats, LayoutTable, count_tokens, layout_table_of
from jaxstack.cost_model.memory import PackedSize, memory_parts
from jaxstack.cost_model.model_shape import ModelShape, adapter_share, model_shape, optimizer_bytes, trained_share
from jaxstack.cost_model.step_time import StepModel
from jaxstack.distributed.device_setup import DEVICE_FRACTION
from jaxstack.models.count import mixer_flops_per_token, model_flops_per_token
from jaxstack.run_config import RunConfig

MARGIN = 0.95
"""Share of the usable memory that a predicted layout may take; the rest is for the formulas' error."""
CHINCHILLA_TOKENS = 20
"""Training tokens for each parameter at which a budget of FLOPs is used best (Hoffmann et al. 2022)."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Predicted memory, step time and throughput of one layout on one cluster.

    Attributes:
      config: the configuration, with the layout's degrees.
      cluster: the devices.
      memory: bytes on each device by part.
      seconds: seconds of a step by part.
    """

    config: RunConfig
    cluster: Cluster
    memory: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def memory_bytes(self) -> float:
        """Predicted memory on each device, in bytes."""
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> float:
        """Predicted time of a train step, in seconds."""
        return sum(self.seconds.values())

    @property
    def devices(self) -> int:
        """Number of devices that the layout uses."""
        return math.prod(self.config.parallel.degrees.values())

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens per second of all devices together."""
        return count_tokens(self.config) / self.step_seconds

    @property
    def mfu(self) -> float:
        """Predicted MFU, from 0 to 1: model FLOP/s divided by the dense bfloat16 peak (for FP8 runs as well)."""
        flops = model_flops_per_token(self.config.model, self.config.train.sequence_length)
        return self.tokens_per_second * flops / self.devices / (1e12 * self.cluster.peak_tflops.bfloat16)

    def describe(self) -> dict[str, object]:
        """Return the forecast as plain JSON, for `environment.json` and `--json`."""
        return {
            "cluster": self.cluster.title,
            "step_seconds": self.step_seconds,
            "seconds": dict(self.seconds),
            "predicted_bytes": self.memory_bytes,
            "memory_bytes": dict(self.memory),
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
        }


@dataclasses.dataclass(frozen=True)
class TrainingBudget:
    """Predicted time, cost and energy of training on a number of tokens.

    Attributes:
      tokens: number of tokens.
      days: days of the whole cluster.
      gpu_hours: hours of all GPUs together.
      cost: in the currency of the cluster's price; None without a price.
      kilowatt_hours: energy of the GPUs, without the rest of the data center.
    """

    tokens: float
    days: float
    gpu_hours: float
    cost: float | None
    kilowatt_hours: float


def training_budget(forecast: Forecast, tokens: float) -> TrainingBudget:
    """Return time, cost and energy of training on `tokens` at the predicted speed, without interruptions."""
    hours = tokens / forecast.tokens_per_second / 3600
    gpu_hours = hours * forecast.devices
    price = forecast.cluster.price_per_gpu_hour
    energy = gpu_hours * forecast.cluster.watts / 1000
    return TrainingBudget(tokens, hours / 24, gpu_hours, None if price is None else gpu_hours * price, energy)


def compute_optimal(flops: float) -> tuple[float, float]:
    """Return the compute-optimal (parameters, tokens) for `flops`: C = 6 N D with D = 20 N (Hoffmann et al. 2022)."""
    parameters = math.sqrt(flops / (6 * CHINCHILLA_TOKENS))
    return parameters, CHINCHILLA_TOKENS * parameters


def total(parts: Mapping[str, Floats]) -> Floats:
    """Return the total memory or time of each layout: the sum of its predicted parts."""
    return np.sum(np.stack(list(parts.values())), axis=0)


def _wide_ends(config: RunConfig) -> tuple[int, int]:
    """Return how many layers FP8 leaves in bfloat16 without a pipeline, and with one (see `models.low_precision`)."""
    model = config.model
    if model.num_layers < 3 or any(rule.fp8 for rule in config.precision.fp8_rules):
        return 0, 0
    # With FP8, training takes the first and the last layer out of the scan unless the configuration has a number.
    given = "unscanned_end_layers" in model.model_fields_set
    plain = not model.scan_layers or not given or model.end_layers > 0
    return 2 * plain, 2 * (model.end_layers > 0)


class LayoutModel:
    """Predicts memory and step time for any layouts of one configuration on one cluster.

    Args:
      config: model, batch and settings; its vocabulary must be set. Degrees are ignored.
      cluster: the devices.
      efficiency: measured rates; default: those of the installed `efficiency.json`.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, efficiency: Efficiency | None = None):
        self.config = config
        self.cluster = cluster
        self.shape: ModelShape = model_shape(config.model)
        self.optimizer_bytes = optimizer_bytes(config.optimizer, self.shape)
        length = config.train.sequence_length
        trained = trained_share(config.optimizer, config.adapters, self.shape)
        self.time = StepModel(
            shape=self.shape,
            cluster=cluster,
            efficiency=efficiency or load_efficiency(),
            tokens=count_tokens(config),
            length=length,
            attention_flops=mixer_flops_per_token(config.model, length),
            optimizer_bytes=self.optimizer_bytes,
            trained=trained,
            reduce_bytes=trained * (2 if config.precision.reduce == "bfloat16" else 4),
            rotates=bool(config.model.rotations()),
            scanned=config.model.scan_layers,
            wide_ends=_wide_ends(config),
            prefetch=config.parallel.prefetch,
            copies=config.parallel.copy_engines != "never",
            context_method=config.parallel.context_method,
            reference=config.reference is not None,
        )

    @property
    def _has_second_model(self) -> bool:
        """True if a reference is in memory that is not the model without its adapters."""
        reference = self.config.reference
        return reference is not None and not (reference[1] == "init_from" and self.config.trains_adapters_only)

    @property
    def usable_bytes(self) -> float:
        """Device memory in bytes that a layout's predicted memory must not exceed."""
        return MARGIN * DEVICE_FRACTION * self.cluster.memory_bytes

    def memory(self, layouts: LayoutTable) -> dict[str, Floats]:
        """Return the predicted bytes on each device for each layout, by part (weights, gradients, activations, ...)."""
        return memory_parts(
            self.shape,
            layouts,
            tokens=self.time.tokens,
            optimizer_bytes=self.optimizer_bytes,
            scanned=self.time.scanned,
            prefetch=self.time.prefetch,
            trained=self.time.trained,
            adapters=adapter_share(self.config.adapters, self.shape),
            reference=self._has_second_model,
            packed=PackedSize.of(self.config.packed_base()),
        )

    def fits(self, layouts: LayoutTable) -> np.ndarray:
        """Return a mask [layouts]: True where the predicted memory fits a device."""
        return total(self.memory(layouts)) <= self.usable_bytes

    def seconds(self, layouts: LayoutTable) -> dict[str, Floats]:
        """Return the predicted seconds of a step for each layout, by part (matmuls, attention, communication, ...)."""
        return self.time.parts(layouts)

    def forecasts(self, layouts: LayoutTable) -> list[Forecast]:
        """Return a forecast of memory, step time and throughput for each layout."""
        memory = self.memory(layouts)
        seconds = self.seconds(layouts)
        return [
            Forecast(
                layouts.configuration(row, self.config),
                self.cluster,
                {name: float(values[row]) for name, values in memory.items()},
                {name: float(values[row]) for name, values in seconds.items()},
            )
            for row in range(len(layouts))
        ]


def forecast(config: RunConfig, cluster: Cluster) -> Forecast:
    """Predict memory and step time of a configuration on a cluster; its degrees and vocabulary must be set."""
    (found,) = LayoutModel(config, cluster).forecasts(layout_table_of(config))
    return dataclasses.replace(found, config=config)
