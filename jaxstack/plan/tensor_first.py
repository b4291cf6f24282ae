"""Megatron-LM's "tensor first" policy: the least model parallelism that fits, preferring tensor parallelism in a host.

Narayanan et al. 2021 choose the layouts of their Table 1 in this way. It is a policy by itself, because a search for
the smallest modelled time finds other layouts: on paper an interleaved pipeline of small microbatches beats tensor
parallelism in several rows of that table.
"""

from collections.abc import Callable, Mapping

import numpy as np

from jaxstack.cost_model.cluster import Cluster
from jaxstack.cost_model.forecast import Forecast, LayoutModel, total
from jaxstack.cost_model.layouts import enumerate_layouts
from jaxstack.errors import ConfigError
from jaxstack.run_config import RunConfig


def tensor_first(fits: Callable[[int, int], bool], *, most_tensor: int, most_pipeline: int) -> tuple[int, int] | None:
    """Return the smallest (tensor, pipeline) parallelism degrees that fit the memory, tensor tried first; None if none.

    Args:
      fits: called with degrees (tensor, pipeline); returns True if they divide the model and fit the memory.
      most_tensor: largest degree of tensor parallelism, the GPUs of a host; degrees are powers of two.
      most_pipeline: largest degree of pipeline parallelism.

    Returns:
      The degrees, or None if none fit.
    """
    degrees = [1 << i for i in range(most_tensor.bit_length()) if 1 << i <= most_tensor]
    candidates = [(tensor, 1) for tensor in degrees]
    # If the largest tensor degree does not divide the heads, the next smaller one is tried with all pipeline degrees.
    candidates += [(degrees[-1], pipeline) for pipeline in range(2, most_pipeline + 1)]
    candidates += [(tensor, pipeline) for tensor in degrees[-2::-1] for pipeline in range(2, most_pipeline + 1)]
    return next((pair for pair in candidates if fits(*pair)), None)


def tensor_first_layout(config: RunConfig, cluster: Cluster, only: Mapping[str, int] | None = None) -> Forecast:
    """Return the fastest layout with the smallest tensor and pipeline degrees that fit; remaining devices use `data`.

    All virtual stages of a pipeline have equally many layers, as Megatron-LM requires.

    Args:
      config: model, batch and settings; its vocabulary must be set.
      cluster: the devices.
      only: restrictions by `parse_restrictions`. Megatron-LM's Table 1 has `zero` 0, `remat` full, `sequence` 0, and a
        given `microbatch_size` and `virtual_stage_layers`; without restrictions a layout with ZeRO, sequence
        parallelism and small microbatches needs smaller degrees.

    Raises:
      ConfigError: no such layout fits the cluster, or `only` asks for another axis.
    """
    plain = {"fsdp": 1, "context": 1, "expert": 1}
    only = only or {}
    if other := next((axis for axis, degree in plain.items() if only.get(axis, degree) != degree), None):
        raise ConfigError(
            f"--policy tensor-first has {other} 1, and --only asks for {other}={only[other]}; leave one of them out."
        )
    layouts, _ = enumerate_layouts(config, cluster.devices, only={**only, **plain})
    layouts = layouts.select(config.model.num_layers % (layouts["pipeline"] * layouts["chunks"]) == 0)
    model = LayoutModel(config, cluster)
    layouts = layouts.select(model.fits(layouts))

    def rows(tensor: int, pipeline: int) -> np.ndarray:
        return (layouts["tensor"] == tensor) & (layouts["pipeline"] == pipeline)

    found = tensor_first(
        lambda tensor, pipeline: bool(rows(tensor, pipeline).any()),
        most_tensor=cluster.gpus_per_host,
        most_pipeline=config.model.num_layers,
    )
    if found is None:
        raise ConfigError(
            f"no layout of tensor, pipeline and data parallelism fits {cluster.title}; leave out --policy tensor-first "
            "to search fsdp, context and expert parallelism too" + (", or --only." if only else ".")
        )
    chosen = layouts.select(rows(*found))
    fastest = int(np.argmin(total(model.seconds(chosen))))
    return model.forecasts(chosen.select(np.array([fastest])))[0]
