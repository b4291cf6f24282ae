"""Constraints of answers: what is compiled, kept, limited, and told if the library gives up."""

import json
import time

import numpy as np
import pytest

from jaxstack.decoding.requests import ConstraintFailed
from jaxstack.errors import ConfigError
from tests.serve.tiny import TOKENIZER

pytest.importorskip("llguidance")
from jaxstack.serve import grammar
from jaxstack.serve.grammar import GrammarConstraint, Grammars


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(TOKENIZER, {256})


def follows(constraint: GrammarConstraint, text: str) -> bool:
    """Whether the constraint allows each character; it must not be complete before the last one."""
    mask = np.zeros(9, np.int32)
    for place, byte in enumerate(text.encode()):
        constraint.fill_mask(mask)
        if not mask[byte // 32] >> byte % 32 & 1:
            return False
        assert constraint.accept(byte) or place == len(text.encode()) - 1
    return True


def test_large_schemas_and_long_lists_of_choices_are_followed_to_their_end(grammars):
    schema = {"type": "object", "properties": {f"key_{i}": {"type": "string"} for i in range(600)}}
    assert follows(grammars.compile("json", schema), '{"key_0":"a","key_599":"b"}')
    choices = [f"choice {i}" for i in range(2000)]
    for text, allowed in (("choice 1999", True), ("choice x", False)):
        assert follows(grammars.compile("choice", choices), text) == allowed


def test_a_constraint_that_takes_long_holds_up_no_other_answers(grammars, monkeypatch):
    """The first mask of a long counted repetition takes most of a second; it is computed once, with the grammar."""
    constraint = grammars.compile("regex", "x{100000}")
    mask = np.zeros(9, np.int32)
    began = time.thread_time()
    constraint.fill_mask(mask)
    assert time.thread_time() - began < 0.1
    monkeypatch.setattr(grammar, "_FREE_SECONDS", 0.0)
    monkeypatch.setattr(grammar, "_SECONDS_PER_TOKEN", 1e-6)
    with pytest.raises(ConstraintFailed, match="holds up other answers; simplify"):
        assert constraint.accept(ord("x"))
        for _ in range(100):
            constraint.fill_mask(mask)
            constraint.accept(ord("x"))


def test_an_error_of_the_library_is_an_error_and_not_the_end_of_the_answer(grammars):
    constraint = grammars.compile("choice", ["red"])
    constraint.fill_mask(np.zeros(9, np.int32))
    with pytest.raises(ConstraintFailed, match="cannot be constrained further"):
        constraint.accept(ord("x"))


@pytest.mark.longer
def test_more_than_the_library_compiles_is_refused(grammars):
    with pytest.raises(ConfigError, match="too big"):
        grammars.compile("choice", [f"choice {i}" for i in range(200_000)])


@pytest.mark.longer
def test_grammars_on_which_the_library_crashes_or_hangs_are_refused():
    """References in a chain overflow the stack; many terminals that refer to each other compile for minutes."""
    grammars = Grammars(TOKENIZER, {256}, seconds=1.0)
    chain = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(5000)}
    schema = {"$ref": "#/$defs/d0", "$defs": chain | {"d5000": {"type": "string"}}}
    rules = "start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | "x"\n' for i in range(30_000)) + 'r30000: "y"'
    for kind, value in (("json", schema), ("grammar", rules)):
        with pytest.raises(ConfigError, match=r"nested too deeply|within 1 s"):
            grammars.compile(kind, value)
    with pytest.raises(ConfigError, match="it does not compile within 1 s"):
        grammars.compile("regex", "a?" * 50_000 + "a" * 50_000)
    nested = {"type": "string"}
    for _ in range(50):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    assert follows(grammars.compile("json", nested), '{"a":' * 50 + '"b"' + "}" * 50)


def test_the_same_grammar_is_compiled_once_and_its_answers_are_independent(grammars, monkeypatch):
    compiled = []
    compile_it = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, *key: compiled.append(key) or compile_it(self, *key))
    first, *others = [grammars.compile("json", {"type": "integer"}) for _ in range(200)]
    assert len(compiled) == 1 and follows(first, "123")
    assert all(follows(other, "77") for other in others[:3])
    grammars.compile("json", {"type": "string"})
    assert len(compiled) == 2


def test_white_space_between_values_is_limited(grammars):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for text in (json.dumps({"a": 1}), json.dumps({"a": 1}, indent=4), '{"a":1}'):
        assert follows(grammars.compile("json", schema), text)
    for text in ("{" + "\n" * 9, "{" + " " * 9, "{\n" + " " * 33, "{\t\t"):
        assert not follows(grammars.compile("json", schema), text)


@pytest.mark.parametrize(
    ("regex", "reason"), [("(a|b", "unclosed group"), ("a(?=b)", "look-around, including look-ahead and look-behind")]
)
def test_the_reason_of_a_wrong_regex_is_told(grammars, regex, reason):
    with pytest.raises(ConfigError, match=reason) as told:
        grammars.compile("regex", regex)
    assert "\n" not in str(told.value)
