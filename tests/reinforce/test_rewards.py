"""Rewards: what each of them gives, and that none of them ends a run."""

import math

import pytest
from pydantic import TypeAdapter

from jaxstack.errors import ConfigError
from jaxstack.reinforce.rewards import AnyReward, Rewards, Sample, check_columns
from jaxstack.reinforce.scorers import imported


def made(*entries: dict) -> Rewards:
    return Rewards(TypeAdapter(list[AnyReward]).validate_python(list(entries)))


def rewarded(answer: str, column: object, **entry) -> float:
    sample = Sample("prompt", answer, {"answer": column, "numbers": [3, 4, 5]}, tokens=len(answer))
    with made(entry) as rewards:
        [result] = rewards([sample])
    assert result.error is None
    assert result.total == next(iter(result.parts.values())) * entry.get("weight", 1.0)
    return result.total


@pytest.mark.parametrize(
    ("reward", "answer", "column", "expected"),
    [
        ("exact", " 12348\n", "12348", 1),
        ("exact", "12348 ", ["1", "12348"], 1),
        ("exact", "1234", "12348", 0),
        ("exact", "5", 5, 1),
        ("contains", "Paris, the capital", ["Paris", "Rome"], 0.5),
        ("number", r"2 + 3, so \boxed{\frac{3}{4}}, not 7", 0.75, 1),
        ("number", r"\boxed{-\frac{1}{2}}", "-1/2", 1),
        ("number", "it costs $1,234.50.", "1234.5", 1),
        ("number", "12 - 5 = −7", -7, 1),
        ("number", "2024-17", 17, 1),
        ("number", "4 apples\n#### 42 of 50", "6*7=<<42>>\n#### 42", 1),
        ("number", "1e999999999", 1, 0),
        ("number", "none", 1, 0),
        ("number", "0.3333333333", "1/3", 1),
        ("number", "100001", "100000", 0),
        ("expression", "so\n(3 + 4) * 5 = 35", "35", 1),
        ("expression", r"$\frac{70}{2}$", 35, 1),
        ("expression", "2^5+3", 35, 1),
        ("expression", "9**9**9**9", 1, 0),
        ("expression", "(" * 500 + "1" + ")" * 500, 1, 0),
        ("expression", "__import__('os').getpid() * 0 + 1", 1, 0),
        ("expression", "1/0", 1, 0),
    ],
)
def test_what_a_reward_gives(reward, answer, column, expected):
    assert rewarded(answer, column, name=reward) == expected


@pytest.mark.parametrize(("answer", "expected"), [("(3 + 4) * 5", 1), ("35 = 5 * 7", 0), ("3 * 4 * 5 - 25", 0)])
def test_an_expression_of_given_numbers(answer, expected):
    assert rewarded(answer, 35, name="expression", numbers="numbers") == expected


@pytest.mark.parametrize(("length", "expected"), [(80, 0), (95, -0.75), (100, -1), (120, -1)])
def test_long_answers_cost(length, expected):
    assert rewarded("x" * length, "", name="length", limit=100, buffer=20) == expected


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "size": {"$ref": "#/$defs/size"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"size": {"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["small", None]}]}},
}


@pytest.mark.longer
def test_patterns_and_schemas_are_tried_in_another_process():
    """Also an expression that takes forever: only its sample goes without a reward."""
    answers = {
        '{"name": "a", "size": 2}': 1,
        '```json\n{"name": "a", "size": null}\n```': 1,
        '{"name": "a", "size": true}': 0,
        '{"name": ""}': 0,
        '{"name": "a", "other": 1}': 0,
        "[" * 100_000: 0,
        "a" * 60 + "!": 0,
    }
    regex = {"name": "regex", "pattern": "(a+)+b|size", "time_limit": 0.2, "weight": 2}
    with made({"name": "json_schema", "schema": SCHEMA}, regex) as rewards:
        results = rewards([Sample("", answer, {}) for answer in answers])
    assert [result.parts["json_schema"] for result in results] == list(answers.values())
    assert [result.parts["regex"] for result in results] == [1, 1, 1, 0, 0, 0, 0]
    assert [result.error for result in results] == [None] * 6 + ["regex: took more than 0.2 s and was ended"]
    assert results[0].total == 3


FUNCTION = """
import os, time

def reward(samples):
    return [{"raise": raised, "end": ended, "hang": hung}.get(x.answer, number)(x) for x in samples]

def number(sample): return sample.columns["value"]
def raised(sample): raise KeyError(sample.answer)
def ended(sample): os._exit(3)
def hung(sample): time.sleep(100)
"""


@pytest.mark.longer
def test_a_function_that_fails_costs_only_its_sample(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    answers = ["one", "raise", "end", "hang", "nan", "one"]
    with made({"name": "python", "path": f"{tmp_path}/mine.py:reward", "time_limit": 0.4}) as rewards:
        results = rewards([Sample("", x, {"value": math.nan if x == "nan" else 1}) for x in answers])
    assert [result.total for result in results] == [1, 0, 0, 0, 0, 1]
    told = [result.error or "" for result in results]
    assert told[0] == told[5] == ""
    for text, part in zip(
        told[1:5], ("KeyError: 'raise' (mine.py:8)", "exit code 3", "more than 0.4 s", "nan"), strict=True
    ):
        assert part in text


def test_what_is_wrong_is_found_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="exact needs the column 'answer' in data.jsonl, which has 'label'"):
        check_columns(TypeAdapter(list[AnyReward]).validate_python([{"name": "exact"}]), ["label"], "data.jsonl")
    (tmp_path / "mine.py").write_text("import nothing_of_this_name")
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError"):
        made({"name": "python", "path": f"{tmp_path}/mine.py:reward"})


def test_a_wrong_path_of_a_function_is_told_with_what_there_is(tmp_path):
    (tmp_path / "my_rewards.py").write_text("import math\nlimit = 3\ndef short(samples): pass\nclass Guess: pass\n")
    for path, message in (
        ("my_reward.py:short", f"there is no file {tmp_path}/my_reward.py; did you mean 'my_rewards.py'?"),
        ("my_rewards.py:shrt", "has no function or class shrt; did you mean 'short'?"),
        ("my_rewards.py:limit", "has no function or class limit; choose one of: 'Guess', 'short'"),
    ):
        with pytest.raises(ConfigError) as caught:
            imported(f"{tmp_path}/{path}")
        assert str(caught.value).endswith(message)


def test_without_rewards_each_sample_has_none():
    with Rewards([]) as rewards:
        assert [result.total for result in rewards([Sample("", "5", {})])] == [0.0]


def test_a_record_without_a_column_has_no_reward():
    with made({"name": "exact"}) as rewards:
        [result] = rewards([Sample("", "5", {"label": 5})])
    assert (result.total, result.error) == (
        0,
        "exact: ValueError: the record has no column 'answer'; its columns: label",
    )


def test_generated_code_is_tested():
    """Only the code that does the work passes, whatever else it says; expected values stay outside."""
    tests = [
        "import math\nassert f(2) == 4\nassert (9, [3]) == (f(3), [3])",
        "assert not f(0)\nassert f(1) in (1, 2)\nassert math.isclose(f(0.5), 0.25)",
    ]
    cheat = "class A:\n  def __eq__(self, other): return True\n  def __bool__(self): return True\ndef f(x): return A()"
    answers = {
        "```python\ndef f(x):\n    return x * x\n```": 1,
        "def f(x): return x * x\nprint('OK')": 1,
        "def f(x): return x * 2": 0.6,
        cheat: 0,
        "import os\nprint('passed')\nos._exit(0)": 0,
        "def f(x) return": 0,
        "def f(x):\n  while True: pass": 0,
    }
    entry = {"name": "unit_tests", "time_limit": 0.5, "workers": 2}
    with made({**entry, "partial": True}, entry) as rewards:
        results = rewards([Sample("", answer, {"tests": tests}) for answer in answers])
        reads = Sample(
            "", "a, b = map(int, input().split())\nprint(a + b)", {"tests": [{"input": "2 3\n", "output": "5"}]}
        )
        wrong = Sample("", "", {"tests": 5})
        others = rewards([reads, wrong])
    assert [result.parts["unit_tests"] for result in results] == pytest.approx(list(answers.values()))
    assert [result.parts["unit_tests_2"] for result in results] == [int(x) for x in answers.values()]
    assert all(result.error is None for result in results)
    assert [result.total for result in others] == [2, 0]
    assert "unit_tests: ValueError: tests are Python" in (others[1].error or "")
