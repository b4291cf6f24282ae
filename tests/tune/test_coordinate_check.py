"""The coordinate check, and the transfer of the best learning rate over the width."""

import pytest

from benchmarks.tuning.transfer import measure
from jaxstack.errors import ConfigError
from jaxstack.models.config import ModelConfig
from jaxstack.run_config import load_config
from jaxstack.tune.coordinate_check import CoordinateCheckResult, check_coordinates, draw, main, widen


def test_a_wider_model_has_more_heads():
    base = ModelConfig(hidden_size=64, num_heads=4, num_kv_heads=2, intermediate_size=96)
    wide = widen(base, 192)
    assert (wide.num_heads, wide.kv_heads, wide.width_per_head, wide.feed_forward_size) == (12, 6, 16, 288)
    with pytest.raises(ConfigError, match="a width of 100 is 1.5625 times .* choose multiples of 32"):
        widen(base, 100)
    assert widen(base, 32).num_heads == 2


def test_widths_that_are_no_numbers_are_one_message(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--config", "configs/quickstart.yaml", "--widths", "64,foo"])
    assert ended.value.code == 2 and "whole numbers with commas between them" in capsys.readouterr().err


def test_the_picture_has_a_line_for_each_quantity():
    names = ("embedding", "residual", "logits")
    values = {(p, q): (1.0, 2.0 + i) for p in ("standard", "mup") for i, q in enumerate(names)}
    found = CoordinateCheckResult((64, 512), 5, values)
    assert found.growth("mup", "logits") == 4.0
    svg = draw(found)
    assert svg.count("<polyline") == 6 and "standard: mean magnitude after 5 steps" in svg and ">512<" in svg


@pytest.mark.exhaustive
def test_activations_grow_in_the_standard_parametrization_only():
    config = load_config(
        None,
        ["model.hidden_size=64", "model.num_heads=2", "model.num_layers=2", "data.tokenizer.name=byte",
         "train.global_batch_size=8", "train.sequence_length=64", "optimizer.learning_rate=2e-3",
         "model.initializer_range=1.0", "model.initialization=fan_in", "parallel.data=8"],
    )  # fmt: skip
    found = check_coordinates(config, [64, 256], report=lambda line: None)
    assert found.growth("standard", "residual") > 1.3
    assert 0.8 < found.growth("mup", "residual") < 1.25


def test_the_command_reports_a_wrong_width(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {hidden_size: 64, num_heads: 2}\n")
    assert main(["--config", str(file), "--widths", "64"]) == 2
    assert "needs two widths or more" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)  # 220 s of processor time, which take longer beside other work
def test_the_best_learning_rate_transfers_over_eight_times_the_width():
    found = {p: [measure(width, p, 100, "adamw")["best"] for width in (64, 512)] for p in ("standard", "mup")}
    assert abs(found["mup"][1] - found["mup"][0]) <= 1
    assert found["standard"][1] - found["standard"][0] >= 3
