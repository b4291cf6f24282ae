"""The environment is complete, survives a missing git, and holds no secrets."""

import json
import subprocess
import sys

import jax
import pytest

import jaxstack
from jaxstack.observe.environment import (
    describe_environment,
    git_commit,
    hide_secrets,
    read_environment,
    write_environment,
)


def test_describes_versions_and_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("JAX_CLOUD_TOKEN", "hunter3")
    monkeypatch.setenv("JAX_TRACEBACK_FILTERING", "off")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "a b.yaml", "--hub-token", "hunter4"])
    content = describe_environment()
    assert content["versions"]["jaxstack"] == jaxstack.__version__
    assert content["versions"]["jax"] == jax.__version__
    packages = {"python", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"}
    assert packages <= set(content["versions"])
    assert (content["platform"], content["devices"], content["processes"]) == ("cpu", len(jax.devices()), 1)
    assert content["variables"]["XLA_FLAGS"] == "--xla_dump_to="
    assert content["variables"]["JAX_TRACEBACK_FILTERING"] == "off"
    assert "train.py --config 'a b.yaml' --hub-token" in content["command"]
    assert "hunter" not in json.dumps(content)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--token", "x", "y"], ["--token", "(hidden)", "y"]),
        (["--api-key=x"], ["--api-key=(hidden)"]),
        (["wandb.api_key=x", "train.steps=3"], ["wandb.api_key=(hidden)", "train.steps=3"]),
        (["data.path=s3://user:pw@host/a"], ["data.path=s3://(hidden)@host/a"]),
        (["--password", "--verbose"], ["--password", "--verbose"]),
        (["train.tokens_per_batch=4"], ["train.tokens_per_batch=4"]),
        (["data.tokenizer.path=a.json"], ["data.tokenizer.path=a.json"]),
        (["--max-tokens", "5"], ["--max-tokens", "5"]),
    ],
)
def test_command_line_secrets_are_hidden(arguments, shown):
    assert hide_secrets(arguments) == shown


def test_commit(tmp_path, monkeypatch):
    assert git_commit(tmp_path) is None

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "first")
    commit = git_commit(tmp_path)
    assert commit and len(commit) == 40
    (tmp_path / "file").write_text("b")
    assert git_commit(tmp_path) == commit + "-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git there
    assert git_commit(tmp_path) is None


def test_file_holds_the_sections(tmp_path):
    assert read_environment(tmp_path) == {}
    write_environment(tmp_path / "run", ran={"matmuls": {"fp8": 3}}, schedule=[(0, 0.0), (10, 1e-3)])
    content = read_environment(tmp_path / "run")
    assert content["ran"] == {"matmuls": {"fp8": 3}} and content["schedule"] == [[0, 0.0], [10, 1e-3]]
    assert content["versions"]["jax"] == jax.__version__
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["environment.json"]
