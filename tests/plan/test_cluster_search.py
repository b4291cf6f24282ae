"""The command's search: its table, its file, its limits, its messages."""

import json
import re

import pytest

from jaxstack.cost_model import cluster as cluster_kinds
from jaxstack.cost_model.layouts import enumerate_layouts
from jaxstack.plan import cluster_search
from jaxstack.plan.__main__ import main
from jaxstack.plan.cluster_search import load_search_config
from jaxstack.run_config import load_config

SHIPPED = cluster_kinds._DIRECTORY


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
    assert main(["--config", str(file), "--cluster", "1 x 8 a100", "precision.fp8=current", "--top", "1"]) == 0
    assert "A100 has no FP8 tensor cores: precision.fp8=current is forecast at its bfloat16" in capsys.readouterr().out


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


@pytest.mark.longer
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
        (["--cluster", "8 h200", "--price", "0"], "found 0. Leave it out for no price"),
        (["--cluster", "8 h200", "--tokens", "1e30"], "from 1 to 1e\\+18"),
        (["--cluster", "8 nofile.yaml"], "there is no file nofile.yaml; .*a shipped kind: a100"),
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


def test_what_is_read_is_not_overwritten(file, tmp_path, capsys):
    cluster = tmp_path / "mine.yaml"
    cluster.write_text((SHIPPED / "h200.yaml").read_text())
    before = file.read_text()
    for output, read in ((f"{tmp_path}/./eight.yaml", file), (cluster, cluster)):
        assert main(["--config", str(file), "--cluster", f"8 {cluster}", "--output", str(output)]) == 2
        assert f"--output {output} would overwrite {read}, which is read" in capsys.readouterr().err
    assert file.read_text() == before


def test_virtual_stages_are_searched_and_a_configured_number_is_kept(file):
    def tried(*overrides: str) -> set[float]:
        config = load_search_config(str(file), ["model.num_layers=16", "model.vocab_size=512", *overrides])
        layouts, _ = enumerate_layouts(config, 2)
        return set(layouts["chunks"][layouts.schedule_in("interleaved") & (layouts["pipeline"] == 2)])

    assert tried() == {2, 4, 8}
    assert tried("model.num_layers=6") == {2}
    assert tried("parallel.pipeline_virtual_stages=4") == {4}
    assert tried("parallel.pipeline_virtual_stages=4", "parallel.pipeline=2", "parallel.microbatches=8") == {4}


def test_a_policy_that_is_slower_than_the_fastest_by_more_than_a_limit_is_told(file, capsys, monkeypatch):
    base = ["--config", str(file), "--policy", "tensor-first", "--cluster", "1 x 8 h100", "model.num_layers=64"]
    monkeypatch.setattr(cluster_search, "_SLOWER", 1e9)
    assert main(base) == 0
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setattr(cluster_search, "_SLOWER", 1.001)
    assert main(base) == 0
    found = capsys.readouterr().out
    told = re.search(r"warning: policy fastest takes ([\d.,]+) ms a step instead of ([\d.,]+) ms, with (.*)", found)
    assert told is not None
    fastest, chosen = (float(told[n].replace(",", "")) for n in (1, 2))
    assert chosen > 1.001 * fastest
