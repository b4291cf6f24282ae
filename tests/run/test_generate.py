"""`jaxstack generate` on Hugging Face checkpoints and runs: whose text, the same on any mesh, and what is refused."""

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import yaml
from safetensors.numpy import load_file

import jaxstack.generate as command
from jaxstack import convert
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.text_stream import Piece, TextGenerator
from jaxstack.errors import ConfigError
from jaxstack.parallel import ParallelConfig
from jaxstack.run.generate import generate as generate_texts
from jaxstack.run.load import load, run_config
from jaxstack.run.setting import decoding_layout
from jaxstack.stored import StoredModel
from tests.marks import longer
from tests.word_models import FIXTURES, as_words, make_word_model

ONE = "parallel.data=1"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_word_model("qwen2", tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "qwen2"
    assert convert.main([str(source), "--output", str(run)]) == 0
    return run


def generate(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert command.main(arguments) == 0
    return capsys.readouterr().out


def of_transformers() -> tuple[str, str]:
    """A prompt and what transformers goes on with, greedily, up to the end of text."""
    expected = load_file(FIXTURES / "qwen2" / "expected.safetensors")
    greedy = expected["greedy"].tolist()
    return as_words(expected["tokens"][0, :6]), as_words(greedy[: greedy.index(63)])


@pytest.mark.longer
@pytest.mark.parametrize("kind", [*longer("files"), "run"])
def test_greedy_text_is_that_of_transformers_up_to_the_end_of_text(source, converted, capsys, kind):
    prompt, wanted = of_transformers()
    said = ["--prompt", prompt, "--temperature", "0", "--no-document-start", ONE]
    assert generate(capsys, "--run", str(source if kind == "files" else converted), *said) == f"{prompt} {wanted}\n"
    assert json.loads((converted / "generation_config.json").read_text()) == {"eos_token_id": [63]}


@pytest.mark.longer
def test_with_two_layers_in_memory_the_text_is_the_same(source, converted, capsys):
    prompt, wanted = of_transformers()
    said = ["--prompt", prompt, "--temperature", "0", "--no-document-start", "--resident-layers", "2"]
    assert generate(capsys, "--run", str(source), *said) == f"{prompt} {wanted}\n"
    assert "convert it first" in refused(capsys, "--run", str(converted), *said)
    assert "at least 1; found 0" in refused(capsys, "--run", str(source), "--resident-layers", "0")
    assert "leave the keys of parallel" in refused(capsys, "--run", str(source), *said, "parallel.tensor=2")
    assert "add --resident-layers" in refused(capsys, "--run", str(source), "--weights", "host")


@pytest.mark.parametrize("place", ["host", "peers"])
@pytest.mark.longer
def test_other_layers_may_be_in_memory_that_is_not_the_devices(source, place, capsys):
    prompt, wanted = of_transformers()
    said = ["--prompt", prompt, "--temperature", "0", "--no-document-start", "--resident-layers", "2"]
    assert generate(capsys, "--run", str(source), *said, "--weights", place) == f"{prompt} {wanted}\n"


@pytest.mark.longer
def test_a_pipeline_gives_the_texts_of_one_device(source, converted, prompts, capsys):
    found = texts(capsys, source, prompts, ONE)
    assert texts(capsys, source, prompts, "parallel.pipeline=2") == found
    assert texts(capsys, converted, prompts, "parallel.pipeline=2", "parallel.tensor=2", "--batch-size", "5") == found
    assert "at most 2" in refused(capsys, "--run", str(source), "parallel.pipeline=4")
    both = ["parallel.pipeline=2", "parallel.data=2"]
    assert "with parallel.tensor only" in refused(capsys, "--run", str(source), *both)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": as_words(range(5, 5 + n))} for n in (3, 9, 1)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def texts(capsys, source: Path, prompts: Path, *more: str) -> list[dict]:
    said = ["--run", str(source), "--prompts", str(prompts), "--samples", "2", "--json", "--max-tokens", "10"]
    return [json.loads(line) for line in generate(capsys, *said, *more).splitlines()]


@pytest.mark.exhaustive
@pytest.mark.longer
def test_eight_devices_and_other_batches_give_the_same_texts(source, prompts, capsys):
    found = texts(capsys, source, prompts, ONE, "--seed", "3")
    assert [line["seed"] for line in found] == [3, 4] * 3
    assert {line["finish_reason"] for line in found} <= {"stop", "length"}
    assert len({line["text"] for line in found}) == 6
    layout = ["parallel.data=2", "parallel.fsdp=2", "parallel.tensor=2", "--batch-size", "4"]
    assert texts(capsys, source, prompts, "--seed", "3", *layout) == found


@pytest.mark.longer
def test_several_texts_have_titles_and_end_at_stop_strings(source, prompts, capsys):
    whole = texts(capsys, source, prompts, ONE)
    stop = whole[2]["text"].split()[4]
    said = ["--run", str(source), "--prompts", str(prompts), "--max-tokens", "10", ONE, "--stop", f"{stop} "]
    shown = generate(capsys, *said, "--samples", "2").split("--- ")[1:]
    assert [text.split("\n")[0] for text in shown] == [
        f"prompt {number}, sample {sample}" for number in (1, 2, 3) for sample in (1, 2)
    ]
    for line, text in zip(whole, shown, strict=True):
        assert text == f"{text.splitlines()[0]}\n{line['prompt']}{line['text'].split(f'{stop} ')[0]}\n"
    assert shown[2].count(stop) < whole[2]["text"].count(stop)


def test_the_default_layout_divides_heads_and_widths(source):
    config = run_config(StoredModel.open(source))
    assert decoding_layout(config, 8, chosen=False) == ParallelConfig(tensor=2)
    own_sums = config.model_copy(update={"parallel": ParallelConfig(fsdp=8, overlap="never")})
    assert decoding_layout(own_sums, 8, chosen=False) == ParallelConfig(tensor=2, overlap="never")
    odd = config.model_copy(update={"model": config.model.model_copy(update={"intermediate_size": 47})})
    assert decoding_layout(odd, 8, chosen=False) == ParallelConfig(tensor=1)


def test_a_text_generator_for_python(source):
    run = load(source, [ONE])
    generator = run.text_generator()
    both = generator.generate(["w5 w6", "w9"], 4, Sampling(temperature=0))
    assert run.step == 0 and both[1] == generator.generate(["w9"], 4, Sampling(temperature=0))[0]
    texts = run.generate(["w5 w6", "w9"], Sampling(temperature=0), max_tokens=4, samples=2, seed=7)
    assert [text.text for text in texts] == [both[0], both[0], both[1], both[1]]
    assert [(text.prompt_index, text.sample_index, text.seed) for text in texts] == [
        (0, 0, 7),
        (0, 1, 8),
        (1, 0, 7),
        (1, 1, 8),
    ]
    assert run.config.model.num_layers == len(run.parameters["decoder"]["layers"])


def refused(capsys, *arguments: str, code: int = 2) -> str:
    capsys.readouterr()
    assert command.main([*arguments]) == code
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if not line.startswith("[")]
    assert len(lines) == 1 and "Traceback" not in said, said
    return lines[0]


def test_a_line_separator_inside_of_a_prompt_ends_no_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\n\n{"prompt": "d"}\r\n', encoding="utf-8")
    assert command._read_prompts(["e"], str(path)) == ["e", "a\u2028b\x85c", "d"]


def test_files_of_prompts_that_cannot_be_read(tmp_path):
    path = tmp_path / "p.jsonl"
    line = '{"prompt": "a"}\n'
    path.write_bytes(b"\xef\xbb\xbf" + line.encode())
    assert command._read_prompts(None, str(path)) == ["a"]
    for content, reason in (
        (line.encode("utf-16"), "is not UTF-8"),
        (b"", "has no lines"),
        (line.encode() + b"[" * 10**5, "line 2 of .* must be a JSON object"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            command._read_prompts(None, str(path))


def test_many_samples_are_prepared_one_batch_at_a_time():
    class Generator:
        decoder = SimpleNamespace(context_length=None)

        def encode(self, text):
            return [1]

        def stream(self, rows, tokens, sampling, *, seed, stop):
            return (Piece(row, f"{row} of {len(rows)}, {seed[row]}", "stop") for row in range(len(rows)))

    # All rows together would need about 100 GB.
    found = generate_texts(cast(TextGenerator, Generator()), ["", ""], Sampling(), samples=10**9, seed=3, batch_size=2)
    assert [text.text for text in itertools.islice(found, 3)] == ["0 of 2, 3", "1 of 2, 4", "0 of 2, 5"]


def test_the_way_out_of_an_unknown_key_is_an_option_of_the_command_that_it_names(source, tmp_path, capsys):
    other = Path(shutil.copytree(source, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "from_elsewhere": 1}))
    line = refused(capsys, "--run", str(other), "--prompt", "w1", ONE)
    assert "python -m jaxstack.convert --ignore-key from_elsewhere, and give the run that it writes" in line


@pytest.mark.longer
def test_what_does_not_fit_gets_one_message(source, converted, tmp_path, capsys):
    long = ["--run", str(source), "--prompt", as_words([5] * 70), ONE]
    assert "a prompt of 71 tokens leaves no room in the model's context of 64 tokens" in refused(capsys, *long)
    long = ["--run", str(source), "--prompt", as_words([5] * 60), "--max-tokens", "9", ONE]
    assert "at most 3 new tokens fit" in refused(capsys, *long)
    run = ["--run", str(source)]
    assert "only keys of parallel and precision" in refused(capsys, *run, "model.hidden_size=3")
    assert "unknown key" in refused(capsys, *run, "parallel.tensors=3")
    assert "num_heads (4)" in refused(capsys, *run, "parallel.tensor=3")
    assert "found context 2" in refused(capsys, *run, "parallel.context=2")
    assert "has no steps" in refused(capsys, *run, "--step", "3", ONE)
    assert "--seed" in refused(capsys, *run, "--seed", "-1")
    assert "at least one character" in refused(capsys, *run, "--stop", "", ONE)
    assert "nothing to go on from" in refused(capsys, *run, "--no-document-start", ONE)
    assert "must be a JSON object" in refused(capsys, *run, "--prompts", str(source / "config.json"))
    assert "neither a run directory" in refused(capsys, "--run", str(tmp_path))


@pytest.mark.longer
def test_a_run_directory_of_another_model_gets_one_message(source, converted, tmp_path, capsys):
    other = Path(shutil.copytree(converted, tmp_path / "other"))
    tree = yaml.safe_load((other / "config.yaml").read_text())
    tree["model"]["intermediate_size"] = 64
    (other / "config.yaml").write_text(yaml.safe_dump(tree))
    assert command.main(["--run", str(other), ONE]) == 2
    said = capsys.readouterr().err
    assert "does not fit this run (6 differences, the run has 27 leaves)" in said and "Traceback" not in said
    shutil.rmtree(other / "checkpoints")
    assert "holds no checkpoint yet" in refused(capsys, "--run", str(other), ONE, code=1)
    more = make_word_model("llama", tmp_path / "more", words=80)
    said = refused(capsys, "--run", str(more), "--prompt", "w5 w70", ONE)
    assert "token id 70 is outside of the model's vocabulary of 64" in said
    (more / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refused(capsys, "--run", str(more), ONE)


def test_the_message_after_ctrl_c_has_a_line_of_its_own(source, capsys, monkeypatch):
    def interrupted(*_, **__):
        yield "w7"
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxstack.run.generate.stream", interrupted)
    capsys.readouterr()
    assert command.main(["--run", str(source), "--prompt", "w5", ONE]) == 130
    said = capsys.readouterr()
    assert said.out == "w5w7\n" and said.err.endswith("jaxstack generate: interrupted\n")


def test_an_empty_stop_text_is_refused_before_anything_is_loaded(tmp_path, capsys):
    for more in ([], ["--stop", "end"]):
        assert command.main(["--run", str(tmp_path), "--prompt", "a", *more, "--stop", ""]) == 2
        assert "--stop must have at least one character" in capsys.readouterr().err


def test_a_wrong_run_and_a_bare_prompt_are_answered_with_what_was_meant(converted, capsys):
    folder = converted.parent
    assert f"did you mean {converted}?" in refused(capsys, "--run", str(folder / "qwen"))
    assert f"did you mean {converted}?" in refused(capsys, "--run", str(folder))
    assert "for a prompt add --prompt" in refused(capsys, "--run", str(converted), "once upon a time")
