"""Megatron-LM's "tensor first" policy: the least model parallelism that fits, preferring tensor parallelism in a host.

Narayanan et al. 2021 choose the layouts of their Table 1 in this way. It is a policy by itself, because a search for
the smallest modelled time finds other layouts: on paper an interleaved pipeline of small microbatches beats tensor
parallelism in several rows of that table.
"""

import dataclasses
from collections.abc import Callable

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


@dataclasses.dataclass(frozen=True)
class GptJob:
    """A GPT model and its training as Megatron-LM's Table 1 describes them.

    Attributes:
      layers: number of layers.
      hidden: width.
      heads: number of attention heads.
      gpus: number of GPUs.
      batch: sequences of a global batch.
      sequence: tokens of a sequence.
      vocabulary: rows of the embedding.
      layers_of_virtual_stage: layers of a virtual stage of an interleaved pipeline; None: not interleaved.
    """

    layers: int
    hidden: int
    heads: int
    gpus: int
    batch: int
    sequence: int = 2048
    vocabulary: int = 51200
    layers_of_virtual_stage: int | None = None

    def divides(self, tensor: int, pipeline: int) -> bool:
        """Return True if these degrees divide the job's heads, layers, GPUs and batch."""
        model = tensor * pipeline
        replicas = self.gpus // (tensor * pipeline)
        whole = self.heads % tensor == 0 and self.layers % pipeline == 0 and self.gpus % model == 0
        return whole and self.batch % replicas == 0

    def gpu_bytes(self, tensor: int, pipeline: int, state_bytes: int = 20) -> float:
        """Return the bytes that a GPU needs, with full recomputation and one sequence per microbatch.

        Args:
          tensor: degree of tensor parallelism.
          pipeline: degree of pipeline parallelism.
          state_bytes: bytes for each parameter: float16 weight and gradient, float32 gradient, master weight, moments.
        """
        l = self.layers  # noqa: E741
        h = self.hidden
        s = self.sequence
        v = self.vocabulary
        t = tensor
        p = pipeline
        parameters = (12 * l * h**2 / p + v * h) / t + 13 * l * h / p + s * h
        microbatches = self.batch // (self.gpus // (t * p))
        inputs = min(microbatches, p) * (l / p) * 2 * s * h
        piece = self.layers_of_virtual_stage
        if p > 1 and piece and (l // p) % piece == 0:
            inputs *= 1 + (p - 1) / (p * (l // p // piece))
        layer = s * h * (10 + 24 / t) + 5 * self.heads * s**2 / t
        return state_bytes * parameters + inputs + max(layer, 8 * s * v / t if p == 1 else 0.0)

    def layout(self, memory_bytes: float, most_tensor: int = 8) -> tuple[int, int] | None:
        """Return the smallest (tensor, pipeline) degrees that fit the memory, tensor tried first; None if none fit."""

        def fits(tensor: int, pipeline: int) -> bool:
            return self.divides(tensor, pipeline) and self.gpu_bytes(tensor, pipeline) <= memory_bytes

        return tensor_first(fits, most_tensor=most_tensor, most_pipeline=self.layers)


def tensor_first_layout(config: RunConfig, cluster: Cluster) -> Forecast:
    """Return the fastest layout with the smallest tensor and pipeline degrees that fit; remaining devices use `data`.

    Raises:
      ConfigError: no such layout fits the cluster.
    """
    layouts, _ = enumerate_layouts(config, cluster.devices)
    plain = (layouts["fsdp"] == 1) & (layouts["context"] == 1) & (layouts["expert"] == 1)
    layouts = layouts.select(plain)
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
            "to search fsdp, context and expert parallelism too."
        )
    chosen = layouts.select(rows(*found))
    fastest = int(np.argmin(total(model.seconds(chosen))))
    return model.forecasts(chosen.select(np.array([fastest])))[0]
