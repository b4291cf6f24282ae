"""Loss curves: points, means over tokens, ratios, limits and the picture, without a device."""

import json
import xml.etree.ElementTree as xml

import pytest

from benchmarks import rows
from benchmarks.picture import Panel, draw
from benchmarks.training import ablation, convergence, learning, mixers
from jaxstack.models import count_parameters
from jaxstack.run_config import load_config


class Train:
    steps = 10
    global_batch_size = 2
    sequence_length = 8


class FakeTrainer:
    """Losses 1, 2, 3, ... of steps."""

    train = Train

    def __init__(self):
        self.steps = 0

    def batches(self, start):
        yield from ((step, 0.0) for step in range(start, 100))

    def train_step(self, batch):
        self.steps += 1
        assert batch == self.steps - 1, "a batch was left out"
        return {"loss": float(self.steps)}


def test_points_have_the_mean_loss_since_the_point_before():
    trainer = FakeTrainer()
    said = []
    points = learning.learn(trainer, every=4, say=said.append)
    assert [point["step"] for point in points] == [1, 4, 8, 10] and trainer.steps == 10
    assert [point["loss"] for point in points] == [1.0, 3.0, 6.5, 9.5]
    assert [point["tokens"] for point in points] == [16, 64, 128, 160] and said == points[1:]


def test_learning_stops_when_its_time_is_over():
    assert [point["step"] for point in learning.learn(FakeTrainer(), every=4, seconds=0.0)] == [1]


def test_mean_loss_weighs_points_by_their_steps():
    points = learning.learn(FakeTrainer(), every=4)
    assert learning.mean_loss(points, 64, 160) == pytest.approx(sum(range(5, 11)) / 6)
    with pytest.raises(ValueError, match="no point"):
        learning.mean_loss(points, 160, 200)


def row_of(variant, losses, **values):
    curve = [[step, 100 * step, 0.1 * step, loss] for step, loss in enumerate(losses, 1)]
    return {"variant": variant, "curve": curve, **values}


def test_recipes_are_compared_over_the_same_tokens():
    base = row_of("bf16", [4.0 - 0.1 * step for step in range(20)], eval_loss=2.0)
    short = row_of("float32", [4.0 - 0.1 * step for step in range(10)])
    convergence.compare(short, base)
    assert short["final_loss"] == pytest.approx(3.1) and short["loss_ratio"] == pytest.approx(1.0)
    worse = row_of("fp8 current", [1.02 * (4.0 - 0.1 * step) for step in range(20)], eval_loss=2.1)
    convergence.compare(worse, base)
    assert worse["loss_ratio"] == pytest.approx(1.02) and worse["eval_loss_ratio"] == pytest.approx(1.05)


def test_a_longer_run_than_bfloat16_has_no_ratio():
    longer = row_of("fp8 current", [3.0] * 40)
    convergence.compare(longer, row_of("bf16", [3.0] * 20))
    assert "loss_ratio" not in longer


def test_a_recipe_that_did_not_reach_the_end_is_said(capsys):
    convergence.say_whether_cut({"variant": "float32", "tokens": 900}, 1000, 2.0)
    assert "float32 stopped at 900 of 1,000 tokens" in capsys.readouterr().out
    convergence.say_whether_cut({"variant": "bf16", "tokens": 1000}, 1000, 2.0)
    assert not capsys.readouterr().out


def test_picture_has_a_line_for_each_curve_and_panel():
    curves = {"a < b": [(0.0, 3.0), (1.0, 2.0)], "c": [(0.0, 3.0), (2.0, 1.0)]}
    root = xml.fromstring(draw([Panel("Loss", "tokens", curves), Panel("Loss", "time", curves)], "a & b"))
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4
    ends = [line.get("points").split()[-1] for line in lines[:2]]
    lefts, tops = zip(*(map(float, end.split(",")) for end in ends), strict=True)
    assert lefts[1] == 2 * lefts[0] and tops[1] > tops[0], "a lower loss lies lower"


def test_rows_are_kept_where_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "kept")
    rows.append_rows("tiny/x", [{"work": "a"}])
    rows.append_rows("tiny/x", [{"work": "b"}])
    kept = [json.loads(line) for line in (tmp_path / "kept" / "tiny" / "x.jsonl").read_text().splitlines()]
    assert [row["work"] for row in kept] == ["a", "b"] and kept[0]["versions"]["jax"] and "date" in kept[0]


def test_every_row_of_the_ablation_has_what_the_rows_before_it_have():
    configs = [load_config(None, [*ablation.MODEL, *ablation.overrides_of(name)]) for name in ablation.TECHNIQUES]
    found = [
        (c.precision.compute, c.model.attention_implementation, c.precision.fp8, c.model.scan_layers, c.model.remat)
        for c in configs
    ]
    plain = ("float32", "xla_dense", "none", False, "none")
    assert found[:2] == [plain, plain], "TF32 is no part of the configuration"
    half = ("bfloat16", *plain[1:])
    assert found[2:5] == [half, ("bfloat16", None, *half[2:]), ("bfloat16", None, *half[2:])], "nor is the loss"
    assert [row[2:] for row in found[5:]] == [
        ("current", False, "none"), ("delayed", False, "none"), ("delayed", True, "none"), ("delayed", True, "full")
    ]  # fmt: skip


def test_workers_that_start_together_measure_when_their_turn_comes(capsys):
    answer = f"print({ablation.READY!r}, flush=True); input(); "
    row = json.dumps({"tokens_per_second_per_device": 7.0})
    turns = [
        ablation.Worker("works", ["-c", answer + f"print('''{row}''')"]),
        ablation.Worker("fails", ["-c", answer + "raise SystemExit('out of memory')"]),
        ablation.Worker("ends at once", ["-c", "raise SystemExit('no such device')"]),
        ablation.Worker("hangs", ["-c", answer + "import time; time.sleep(60)"]),
    ]
    for turn in turns:
        turn.wait_until_ready()
    assert [turn.run(10.0) for turn in turns[:3]] == [{"tokens_per_second_per_device": 7.0}, None, None]
    assert turns[3].run(0.1) is None
    said = capsys.readouterr().out
    assert "fails failed: out of memory" in said and "no such device" in said and "hangs: no result" in said


def test_hybrids_have_as_many_parameters_as_the_transformer_and_the_picture_shows_their_means():
    sizes = {
        model: count_parameters(load_config(None, [*mixers.SIZE, *overrides, "model.vocab_size=8192"]).model).total
        for model, overrides in mixers.MODELS.items()
    }
    assert sizes[mixers.BASE] == 43790848
    assert all(size == pytest.approx(sizes[mixers.BASE], rel=0.01) for size in sizes.values())
    rows = [row_of(f"{model}, seed {seed}", [4.0 - seed, 3.0, 2.0, 1.0]) for model in sizes for seed in (0, 1)]
    drawing = xml.fromstring(mixers.picture(rows))
    assert all(any(model in (text.text or "") for text in drawing.iter()) for model in sizes)
