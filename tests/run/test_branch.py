"""`run.branch_from`: a decay that begins at a kept checkpoint is the end of a run that was planned so."""

from pathlib import Path

import pytest

from jaxstack.errors import ConfigError
from jaxstack.observe.report.series import read_metrics
from jaxstack.run import train as run_train
from jaxstack.run.train import branch, train
from jaxstack.run_config import load_config

SMALL = (
    "model.hidden_size=32", "model.num_layers=1", "model.num_heads=2", "data.tokenizer.name=byte",
    "data.held_out_fraction=0.0", "train.sequence_length=16", "train.global_batch_size=8", "parallel.data=-1",
    "observe.log_every=1", "observe.trackers=[jsonl]", "schedule.name=wsd", "schedule.warmup_steps=2",
    "schedule.decay_steps=3", "checkpoint.every_steps=4", "checkpoint.keep_every_steps=4",
    "optimizer.learning_rate=0.01",
)  # fmt: skip


def config(folder: Path, *overrides: str):
    texts = folder / "text.txt"
    texts.write_text("a decay can begin at every kept checkpoint of a long run. " * 200)
    places = [f"run.dir={folder}", f"data.sources=[{{path: {texts}}}]", f"data.cache_dir={folder}/tokens"]
    return load_config(None, [*SMALL, *places, *overrides])


def losses(folder: Path, name: str) -> dict[int, float]:
    series = read_metrics(folder / name / "metrics.jsonl")["loss"]
    return dict(zip(series.steps, series.values, strict=True))


def test_a_branch_is_the_end_of_a_run_of_that_length(tmp_path):
    train(config(tmp_path, "run.name=long", "train.steps=20"))
    train(config(tmp_path, "run.name=short", "train.steps=11"))
    said: list[str] = []
    where = [f"run.branch_from={tmp_path}/long", "run.branch_step=8"]
    train(config(tmp_path, "run.name=branch", "train.steps=11", *where), report=said.append)
    assert any("branching from" in line and "step 8" in line for line in said)
    assert not any("jumps" in line for line in said)
    short = losses(tmp_path, "short")
    assert losses(tmp_path, "branch") == {step: loss for step, loss in short.items() if step > 8}, "bit by bit"
    assert losses(tmp_path, "long")[11] != short[11], "the long run has not begun to decay"
    again = train(config(tmp_path, "run.name=branch", "train.steps=11", *where), report=said.append)
    assert again.metrics["step"] == 11, "a branch that has begun resumes from its own checkpoints"


def test_a_jump_of_the_learning_rate_is_told(tmp_path, monkeypatch):
    long = config(tmp_path, "run.name=long", "train.steps=20")
    (tmp_path / "long").mkdir()
    from jaxstack.config.loader import dump_yaml

    (tmp_path / "long" / "config.yaml").write_text(dump_yaml(long))
    monkeypatch.setattr(run_train, "link_checkpoint", lambda source, step, target, steps: 8)
    where = [f"run.branch_from={tmp_path}/long", "run.branch_step=8"]
    for steps, jumps in ((11, False), (12, False), (10, True)):
        said: list[str] = []
        branch(config(tmp_path, "run.name=new", f"train.steps={steps}", *where), said.append)
        assert any("jumps" in line for line in said) == jumps, steps


@pytest.mark.quick
def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="exclude each other"):
        config(tmp_path, "run.init_from=a", "run.branch_from=b")
    with pytest.raises(ConfigError, match="needs branch_from"):
        config(tmp_path, "run.branch_step=5")
    with pytest.raises(ConfigError, match="no checkpoint"):
        branch(config(tmp_path, f"run.branch_from={tmp_path}"), print)
