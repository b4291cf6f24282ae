"""Log-probabilities of exports: how they are compared, and what is said where vLLM fails."""

import argparse
import json
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


def test_exports_are_compared_with_what_was_written_with_them(tmp_path, monkeypatch):
    """A row for each recipe; what vLLM cannot read is a row too."""
    for name in ("fp8", "int8"):
        place = tmp_path / "exports" / name
        place.mkdir(parents=True)
        told = {"work": "export of llama 124m", "tokens": [1, 2, 3], "log_probabilities": [-1.0, -2.0]}
        (place / vllm_reads.EXPECTED).write_text(json.dumps(told))

    def scores(python, ids, folders, timeout):
        assert (python, ids, [one.name for one in folders]) == ("vllm-python", [1, 2, 3], ["fp8", "int8"])
        yield {"vllm": "0.26.0", "log_probabilities": [-1.5, -2.0]}
        yield {"vllm": "0.26.0", "failed": "no such format"}

    monkeypatch.setattr(vllm_reads, "vllm_scores", scores)
    args = argparse.Namespace(exports=[tmp_path], vllm="vllm-python", timeout=1)
    read, failed = vllm_reads.measure_exports(args, "a GPU")
    assert (read["work"], read["variant"], read["difference"]) == ("export of llama 124m", "fp8", 0.25)
    assert failed["variant"] == "int8" and failed["failed"] == "no such format" and "difference" not in failed
    with pytest.raises(SystemExit, match=r"has no exports/\*/expected.json"):
        list(vllm_reads.measure_exports(argparse.Namespace(exports=[tmp_path / "exports"]), "a GPU"))
