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


def test_the_layout_of_the_file_need_not_be_possible(file, capsys):
    one = ["--cluster", "1 gb200", "--top", "1", "train.global_batch_size=1"]
    assert main(["--config", str(file), *one, "parallel.fsdp=4"]) == 0
    assert "one device" in capsys.readouterr().out
    assert main(["--config", str(file), *one, "parallel.fsdp=4", "train.sequence_length=no"]) == 2
    assert "sequence_length" in capsys.readouterr().err


def test_rules_are_shown_without_values(file, capsys):
    assert main(["--config", str(file), "--cluster", "3 x 5 h200", "--top", "1", "train.global_batch_size=4"]) == 0
    text = capsys.readouterr().out
    assert "divisible by 2 x context" in text and "must divide the rows of each pipeline" in text


def test_an_automatic_layout_is_planned_for_the_memory_of_an_h200(file, capsys):
    assert main(["--config", str(file), "--devices", "2", "parallel=auto"]) == 0
    assert "on 2 devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--cluster", "8 h201"], "did you mean"),
        (["--cluster", "8x8h200"], "hosts x GPUs of each"),
        (["--cluster", "100000 x 1024 h200"], "102,400,000 GPUs; the search supports up to"),
        (["--cluster", "8 h200", "--verify", "1", "--output", "/no/such/x.yaml"], "/no/such does not exist"),
        (["--roofline", "x.png"], "ends in .svg"),
        (["--cluster", "8 h200", "--tokens", "many"], "--tokens must be a number"),
        (["--cluster", "8 h200", "--tokens", "1e13", "--max-days", "3"], "limit allows .* GPUs would do"),
        (["--cluster", "8 h200", "--tokens", "1e13", "--max-cost", "100"], "more than --max-cost 100"),
        (["--cluster", "8 h200", "--max-days", "3"], "add --tokens"),
        (["--cluster", "8 h200", "--price", "-1"], "--price must be a positive number"),
        (["--tokens", "1e9"], "add --cluster"),
        (["--cluster", "8 h200", "--rehearse"], "--verify N"),
        (["--cluster", "8 h200", "--roofline", "x.svg"], "leave --cluster out"),
        (["--cluster", "1 l40s"], "It fits"),
        (["--cluster", "h200", "--output", "x.yaml", "parallel.workers=2"], "leave it out"),
    ],
)
def test_mistakes_get_one_message(file, capsys, arguments, message):
    assert main(["--config", str(file), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("jaxstack plan: ")
    assert re.search(message, error)
