"""Where the lm-evaluation-harness is installed: our log-likelihoods and answers are those of the model's logits, and
a task with known answers gets the score that it must get."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from tests.word_models import FIXTURES, as_words, make_word_model

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402

import jaxstack.evaluate as evaluate  # noqa: E402
from jaxstack.decoding.harness import HarnessModel  # noqa: E402
from jaxstack.errors import ConfigError  # noqa: E402
from jaxstack.models import from_huggingface  # noqa: E402
from jaxstack.run.load import load  # noqa: E402
from jaxstack.run.train import train  # noqa: E402
from jaxstack.run_config import load_config  # noqa: E402

pytestmark = pytest.mark.longer  # a few seconds each

LENGTH = 16


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_word_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def model(source) -> HarnessModel:
    generator = load(source, ["parallel.data=2", "parallel.tensor=2"]).text_generator()
    return HarnessModel(generator, max_length=LENGTH, batch_size=3)


@pytest.fixture(scope="module")
def logits(source) -> Any:
    """ids -> log-probabilities [T, V] by the whole forward, padded to one shape."""
    plain = from_huggingface(source)
    forward = jax.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)))

    def of(ids: list[int]) -> np.ndarray:
        return np.asarray(forward(plain, np.array([ids + [0] * (40 - len(ids))], np.int32))[0, : len(ids)])

    return of


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def score(logits: Any, before: list[int], wanted: list[int]) -> tuple[float, bool]:
    found = logits([*before, *wanted])[len(before) - 1 : -1]
    return float(found[np.arange(len(wanted)), wanted].sum()), found.argmax(-1).tolist() == wanted


def test_log_likelihoods_are_those_of_the_logits(model, logits):
    rows = [([5, 9, 2], [7]), ([5, 9, 2], [8, 9, 10]), ([], [3, 4]), ([50], [60, 61]), (list(range(1, 30)), [4, 5])]
    context = [5, 9, 2]
    likeliest = int(logits([0, *context])[-1].argmax())
    rows.append((context, [likeliest]))
    given = [(as_words(before), (" " if before else "") + as_words(wanted)) for before, wanted in rows]
    found = model.loglikelihood(requests("loglikelihood", *given))
    for (before, wanted), (value, greedy) in zip(rows, found, strict=True):
        whole = [0, *before, *wanted][-(LENGTH + 1) :]
        expected = score(logits, whole[: -len(wanted)], wanted)
        assert (value, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])
    assert found[-1][1]


def test_a_long_text_is_scored_in_windows_each_token_once(model, logits):
    """A window begins with the last token of the one before; the last one reaches back for more context."""
    ids = np.random.default_rng(0).integers(1, 64, 37).tolist()
    stream = [0, *ids]
    rest = 37 % LENGTH
    windows = [(stream[start : start + 1], stream[start + 1 : start + LENGTH + 1]) for start in (0, LENGTH)]
    windows.append((stream[-LENGTH - 1 : -rest], ids[-rest:]))
    expected = sum(score(logits, *window)[0] for window in windows)
    short, long = model.loglikelihood_rolling(requests("loglikelihood_rolling", (as_words(ids[:3]),), (as_words(ids),)))
    assert short == pytest.approx(score(logits, [0], ids[:3])[0], abs=1e-4)
    assert long == pytest.approx(expected, abs=1e-4)


def test_answers_end_where_they_should_and_do_not_depend_on_the_batch(model, logits):
    contexts = [as_words(range(1, n)) for n in (4, 12, 7, 3, 30)]
    greedy = {"until": ["w99"], "max_gen_toks": 5, "do_sample": False}
    answers = model.generate_until(requests("generate_until", *((context, greedy) for context in contexts)))
    for context, answer in zip(contexts, answers, strict=True):
        ids = [0, *(int(word[1:]) for word in context.split())][-(LENGTH - 5) :]
        for word in answer.split():
            assert int(word[1:]) == logits(ids)[-1].argmax()
            ids.append(int(word[1:]))
        assert len(answer.split()) == 5 or logits(ids)[-1].argmax() in (0, 63)
    drawn = {"until": [], "max_gen_toks": 5, "temperature": 1.0, "do_sample": True}
    several = model.generate_until(requests("generate_until", *((context, drawn) for context in contexts)))
    assert model.generate_until(requests("generate_until", (contexts[0], drawn)))[0] == several[0]
    stopped = {**greedy, "until": [several[1].split()[1]], "temperature": 1.0, "do_sample": True}
    asked = requests("generate_until", (contexts[0], drawn), (contexts[1], stopped))
    assert model.generate_until(asked)[1].split() == several[1].split()[:1]
    with pytest.raises(ConfigError, match="num_beams"):
        model.generate_until(requests("generate_until", (contexts[0], {"num_beams": 4})))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, logits) -> dict[str, Path]:
    """Multiple choice, of which three of four answers are the likelier ones; and two texts to go on with, one wrong."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = []
    for number in range(4):
        context = [10 + number, 20, 3]
        values = [score(logits, [0, *context], [choice, choice + 1])[0] for choice in (30, 40)]
        best = int(np.argmax(values))
        choices = [as_words([choice, choice + 1]) for choice in (30, 40)]
        questions.append({"question": as_words(context), "choices": choices, "answer": best if number else 1 - best})
    expected = load_file(FIXTURES / "llama" / "expected.safetensors")
    prompt = expected["tokens"][0, :6]
    texts = [{"question": as_words(prompt), "answer": " " + as_words(expected["greedy"][:6])}]
    texts.append({"question": as_words(prompt), "answer": " w1"})
    settings = {
        "choose": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        "go_on": {
            "output_type": "generate_until",
            "generation_kwargs": {"until": ["w99"], "max_gen_toks": 6, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    }
    for name, lines in (("choose", questions), ("go_on", texts)):
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, lines)))
        task = {
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}", **settings[name],
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return {name: folder / f"{name}.yaml" for name in settings}


def test_tasks_get_the_scores_that_they_must_get(source, tasks, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    said = ["--run", str(source), "parallel.data=1", "--batch-size", "2", "--tasks"]
    assert evaluate.main([*said, str(tasks["choose"]), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["step"] == 0 and values["tasks"]["choose"]["acc"] == 0.75
    more = ["--no-document-start", "--output", str(tmp_path / "out.json")]
    assert evaluate.main([*said, str(tasks["go_on"]), *more]) == 0  # transformers' texts have no document start
    assert "exact_match     0.5000 +- " in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["results"]["go_on"]["exact_match,none"] == 0.5


@pytest.mark.exhaustive
def test_a_task_that_there_is_not_gets_the_nearest_names(source, capsys):
    assert evaluate.main(["--run", str(source), "--tasks", "hellaswagg"]) == 2
    assert "did you mean 'hellaswag'" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_tasks_during_training(source, tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number}.txt").write_text(as_words(range(1 + number, 40)))
    tree = {
        "run": {"dir": str(tmp_path), "name": "tuned", "init_from": str(source)},
        "data": {
            "sources": [{"path": str(tmp_path / "texts")}], "cache_dir": str(tmp_path / "cache"),
            "held_out_fraction": 0.3,
        },
        "train": {
            "steps": 2, "global_batch_size": 8, "sequence_length": 16, "eval_every_steps": 1,
            "eval_tasks": [str(tasks["choose"])], "eval_tasks_limit": 3,
        },
        "optimizer": {"learning_rate": 1e-9},
        "parallel": {"fsdp": 4, "tensor": 2},
        "observe": {"trackers": ["jsonl"], "log_every": 1, "progress": False},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    train(load_config(tmp_path / "config.yaml"))
    lines = map(json.loads, (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines())
    found = [line["eval_choose_acc"] for line in lines if "eval_loss" in line]
    assert found == pytest.approx([2 / 3, 2 / 3])
