"""The evaluations of a run: one curve on one set of tokens, and a final number on all held-out tokens."""

import json

import pytest

from jaxstack.run.train import train
from jaxstack.run_config import load_config

pytestmark = pytest.mark.longer  # a few seconds each


def run(tmp_path, *overrides):
    """Train 6 steps on small texts; return the result, its metrics lines and what it said."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(400):
        (texts / f"{number}.txt").write_text(f"the square of {number} is {number * number}, " * 3)
    (tmp_path / "c.yaml").write_text(
        f"run: {{dir: {tmp_path}, name: r}}\n"
        "model: {hidden_size: 16, num_layers: 1, num_heads: 2, intermediate_size: 32}\n"
        f"data: {{sources: [{{path: {texts}}}], cache_dir: {tmp_path / 'cache'}, tokenizer: {{name: byte}}}}\n"
        "train: {steps: 6, global_batch_size: 8, sequence_length: 32, eval_every_steps: 2}\n"
        "parallel: {data: 8}\n"
        "observe: {log_every: 3, trackers: [jsonl]}\n"
    )
    said = []
    done = train(load_config(tmp_path / "c.yaml", overrides), report=said.append)
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    return done, lines, said


def test_held_out_losses_are_one_series_and_the_final_number_is_its_own(tmp_path, capsys):
    done, lines, said = run(tmp_path, "train.eval_tokens=200")
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 6]
    assert [line["eval_items"] for line in evaluations] == [200] * 3
    assert ["final_eval_loss" in line for line in evaluations] == [False, False, True]
    last = evaluations[-1]
    assert last["final_eval_items"] > 1000 and last["final_eval_loss"] != last["eval_loss"]
    printed = "\n".join([*said, capsys.readouterr().out])
    assert f"final: held-out loss {last['final_eval_loss']:.4f} on all " in printed
    assert "on the first 200 held-out tokens" in printed
    report = (tmp_path / "r" / "report.html").read_text()
    assert "Final held-out loss" in report and f"{last['final_eval_bits_per_byte']:.4f}" in report
    assert done.metrics["final_eval_loss"] == last["final_eval_loss"]


@pytest.mark.parametrize("tokens", ["null", "10000000"])
def test_where_all_held_out_tokens_are_taken_there_is_no_second_number(tokens, tmp_path):
    _, lines, _ = run(tmp_path, f"train.eval_tokens={tokens}")
    evaluations = [line for line in lines if "eval_loss" in line]
    assert len(evaluations) == 3 and len({line["eval_items"] for line in evaluations}) == 1
    assert not any(key.startswith("final_") for line in lines for key in line)


def test_training_lines_have_the_mean_loss_since_the_line_before(tmp_path):
    each = [line for line in run(tmp_path, "observe.log_every=1")[1] if "loss" in line]
    assert [line["mean_loss"] for line in each] == [line["loss"] for line in each]
    (tmp_path / "third").mkdir()
    some = [line for line in run(tmp_path / "third")[1] if "loss" in line]
    assert [line["step"] for line in some] == [1, 3, 6]
    losses = [line["loss"] for line in each]
    means = [losses[0], sum(losses[1:3]) / 2, sum(losses[3:]) / 3]
    assert [line["mean_loss"] for line in some] == pytest.approx(means, rel=1e-5)
    assert some[-1]["loss"] == pytest.approx(losses[-1], rel=1e-5)
