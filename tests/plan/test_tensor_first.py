"""Megatron-LM's published layouts, by the policy that tries tensor parallelism first."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxstack.cost_model.cluster import parse_cluster
from jaxstack.plan.tensor_first import tensor_first, tensor_first_layout
from jaxstack.run_config import load_config


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


TABLE = json.loads((Path(__file__).parent / "data" / "megatron_table1.json").read_text())["rows"]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['params_b']}B")
def test_layouts_of_megatrons_table_1(row):
    names = ("layers", "hidden", "heads", "gpus", "batch", "layers_of_virtual_stage")
    job = GptJob(**{name: row[name] for name in names})
    assert job.layout(68e9) == (row["t"], row["p"])


def test_parameters_are_those_of_the_table():
    for row in TABLE:
        job = GptJob(row["layers"], row["hidden"], row["heads"], row["gpus"], row["batch"])
        state = job.gpu_bytes(1, 1, 1) - job.gpu_bytes(1, 1, 0)
        assert state / 1e9 == pytest.approx(row["params_b"], rel=0.03)


def test_tensor_degrees_come_before_pipelines():
    assert tensor_first(lambda t, p: t * p >= 4, most_tensor=8, most_pipeline=64) == (4, 1)
    assert tensor_first(lambda t, p: t * p >= 24, most_tensor=8, most_pipeline=64) == (8, 3)
    assert tensor_first(lambda t, p: t <= 2 and t * p >= 6, most_tensor=8, most_pipeline=64) == (2, 3)
    assert tensor_first(lambda t, p: False, most_tensor=8, most_pipeline=4) is None


def test_policy_on_the_trainers_own_layouts():
    config = load_config(None, ["model.preset=llama3-8b", "train.global_batch_size=16", "train.sequence_length=4096"])
    small = tensor_first_layout(config, parse_cluster("1 x 8 h200")).config.parallel
    assert (small.tensor, small.pipeline, small.data) == (1, 1, 8)
    tight = parse_cluster("1 x 8 h200").model_copy(update={"memory_bytes": 2**35})
    degrees = tensor_first_layout(config, tight).config.parallel
    assert degrees.tensor > 1 and degrees.pipeline == 1 and degrees.fsdp == 1
