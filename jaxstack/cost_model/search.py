"""Searches for the fastest layout of a configuration on a cluster: list layouts, drop invalid ones, predict, rank."""

import collections
import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from jaxstack.cost_model.cluster import Cluster, part_of
from jaxstack.cost_model.forecast import Forecast, LayoutModel, total
from jaxstack.cost_model.layouts import ON_DEVICE, Floats, LayoutTable, enumerate_layouts
from jaxstack.cost_model.memory import PARTS
from jaxstack.errors import ConfigError
from jaxstack.observe.number_format import byte_size
from jaxstack.run_config import RunConfig

_MORE_DEVICES = (2, 4, 8, 16, 32, 64)
"""Factors of the number of devices that are tried for a model that does not fit."""
_COMMON_HOST = 8
"""GPUs that a host with fewer is assumed to have room for."""
_COUNTS_TRIED = 64
"""Smaller numbers of devices that are tried if no layout has the given number."""


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Result of a layout search: the fastest layouts, ranked, and how many others were tried or refused.

    Attributes:
      forecasts: the fastest layouts that fit, fastest first.
      tried: number of layouts that pass the trainer's rules.
      fitting: number of those that fit the memory.
      refused: rule or part of the memory -> number of layouts that it refused.
      seconds: duration of the search.
    """

    forecasts: Sequence[Forecast]
    tried: int
    fitting: int
    refused: collections.Counter[str]
    seconds: float

    @property
    def best(self) -> Forecast:
        """The layout with the fastest predicted step."""
        return self.forecasts[0]


def search_layouts(
    config: RunConfig,
    cluster: Cluster,
    *,
    top: int = 10,
    recipes: Sequence[str] | None = None,
    only: Mapping[str, int] | None = None,
) -> SearchResult:
    """Return the layouts of a configuration with the fastest predicted steps, among those that fit a cluster's memory.

    Tries all degrees of parallelism, ZeRO stages, pipeline schedules, numbers of microbatches and rematerialisation
    policies. The global batch, the model and everything else stay those of the configuration.

    Args:
      config: model, batch and settings; its vocabulary must be set.
      cluster: the devices.
      top: number of layouts to return.
      recipes: values of `precision.fp8` to try; default: the configuration's.
      only: settings of which a single value is tried, by `parse_restrictions`.

    Raises:
      ConfigError: no layout passes the rules, or none fits; the message names the nearest way out.
    """
    began = time.perf_counter()
    remats = tuple(dict.fromkeys((*ON_DEVICE, config.model.remat)))
    layouts, refused = enumerate_layouts(config, cluster.devices, remats, recipes, only)
    if not len(layouts):
        if only:
            _refuse_restrictions(config, cluster, only, refused)
        rules = "; ".join(f"{rule} ({count:,} layouts)" for rule, count in refused.most_common(3))
        raise ConfigError(
            f"no layout of this model and batch has {cluster.devices} devices: {rules}. Change train.global_batch_size "
            f"({config.train.global_batch_size}) to a multiple of {cluster.devices}, or use another number of devices"
            f"{_nearest_count(config, cluster.devices)}."
        )
    model = LayoutModel(config, cluster)
    memory = model.memory(layouts)
    fits = total(memory) <= model.usable_bytes
    if not fits.any():
        raise ConfigError(_nothing_fits(model, layouts, memory))
    refused.update(_largest_parts(layouts.select(~fits), {name: part[~fits] for name, part in memory.items()}))
    fitting = layouts.select(fits)
    order = _ranking(fitting, total(model.seconds(fitting)))[:top]
    found = model.forecasts(fitting.select(order))
    return SearchResult(found, len(layouts), len(fitting), refused, time.perf_counter() - began)


def _refuse_restrictions(
    config: RunConfig, cluster: Cluster, only: Mapping[str, int], refused: collections.Counter[str]
) -> None:
    """Raise ConfigError if the restrictions of a search are what leaves no layout."""
    if len(enumerate_layouts(config, cluster.devices, ("full",))[0]):
        rules = "; ".join(f"{rule} ({count:,} layouts)" for rule, count in refused.most_common(3))
        raise ConfigError(
            f"no layout of {cluster.devices} devices has what --only asks for ({', '.join(only)})"
            + (f": {rules}" if rules else "")
            + ". Leave a part of it out."
        )


def _ranking(layouts: LayoutTable, seconds: Floats) -> np.ndarray:
    """Return the layouts' row numbers sorted from fastest to slowest; of equally fast ones, the simpler comes first.

    Times that differ by less than a thousandth count as equal.
    """
    rounded = np.round(np.log(seconds), 3)
    axes = sum((layouts[axis] > 1).astype(int) for axis in ("pipeline", "tensor", "context", "expert", "fsdp"))
    return np.lexsort((seconds, layouts["remat"], layouts["zero"], axes, rounded))


def _largest_parts(layouts: LayoutTable, memory: dict[str, Floats]) -> collections.Counter[str]:
    """Count layouts that do not fit the memory, by what takes most of it (weights, activations, ...)."""
    if not len(layouts):
        return collections.Counter()
    largest = np.argmax(np.stack([memory[name] for name in PARTS]), axis=0)
    counts = np.bincount(largest, minlength=len(PARTS))
    named = zip(PARTS, counts, strict=True)
    return collections.Counter({f"memory, most of it {name.replace('_', ' ')}": int(n) for name, n in named if n})


def _nothing_fits(model: LayoutModel, layouts: LayoutTable, memory: dict[str, Floats]) -> str:
    """Return the error message for a model that fits the cluster in no layout, with a suggestion."""
    sizes = total(memory)
    row = int(np.argmin(sizes))
    parts = sorted(((float(memory[name][row]), name) for name in PARTS), reverse=True)[:2]
    shown = ", ".join(f"{byte_size(size)} of {name.replace('_', ' ')}" for size, name in parts)
    smallest = describe_degrees(layouts.configuration(row, model.config))
    return (
        f"no layout of this model fits {model.cluster.title}: the smallest ({smallest}) needs "
        f"{byte_size(sizes[row])} on each GPU ({shown}), and {byte_size(model.usable_bytes)} are usable. "
        f"{_suggest_cluster(model)}"
    )


def _nearest_count(config: RunConfig, devices: int) -> str:
    """Return a clause for an error message that names the next smaller usable number of devices, if one is near."""
    for count in range(devices - 1, max(devices - 1 - _COUNTS_TRIED, 0), -1):
        if len(enumerate_layouts(config, count, ("full",))[0]):
            return f"; {count} would do"
    return ""


def faster_part(config: RunConfig, best: Forecast) -> Forecast | None:
    """Return the fastest layout on a part of the cluster if it beats the best layout on all devices, else None.

    A batch that is small for the cluster trains faster on fewer devices, which communicate less. Parts whose number of
    devices is a power of two are tried if communication and pipeline bubble take more than half of the step.

    Args:
      config: model, batch and settings; its vocabulary must be set.
      best: the fastest layout of the whole cluster.
    """
    idle = best.seconds["exposed_communication"] + best.seconds["bubble"]
    if idle <= best.step_seconds / 2:
        return None
    found = []
    for power in range((best.cluster.devices - 1).bit_length()):
        try:
            found.append(search_layouts(config, part_of(best.cluster, 1 << power), top=1).best)
        except ConfigError:
            continue
    fastest = min(found, key=lambda forecast: forecast.step_seconds, default=None)
    return fastest if fastest is not None and fastest.step_seconds < best.step_seconds else None


def _suggest_cluster(model: LayoutModel) -> str:
    """Return a sentence that suggests the smallest cluster of these GPUs that would fit, or a smaller model."""
    cluster = model.cluster
    config = model.config
    for factor in _MORE_DEVICES:
        larger = _enlarged(cluster, factor)
        layouts, _ = enumerate_layouts(config, larger.devices, ("full",))
        if len(layouts) and model.fits(layouts).any():
            return f"It fits {larger.title}."
    return (
        "No larger number of these GPUs helps, as the batch is too small to be split further: lower "
        "train.sequence_length or the model's size, raise train.global_batch_size, or use GPUs with more memory."
    )


def _enlarged(cluster: Cluster, factor: int) -> Cluster:
    """Return a cluster with `factor` times as many devices: one host is filled first, then hosts are added."""
    if cluster.hosts == 1 and cluster.gpus_per_host * factor <= _COMMON_HOST:
        return cluster.model_copy(update={"gpus_per_host": cluster.gpus_per_host * factor})
    devices = cluster.devices * factor
    filled = _COMMON_HOST if cluster.hosts == 1 and devices % _COMMON_HOST == 0 else 1
    per_host = max(cluster.gpus_per_host, filled)
    return cluster.model_copy(update={"hosts": devices // per_host, "gpus_per_host": per_host})


def describe_degrees(config: RunConfig) -> str:
    """Return the layout of a configuration in one line, such as `fsdp 4 x tensor 2, remat full, microbatches 4`."""
    parallel = config.parallel
    degrees = " x ".join(f"{axis} {degree}" for axis, degree in parallel.degrees.items() if degree > 1)
    parts = [degrees or "one device"]
    parts += [f"zero {parallel.zero}"] if parallel.zero else []
    if parallel.pipeline > 1:
        chunks = f" of {parallel.virtual_stages} virtual stages" if parallel.virtual_stages > 1 else ""
        parts += [f"{parallel.schedule}{chunks}", f"{parallel.microbatches} microbatches"]
    elif config.train.gradient_accumulation > 1:
        parts += [f"{config.train.gradient_accumulation} microbatches"]
    parts += [f"remat {config.model.remat}"] if config.model.remat != "none" else []
    if config.precision.fp8 != "none":
        parts += [f"FP8 {config.precision.fp8}"]
    return ", ".join(parts)
