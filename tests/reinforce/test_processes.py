"""Rollouts of two processes, each of which answers its share of the prompts, beside those of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxstack.run.train import train
from jaxstack.run_config import load_config
from tests.reinforce.conftest import metrics_of

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "model": [],
    "resampled": ["rollout.resample=2", "policy.loss=dapo"],
    "ahead": ["rollout.stale_steps=1"],
    "carried": ["rollout.carried_prompts=2"],
    "packed": ["rollout.packing=true", "train.gradient_accumulation=2"],
    "tensor": ["parallel.tensor=2", "parallel.fsdp=1"],
}
COMPARED = ("reward", "eval_reward", "loss", "grad_norm", "answer_tokens", "truncated", "useful_groups", "rollouts")


def run(folder: Path, name: str, processes: int, *overrides: str) -> list[dict]:
    """Reinforce in a job of four devices; return the metrics."""
    command = [sys.executable, "-m", "jaxstack.launch", "--processes", str(processes), "--max-restarts", "0", "--"]
    command += [sys.executable, "-m", "jaxstack.reinforce", "--config", str(folder / "grpo.yaml"), f"run.name={name}"]
    command += ["train.steps=3", "rollout.prompts=4", "train.global_batch_size=16"]
    command += ["parallel.data=-1", "parallel.fsdp=2", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": str(4 // processes)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics_of(folder / name)


def trained_reward_model(folder: Path) -> Path:
    """The run directory of a reward model with the words of the policy."""
    pairs = [
        {"prompt": f"what is {'abcdef'[i % 6]}", "chosen": f"it is {'abcde'[i % 5]} yes", "rejected": "no"}
        for i in range(40)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    base = json.loads((folder / "grpo.yaml").read_text())
    config = {key: base[key] for key in ("schedule", "optimizer", "parallel", "observe")} | {
        "run": {**base["run"], "name": "reward-model"},
        "data": {"sources": [{"path": str(folder / "pairs.jsonl"), "format": "preference"}],
                 "chat": {"template": "chatml"}, "held_out_fraction": 0.3, "cache_dir": str(folder / "cache")},
        "preference": {"loss": "reward_model"},
        "train": {"steps": 3, "global_batch_size": 8, "sequence_length": 16},
    }  # fmt: skip
    (folder / "reward.yaml").write_text(json.dumps(config))
    return train(load_config(folder / "reward.yaml")).directory


@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=[] if name == "resampled" else pytest.mark.exhaustive) for name in SETTINGS]
)
def test_two_processes_train_on_the_answers_of_one(folder, setting):
    """The answers depend on prompts, seeds and weights, not on the process; a carried one on when others end."""
    more = SETTINGS[setting]
    if setting == "model":  # each process computes the rewards of its answers, on devices of its own
        more = [f"reward=[{{name: model, path: {trained_reward_model(folder)}}}]"]
    one, two = (run(folder, f"{setting}-{count}", count, *more) for count in (1, 2))
    assert [row["step"] for row in one] == [row["step"] for row in two] == [0, 1, 2, 3, 3]
    for before, after in zip(one, two, strict=True):
        names = [name for name in before if name.startswith(COMPARED) and not name.endswith("seconds")]
        assert {*names} >= ({"eval_reward"} if "eval_reward" in before else {"reward", "loss", "answer_tokens"})
        for name in names if setting != "carried" else ():
            np.testing.assert_allclose(after[name], before[name], rtol=1e-4, atol=1e-5, err_msg=name)
