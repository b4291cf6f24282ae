"""Log-probabilities of exports: how they are compared, and what is said where vLLM fails."""

import sys
from pathlib import Path

import pytest

from benchmarks.compression import vllm_reads


def test_differences_are_those_of_the_tokens():
    row = vllm_reads.compare([-1.0, -2.0], [-1.5, -1.9])
    assert row == {"tokens": 2, "ours": -1.5, "mean": -1.7, "difference": pytest.approx(0.3), "largest": 0.5}


@pytest.mark.parametrize(("python", "said"), [("/bin/false", "it said nothing"), (sys.executable, "vllm")])
def test_a_python_without_vllm_is_told_for_each_checkpoint(python, said):
    folders = [Path("one"), Path("other")]
    found = list(vllm_reads.vllm_scores(python, [1, 2, 3], folders, 60))
    assert [said in one["failed"] for one in found] == [True, True]


def test_every_format_of_compressed_tensors_is_exported():
    from jaxstack.models.huggingface.quantization_config import FORMATS

    assert {"pack-quantized", "int-quantized", "float-quantized"} == set(vllm_reads.FORMATS) & set(FORMATS)
