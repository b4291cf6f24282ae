"""`jaxstack convert` there and back, and runs that start from other parameters (`run.init_from`)."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

import jaxstack.generate as generate
from jaxstack import convert
from jaxstack.models import from_huggingface
from jaxstack.run.train import train
from jaxstack.run_config import load_config

FIXTURES = Path(__file__).parents[1] / "models" / "huggingface"
WORDS = (
    "the a of to and in is it for on as with by an be at or from that this not are if will have no can use one other"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A Hugging Face checkpoint with a tokenizer of words."""
    folder = Path(shutil.copytree(FIXTURES / "qwen3", tmp_path_factory.mktemp("source") / "qwen3"))
    words = ["<s>", "<unk>", *WORDS.split()]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "qwen"
    assert convert.main([str(source), "--output", str(run)]) == 0
    return run


def config(folder: Path, **run: str) -> Path:
    """A configuration of two steps on a few documents."""
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(12):
        (texts / f"{number}.txt").write_text(" ".join(WORDS.split()[number:]))
    tree = {
        "run": {"dir": str(folder), **run},
        "data": {"sources": [{"path": str(texts)}], "cache_dir": str(folder / "cache"), "held_out_fraction": 0.3},
        "train": {"steps": 2, "global_batch_size": 8, "sequence_length": 16},
        "parallel": {"fsdp": 4, "data": 2},
        "observe": {"trackers": ["jsonl"], "log_every": 1, "progress": False},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(tree))
    return path


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("limit", ["5", "0.00002"], ids=["one file", "several"])
def test_there_and_back_is_bit_equal(source, converted, tmp_path, limit):
    back = tmp_path / "back"
    arguments = [str(converted), "--output", str(back), "--dtype", "bfloat16", "--max-shard-gb", limit]
    assert convert.main(arguments) == 0
    files = list(back.glob("*.safetensors"))
    assert len(files) == (1 if limit == "5" else 3)
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    expected = load_file(source / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == tensor.tobytes() for name, tensor in expected.items())
    said = json.loads((back / "config.json").read_text())
    assert (said["model_type"], said["torch_dtype"], said["bos_token_id"]) == ("qwen3", "bfloat16", 0)
    assert Tokenizer.from_file(str(back / "tokenizer.json")).encode("the of").ids == [2, 4]


@pytest.mark.longer
def test_a_converted_run_generates_greedily_what_the_model_says(source, converted, capsys):
    capsys.readouterr()
    said = ["--prompt", "the of", "--max-tokens", "1", "--temperature", "0"]
    assert generate.main(["--run", str(converted), *said]) == 0
    model = from_huggingface(source)
    words = ["", "", *WORDS.split()]
    likeliest = int(np.argmax(model(jnp.array([[0, 2, 4]]))[0, -1, : len(words)]))  # other rows mean no text
    assert capsys.readouterr().out == f"the of {words[likeliest]}\n"
    assert words[likeliest]


@pytest.mark.exhaustive
def test_a_run_starts_from_files_or_from_a_run_and_resumes_without_their_weights(source, converted, tmp_path):
    gone = Path(shutil.copytree(source, tmp_path / "gone"))
    path = config(tmp_path, name="files", init_from=str(gone))
    assert load_config(path).model == load_config(converted / "config.yaml").model
    train(load_config(path))
    train(load_config(path, ["run.name=run", f"run.init_from={converted}"]))
    first = losses(tmp_path / "files")
    second = losses(tmp_path / "run")
    assert first == second and len(first) == 2
    tokens = np.zeros((1, 1), np.int32)
    assert from_huggingface(gone)(tokens).std() > 0.5  # far from a fresh model's, whose loss would be log(64)
    assert first[0] > 4.5
    for name in ("model.safetensors", "config.json"):  # the tokenizer is read again
        (gone / name).unlink()
    train(load_config(tmp_path / "files" / "config.yaml", ["train.steps=3"]))
    assert losses(tmp_path / "files")[:2] == first and len(losses(tmp_path / "files")) == 3


def exits_with_2(main, arguments: list[str], capsys) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and said.count("\n") == 1
    return said


def test_wrong_sources_and_outputs_are_named(source, converted, tmp_path, capsys):
    out = ["--output", str(tmp_path / "out")]
    assert "neither a run directory" in exits_with_2(convert.main, [str(tmp_path), *out], capsys)
    assert "exists already" in exits_with_2(convert.main, [str(source), "--output", str(converted)], capsys)
    assert "exists already" in exits_with_2(convert.main, [str(converted), "--output", str(source)], capsys)
    assert "llama cannot express" in exits_with_2(convert.main, [str(converted), *out, "--model-type", "llama"], capsys)
    assert "no checkpoint of step 7" in exits_with_2(convert.main, [str(converted), *out, "--step", "7"], capsys)
    assert "--max-shard-gb" in exits_with_2(convert.main, [str(converted), *out, "--max-shard-gb", "0"], capsys)
    damaged = Path(shutil.copytree(source, tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:5000])
    assert "model.safetensors is damaged" in exits_with_2(convert.main, [str(damaged), *out], capsys)
    assert not (tmp_path / "out").exists()


def test_starting_points_that_do_not_fit_are_named(source, converted, tmp_path, capsys):
    import jaxstack.train as train

    path = str(config(tmp_path, name="new", init_from=str(source)))
    wrong = exits_with_2(train.main, ["--config", path, "run.init_from=nowhere"], capsys)
    assert "nowhere is neither a run directory" in wrong
    other = ["--config", path, "model.rope_theta=500"]
    assert "another model: rope_theta 500.0, not 10000.0" in exits_with_2(train.main, other, capsys)
    other = ["--config", path, "model.rope_theta=500", f"run.init_from={converted}"]
    assert "another model: rope_theta 500.0, not 10000.0" in exits_with_2(train.main, other, capsys)
    same = ["--config", path, f"run.dir={converted.parent}", f"run.name={converted.name}"]
    assert f"run.init_from={converted}" in exits_with_2(train.main, same, capsys)


@pytest.mark.exhaustive
def test_stages_of_a_pipeline_start_from_the_same_parameters(source, tmp_path):
    path = config(tmp_path, name="whole", init_from=str(source))
    train(load_config(path))
    staged = ["run.name=staged", "parallel.pipeline=2", "parallel.fsdp=4", "parallel.data=1", "parallel.microbatches=2"]
    train(load_config(path, staged))
    np.testing.assert_allclose(losses(tmp_path / "staged"), losses(tmp_path / "whole"), rtol=1e-5)


@pytest.mark.exhaustive
def test_a_byte_tokenizer_survives_the_round_trip(tmp_path, capsys):
    """It has no tokenizer.json, so the Hugging Face directory has jaxstack's description of it."""
    path = config(tmp_path, name="bytes")
    tree = json.loads(path.read_text())
    tree["data"]["tokenizer"] = {"name": "byte"}
    tree["model"] = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 1, "intermediate_size": 32}
    path.write_text(json.dumps(tree))
    train(load_config(path))
    run = tmp_path / "bytes"
    files = tmp_path / "files"
    again = tmp_path / "again"
    assert convert.main([str(run), "--output", str(files)]) == 0
    assert convert.main([str(files), "--output", str(again)]) == 0
    texts = []
    for place in (run, files, again):
        capsys.readouterr()
        said = ["--prompt", "the", "--max-tokens", "5", "--temperature", "0", "parallel.data=1"]
        assert generate.main(["--run", str(place), *said]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert generate.main(["--run", str(again), "--chat", "parallel.data=1"]) == 2
    said = capsys.readouterr().err
    assert "no chat template" in said and "data.chat.template" not in said
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (again / "tokenizer" / "chat_template.jinja").write_text(template)  # as the message says
    assert generate.main(["--run", str(again), "--chat", "--max-tokens", "2", "parallel.data=1"]) == 0
