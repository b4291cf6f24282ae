"""The command's search: its table, its file, its limits, its messages."""

import json
import re

import pytest

from jaxstack.plan import cluster_search
from jaxstack.plan.__main__ import main
from jaxstack.run_config import load_config


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "eight.yaml"
    path.write_text("model: {preset: llama3-8b}\ntrain: {global_batch_size: 64, sequence_length: 4096}\n")
    return path


def test_table_and_written_configuration(file, tmp_path, capsys):
    output = tmp_path / "best.yaml"
    arguments = ["--config", str(file), "--cluster", "1 x 8 h200", "--tokens", "chinchilla", "--top", "3"]
    arguments += ["parallel.simulate_devices=2"]
    assert main([*arguments, "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert "possible layouts fit" in text and "bubble" in text and "MFU %" in text and "days" in text
    assert "refused layouts" in text and "optimizer" in text and "cost" in text
    written = load_config(output)
    assert written.parallel.resolve(8) == written.parallel and written.run.name == "eight"
    assert written.model.vocab_size == 128256 and written.parallel.simulate_devices is None
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["layouts"][0]
    assert len(found["layouts"]) == 3
    assert sum(best["seconds"].values()) == pytest.approx(best["step_seconds"])
    assert sum(best["memory_bytes"].values()) == pytest.approx(best["predicted_bytes"])
    assert best["budget"]["tokens"] == pytest.approx(20 * 8.03e9, rel=0.01)


def test_policy_and_recipes(file, capsys):
    base = ["--config", str(file), "--cluster", "1 x 8 h200"]
    assert main([*base, "--policy", "tensor-first"]) == 0
    assert "policy tensor-first" in capsys.readouterr().out
    assert main([*base, "--fp8", "--top", "1"]) == 0
    assert "FP8" in capsys.readouterr().out
    assert main(["--config", str(file), "--cluster", "1 x 8 a100", "--fp8"]) == 2
    assert "FP8 tensor cores" in capsys.readouterr().err


def test_a_compiled_layout_that_does_not_fit_is_not_written(file, tmp_path, capsys, monkeypatch):
    sizes = iter([2**40, 2**30])

    def rehearse(config, devices):
        size = next(sizes)
        return {"predicted_bytes": size, "fits": size < 2**35}

    monkeypatch.setattr(cluster_search, "rehearse", rehearse)
    arguments = ["--config", str(file), "--cluster", "8 h200", "--top", "2", "--verify", "2"]
    output = tmp_path / "best.yaml"
    assert main([*arguments, "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert "1.0 TiB (does not fit)" in text
    second = re.search(r"^2 +(.*?)  ", text, re.MULTILINE).group(1)
    assert f"wrote {second} to" in text and load_config(output).parallel.degrees


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--cluster", "8 h201"], "did you mean"),
        (["--cluster", "8 h200", "--tokens", "many"], "--tokens must be a number"),
        (["--cluster", "8 h200", "--tokens", "1e13", "--max-days", "3"], "limit allows .* GPUs would do"),
        (["--cluster", "8 h200", "--tokens", "1e13", "--max-cost", "100"], "more than --max-cost 100"),
        (["--cluster", "8 h200", "--max-days", "3"], "add --tokens"),
        (["--cluster", "8 h200", "--price", "-1"], "--price must be a positive number"),
        (["--tokens", "1e9"], "add --cluster"),
        (["--cluster", "8 h200", "--rehearse"], "--verify N"),
        (["--cluster", "8 h200", "--roofline", "x.svg"], "leave --cluster out"),
        (["--cluster", "1 l40s"], "It fits"),
        (["--cluster", "h200", "--output", "x.yaml", "parallel.islands=2"], "leave it out"),
    ],
)
def test_mistakes_get_one_message(file, capsys, arguments, message):
    assert main(["--config", str(file), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("jaxstack plan: ")
    assert re.search(message, error)
