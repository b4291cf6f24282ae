"""The text and questions of the benchmark of compressed models, and how its rows compare."""

import json
import re

import pytest

from benchmarks.compression.code_and_sums import CODE, HELD_OUT, SUMS, is_held_out, read_questions, write_work
from benchmarks.compression.compressed_models import BASE, check_folder, compare


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write_work(folder, megabytes=0.5, questions=20, sums=30)
    return folder


def texts(path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.longer
def test_names_are_asked_for_that_occurred_before_in_held_out_code(work):
    held_out = texts(work / HELD_OUT)
    assert not set(held_out) & set(texts(work / CODE))
    asked = read_questions(work)["cloze"]
    assert asked
    for context, answer in asked:
        assert answer.strip().isidentifier() and answer.strip() in context
        assert any(context + answer in text for text in held_out)


@pytest.mark.longer
def test_sums_that_are_asked_for_are_right_and_never_trained_on(work):
    numbers = re.compile(r"^([\d ]+) \+ ([\d ]+) = ([\d ]+)$", re.MULTILINE)

    def solved(text: str) -> list[tuple[int, ...]]:
        return [tuple(int(part.replace(" ", "")) for part in found) for found in numbers.findall(text)]

    trained = {pair for text in texts(work / SUMS) for pair in solved(text)}
    assert len(trained) > 500 and all(a + b == total and not is_held_out(a, b) for a, b, total in trained)
    asked = read_questions(work)["sums"]
    assert len(asked) == 20
    for context, answer in asked:
        *shown, (a, b, total) = solved(context + answer)
        assert len(shown) == 8 and a + b == total and is_held_out(a, b) and (a, b, total) not in trained


def test_a_recipe_that_was_stopped_keeps_what_it_measured():
    base = {"variant": BASE, "bytes": 200, "loss": 2.0, "milliseconds_by_rows": {"1": 1.0, "16": 2.0}}
    stopped = {"variant": "int8", "bytes": 100, "loss": 2.5, "failed": "hangs"}
    whole = {"variant": "fp8", "bytes": 100, "loss": 2.0, "milliseconds_by_rows": {"1": 0.5, "16": 1.0}}
    for row in (stopped, whole):
        compare(row, base)
    assert (stopped["smaller"], stopped["rise"], stopped["speedup_by_rows"]) == (2.0, 0.5, {})
    assert whole["speedup_by_rows"] == {"1": 2.0, "16": 2.0}


def test_a_folder_of_other_settings_is_refused(tmp_path, capsys):
    settings = {"size": "tiny", "tokens": 10.0, "megabytes": 1}
    check_folder(tmp_path, settings)
    (tmp_path / "run").mkdir()
    check_folder(tmp_path, settings)
    with pytest.raises(SystemExit) as ended:
        check_folder(tmp_path, {**settings, "tokens": 20.0})
    assert ended.value.code == 2 and "another --folder" in capsys.readouterr().err
    (tmp_path / "settings.json").unlink()
    with pytest.raises(SystemExit):
        check_folder(tmp_path, settings)
