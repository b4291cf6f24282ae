"""Arithmetic intensity of operators: published values, and sums that agree with the model FLOPs of a run."""

import dataclasses
import json
import xml.etree.ElementTree as ElementTree

import pytest

from jaxstack.cost_model.roofline import OperatorCost, Workload, describe_operators, find_peak, model_operators
from jaxstack.models import model_flops_per_token, preset_config
from jaxstack.models.config import ModelConfig
from jaxstack.observe.report.page import write_report
from jaxstack.observe.report.roofline import draw_roofline, render_roofline
from jaxstack.plan.__main__ import main


def total_flops(operators: list[OperatorCost]) -> float:
    """Return the total FLOPs of a list of operators, over all their calls."""
    return sum(one.flops * one.calls for one in operators)


def total_bytes(operators: list[OperatorCost]) -> float:
    """Return the total bytes of memory traffic of a list of operators, over all their calls."""
    return sum(one.bytes * one.calls for one in operators)


def total_intensity(operators: list[OperatorCost]) -> float:
    """Return the arithmetic intensity of a list of operators taken together, in FLOPs per byte."""
    return total_flops(operators) / total_bytes(operators)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Shape of a Transformer with heads of equal width and a plain feed-forward sublayer."""

    layers: int
    width: int
    heads: int
    feed_forward: int
    activation_width: int | None = None
    """Width of the feed-forward activations, where a published count has another one than of the matrices."""


BERT_BASE = Architecture(12, 768, 12, 3072)
BERT_LARGE = Architecture(24, 1024, 16, 4096)
BERT_LARGE_AS_PUBLISHED = Architecture(24, 1024, 16, 3584, 4096)
"""The shape whose counts agree with the paper's for BERT-large within 1 %. The model itself has 8 % more operations:
the paper's count has matrices of 3584 columns."""
GPT2 = Architecture(12, 768, 12, 3072)


def encoder_operators(model: Architecture, tokens: int) -> list[OperatorCost]:
    """Return FLOPs and bytes of an encoder's forward pass over `tokens` tokens at batch size 1, in four groups."""
    n = tokens
    d = model.width
    h = model.heads
    f = model.feed_forward
    layers = model.layers
    head = d // h
    scores = n * n * h
    wide = n * (model.activation_width or f)
    parts = [
        ("projections", "matmul", 8 * n * d * d, 4 * d * d + 8 * n * d),
        ("attention", "attention", scores * (2 * head - 1) + n * d * (2 * n - 1), 4 * n * d + 2 * scores),
        ("feed-forward", "matmul", 4 * n * d * f, 2 * d * f + 2 * n * d + 2 * wide),
        ("other", "elementwise", 4 * scores + 6 * n * d + 13 * n * f, 2 * scores + 9 * n * d + 2 * wide),
    ]
    return [OperatorCost(name, kind, float(flops), float(size), layers) for name, kind, flops, size in parts]


def decoder_operators(model: Architecture, tokens: int) -> list[OperatorCost]:
    """Return FLOPs and bytes of generating `tokens` tokens with a KV cache at batch size 1, by kind of operation.

    The feed-forward sublayer is four times as wide as the model. Softmax and norms are in "other".
    """
    n = tokens
    d = model.width
    h = model.heads
    layers = model.layers
    cached = n * (n + 1) // 2  # sum of the lengths that the steps attend to
    parts = [
        ("matrices", "matmul", 24 * d * d * n, (12 * d * d + 18 * d) * n),
        ("attention", "attention", 4 * d * cached, 2 * (d + h) * cached),
        ("other", "elementwise", 4 * h * cached + 58 * d * n, 2 * h * cached + 17 * d * n),
    ]
    return [OperatorCost(name, kind, float(flops), float(size), layers) for name, kind, flops, size in parts]


LENGTHS = (128, 256, 512, 1024, 2048, 4096)


# Kim et al. 2023 (arXiv:2302.14017): GFLOPs, and FLOPs per byte at one byte per value.
@pytest.mark.parametrize(
    ("model", "gflops", "intensity"),
    [
        (BERT_BASE, (22, 46, 97, 214, 505, 1324), (160, 215, 231, 202, 156, 117)),
        (BERT_LARGE_AS_PUBLISHED, (73, 149, 310, 673, 1554, 3942), (171, 239, 266, 235, 179, 131)),
    ],
)
def test_encoders_as_published(model, gflops, intensity):
    for tokens, flops, per_byte in zip(LENGTHS, gflops, intensity, strict=True):
        operators = encoder_operators(model, tokens)
        assert abs(total_flops(operators) / 1e9 - flops) <= max(0.5, 0.01 * flops)
        assert total_intensity(operators) == pytest.approx(per_byte, rel=0.01)


def test_bert_base_by_group_as_published():
    """Kim et al. 2023, at 512 tokens: GFLOPs and FLOPs per byte of each group."""
    published = [(28.99, 438.86), (9.62, 101.95), (57.98, 558.54), (0.42, 2.73)]
    for operator, (gflops, intensity) in zip(encoder_operators(BERT_BASE, 512), published, strict=True):
        assert operator.flops * operator.calls / 1e9 == pytest.approx(gflops, rel=0.01, abs=0.005)
        assert operator.intensity == pytest.approx(intensity, rel=0.01)


def test_gpt2_decoding_as_published():
    published = zip(LENGTHS, (22, 45, 92, 194, 428, 1012), (11.1, 22.5, 46.2, 97.3, 214.3, 507.8), strict=True)
    for tokens, gflops, gigabytes in published:
        operators = decoder_operators(GPT2, tokens)
        assert abs(total_flops(operators) / 1e9 - gflops) <= max(0.5, 0.01 * gflops)
        assert total_bytes(operators) / 1e9 == pytest.approx(gigabytes, rel=0.01)
        assert total_intensity(operators) == pytest.approx(2.0, rel=0.01)


def test_bert_large_itself_has_more_operations_than_the_published_count():
    own, published = (total_flops(encoder_operators(m, 512)) for m in (BERT_LARGE, BERT_LARGE_AS_PUBLISHED))
    assert own / published == pytest.approx(1.083, abs=0.002)


@pytest.mark.parametrize(
    "model",
    [
        preset_config("llama3-8b"),
        preset_config("gpt2-124m"),
        preset_config("qwen3-30b-a3b"),
        preset_config("gemma2-2b"),
        ModelConfig(vocab_size=512, num_layers=3, mlp="plain", tie_word_embeddings=True),
    ],
    ids=lambda model: model.preset or "plain",
)
def test_matmuls_and_attention_are_the_model_flops(model):
    work = Workload(rows=2, length=1024, microbatches=3)
    operators = [one for one in model_operators(model, work) if one.kind in ("matmul", "attention")]
    assert total_flops(operators) == pytest.approx(model_flops_per_token(model, 1024) * 2 * 1024 * 3, rel=1e-9)


def test_devices_share_the_work():
    """The matmuls and attention of 2 x 4 devices, each with its part, are those of one device."""
    model = preset_config("llama3-8b")
    whole = total_flops(model_operators(model, Workload(rows=4, length=4096)))
    part = total_flops(model_operators(model, Workload(rows=4, length=4096, context=2, tensor=4, optimizer_shards=8)))
    assert 8 * part == pytest.approx(whole, rel=1e-3)


def test_smaller_microbatches_have_lower_intensity():
    model = preset_config("llama3-8b")
    large, small = (
        {one.name: one.intensity for one in model_operators(model, Workload(rows=rows, length=128))} for rows in (8, 1)
    )
    assert all(small[name] <= large[name] for name in large)
    assert small["feed-forward, down"] < 0.5 * large["feed-forward, down"]


def test_time_on_the_roofline():
    compute = OperatorCost("a", "matmul", 2e12, 1e9, 3)
    memory = OperatorCost("b", "elementwise", 1e9, 2e12)
    assert compute.seconds(1e12, 1e12) == 6 and memory.seconds(1e12, 1e12) == 2
    assert total_bytes([compute, memory]) == 2.003e12


@pytest.mark.parametrize(
    ("kind", "tflops", "gigabytes"),
    [("NVIDIA H200", 989, 4800), ("h100", 989, 3350), ("NVIDIA A100-SXM4-80GB", 312, 2039), ("NVIDIA L40S", 362, 864)],
)
def test_peak_rates(kind, tflops, gigabytes):
    peak = find_peak(kind)
    assert peak is not None and (peak.flops, peak.bandwidth) == (tflops * 1e12, gigabytes * 1e9)


def test_no_peak_rates_of_a_cpu():
    assert find_peak("cpu") is None


@pytest.mark.longer
def test_picture_stands_alone(tmp_path, capsys):
    picture = tmp_path / "roofline.svg"
    assert main(["--config", "configs/llama3-8b-fsdp4.yaml", "--roofline", str(picture)]) == 0
    root = ElementTree.fromstring(picture.read_text())
    circles = [one for one in root.iter("{http://www.w3.org/2000/svg}g")]
    assert root.tag.endswith("svg") and len(circles) == 13
    printed = capsys.readouterr().out
    assert "feed-forward, gate and up" in printed and "limited by memory below 206 FLOP/byte" in printed


@pytest.mark.exhaustive
def test_a_folder_that_is_not_there_is_one_message(capsys):
    assert main(["--config", "configs/llama3-8b-fsdp4.yaml", "--roofline", "/nowhere/roofline.svg"]) == 2
    assert "cannot write the picture /nowhere/roofline.svg" in capsys.readouterr().err


def test_report_has_the_roofline(tmp_path):
    peak = find_peak("NVIDIA H200")
    assert peak is not None
    record = describe_operators(model_operators(preset_config("llama3-8b"), Workload(rows=1, length=8192)), peak)
    assert sum(row["share"] for row in record["operators"]) == pytest.approx(1)
    (tmp_path / "environment.json").write_text(json.dumps({"roofline": record}))
    page = write_report(tmp_path).read_text()
    assert "<h2>Roofline</h2>" in page and "13. optimizer" in page
    assert render_roofline(record) in page and draw_roofline(record) in page


@pytest.mark.parametrize("record", [{"operators": []}, {"operators": [{}], "peak_flops": 1.0}, "x"])
def test_a_damaged_record_is_left_out(tmp_path, record):
    (tmp_path / "environment.json").write_text(json.dumps({"roofline": record}))
    assert "<h2>Roofline</h2>" not in write_report(tmp_path).read_text()
