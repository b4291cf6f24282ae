"""Find in texts what rewards look for: numbers, values of arithmetic expressions, code, JSON that fits a schema.

Texts come from a model. Nothing of them is evaluated as Python, and all work is bounded by the length of the text.
"""

import ast
import contextlib
import dataclasses
import functools
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from jaxstack.reinforce.sandbox import Program, Ran

_LONGEST = 4096
"""Number of characters of an expression, and of the end of a text that numbers are looked for in."""
_MOST_BITS = 4096
"""Size of numerators and denominators of intermediate results."""
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.(?!\d)|(?:\.\d+)?)(?:(?<=[\d.])[eE][-+]?\d+(?!\w))?"
    r"(?:(?<=\d)\s*/\s*\d+(?![\d.]))?"
)
_SIGNS = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "\u00a0": " ", "\u202f": " "})


class NoValueError(ValueError):
    """Raised for a text that has no number, or no expression that can be evaluated."""


def boxed(text: str) -> str | None:
    r"""Return what is in the last `\boxed{...}` of a text, whose braces may be nested; None if there is none."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    begin = start + len(r"\boxed{")
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None


def final_number(text: str) -> Fraction:
    r"""Return the number that a text gives as its answer.

    It is the last number in the last `\boxed{...}`; without a box, the first number after the last `####`, as in GSM8K;
    or else the last number of the text. Numbers may have a sign, thousands separated by commas, an exponent, and a
    denominator: `1,234.5`, `-3/4`, `\frac{3}{4}`, `2e-3`. Signs of currency and percent are left out.

    Raises:
      NoValueError: there is no number.
    """
    inside = boxed(text)
    _, marked, after = text.rpartition("####")
    if inside is not None:
        return _numbers(inside)[-1]
    if marked and (found := _numbers(after, required=False)):
        return found[0]
    return _numbers(text)[-1]


def _numbers(text: str, required: bool = True) -> list[Fraction]:
    text = re.sub(r"\\[dt]?frac\{(-?[\d.]+)\}\{([\d.]+)\}", r"\1/\2 ", text[-_LONGEST:].translate(_SIGNS))
    text = re.sub(r"[$€£]|\\[,!$]", "", text)
    found = []
    for match in _NUMBER.finditer(text):
        word = match.group().replace(",", "").replace(" ", "").lstrip("+")
        if any(character.isdigit() for character in word):
            try:
                found.append(_number(word))
            except (ValueError, ZeroDivisionError):
                continue
    if required and not found:
        raise NoValueError("the text has no number")
    return found


def _number(word: str) -> Fraction:
    over, _, under = word.partition("/")
    exponent = over.lower().partition("e")[2].lstrip("+-")
    if len(exponent) > 3:
        raise ValueError(word)
    return Fraction(over.rstrip(".") or "0") / Fraction(under or "1")


def equal_numbers(found: Fraction, wanted: Fraction, tolerance: float) -> bool:
    """Return True if two numbers differ by at most `tolerance` times the size of the wanted one, or of 1 if smaller."""
    return abs(found - wanted) <= Fraction(tolerance) * max(abs(wanted), 1)


_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(text: str) -> tuple[Fraction, Counter[Fraction]]:
    r"""Return the value of an arithmetic expression, exactly, and the numbers that it is made of.

    An expression has numbers, + - * / // %, powers (`^` or `**`) with whole exponents, and parentheses; of LaTeX
    `\frac`, `\cdot`, `\times`, `\left` and `\right`. It is parsed, never executed.

    Raises:
      NoValueError: the text is no such expression, has more than 4,096 characters, divides by zero, or its value needs
        more than 4,096 bits.
    """
    if len(text) > _LONGEST:
        raise NoValueError(f"an expression has at most {_LONGEST:,} characters; found {len(text):,}")
    for pattern, replacement in (
        (r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))"),
        (r"\\(?:cdot|times)\b", "*"),
        (r"\\(?:left|right)\b|[$,]", ""),
        (r"\^\{([^{}]*)\}", r"**(\1)"),
        (r"\^", "**"),
    ):
        text = re.sub(pattern, replacement, text.translate(_SIGNS))
    used = Counter[Fraction]()
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError, OverflowError) as error:
        if isinstance(error, NoValueError):
            raise
        raise NoValueError(f"{text[:80]!r} is no arithmetic expression with a value") from None
    return value, used


def _value(node: ast.expr, used: Counter[Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if not math.isfinite(number):
                raise NoValueError("a number is too large")
            value = Fraction(str(number)) if isinstance(number, float) else Fraction(number)
            used[value] += 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            value = _value(operand, used)
            value = -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base = _value(left, used)
            exponent = _value(right, used)
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if exponent.denominator != 1 or abs(exponent) * bits > _MOST_BITS:
                raise NoValueError(f"exponents are whole numbers and powers have at most {_MOST_BITS:,} bits")
            value = base ** int(exponent)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
            value = Fraction(_OPERATORS[type(operation)](_value(left, used), _value(right, used)))
        case _:
            raise NoValueError(f"{ast.unparse(node)[:80]!r} is no arithmetic")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise NoValueError(f"a value needs more than {_MOST_BITS:,} bits")
    return value


def final_expression(text: str) -> list[str]:
    r"""Return the sides of the equation that a text gives as its answer, of which one or several are expressions.

    The equation is that of the last `\boxed{...}`, or else of the last line with a digit.
    """
    inside = boxed(text)
    if inside is None:
        lines = [line for line in text.splitlines() if any(character.isdigit() for character in line)]
        if not lines:
            raise NoValueError("the text has no expression")
        inside = lines[-1]
    return [side.strip(" .\t`") for side in inside.split("=") if side.strip(" .\t`")]


def code_of(answer: str) -> str:
    """Return the code of an answer: its last block in a Markdown fence, or the whole answer if it has none."""
    blocks = re.findall(r"^```[^\n`]*\n(.*?)(?:^```|\Z)", answer, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks else answer


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tests of a program.

    Attributes:
      programs: what runs in the sandbox.
      checks: for each program and each of its steps, or its output, whether a result is right.
      counted: which of these are tests, the others only prepare them.
    """

    programs: Sequence[Program]
    checks: Sequence[Sequence[Callable[[Any], bool]]]
    counted: Sequence[Sequence[bool]]

    def passed(self, ran: Sequence[Ran]) -> list[bool]:
        """Return for each test whether it passed."""
        results = []
        for program, did, checks, counted in zip(self.programs, ran, self.checks, self.counted, strict=True):
            if program.stdin is not None:
                results.append(did.problem is None and checks[0](did.output))
                continue
            values = [*did.steps, *[(False, None)] * (len(checks) - len(did.steps))]
            good = [fine and _holds(check, value) for (fine, value), check in zip(values, checks, strict=True)]
            prepared = all(x for x, test in zip(good, counted, strict=True) if not test)
            results += [prepared and x for x, test in zip(good, counted, strict=True) if test]
        return results


def suite(code: str, tests: Any) -> Suite:
    """Return tests for a program.

    Args:
      code: the program.
      tests: Python with assertions, a list of such texts, or of `{"input", "output"}`; see `UnitTests`.

    Raises:
      ValueError: they are none of these.
      SyntaxError: they are not Python.
    """
    entries = tests if isinstance(tests, list) else [tests]
    if entries and all(isinstance(x, Mapping) and {"input", "output"} <= set(x) for x in entries):
        programs = [Program(code, stdin=str(x["input"])) for x in entries]
        checks = [[functools.partial(_same_output, str(x["output"]))] for x in entries]
        return Suite(programs, checks, [[True]] * len(entries))
    if not entries or not all(isinstance(x, str) for x in entries):
        raise ValueError("tests are Python with assertions, a list of such texts, or of objects with input and output")
    steps = [_step(node) for text in entries for node in ast.parse(text).body]
    asserts = [is_test for *_, is_test in steps]
    counted = asserts if any(asserts) else [True] * len(steps)
    if not steps:
        raise ValueError("the tests are empty")
    return Suite([Program(code, [step for step, *_ in steps])], [[check for _, check, _ in steps]], [counted])


_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


def _step(node: ast.stmt) -> tuple[tuple[Literal["run", "value"], str], Callable[[Any], bool], bool]:
    """Return a statement of tests as a step of a program, the check of its result, and whether it is a test."""
    match node:
        case ast.Assert(test=ast.Compare(left=left, ops=[operation], comparators=[right])):
            with contextlib.suppress(ValueError, TypeError):
                compare = _COMPARISONS[type(operation)]
                if isinstance(operation, ast.Eq) and _is_literal(left):
                    left, right = right, left
                return (
                    ("value", ast.unparse(left)),
                    functools.partial(_compares, compare, ast.literal_eval(right)),
                    True,
                )
        case ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=wanted)):
            return ("value", f"bool({ast.unparse(wanted)})"), functools.partial(operator.is_, False), True
        case _:
            pass
    if isinstance(node, ast.Assert):
        return ("value", f"bool({ast.unparse(node.test)})"), functools.partial(operator.is_, True), True
    return ("run", ast.unparse(node)), functools.partial(operator.is_, None), False


def _compares(compare: Callable[[Any, Any], Any], literal: Any, value: Any) -> bool:
    return bool(compare(value, literal))


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True


def _holds(check: Callable[[Any], bool], value: Any) -> bool:
    try:
        return check(value)
    except Exception:  # such as a text compared with a number
        return False


def _same_output(wanted: str, found: str) -> bool:
    """Return True if two outputs have the same lines, white space at their ends and empty lines at the end aside."""
    lines = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (wanted, found))
    return operator.eq(*lines)


_JSON_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda x: isinstance(x, dict),
    "array": lambda x: isinstance(x, list),
    "string": lambda x: isinstance(x, str),
    "boolean": lambda x: isinstance(x, bool),
    "null": lambda x: x is None,
    "number": lambda x: isinstance(x, int | float) and not isinstance(x, bool),
    "integer": lambda x: (isinstance(x, int) and not isinstance(x, bool)) or (isinstance(x, float) and x.is_integer()),
}


def _same(a: object, b: object) -> bool:
    """Return True if two values are the same JSON, in which true is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True) or (
        _is_number(a) and _is_number(b) and a == b
    )


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


_LIMITS: Mapping[str, tuple[type | tuple[type, ...], Callable[[Any, Any], bool]]] = {
    "minimum": ((int, float), lambda x, limit: x >= limit),
    "maximum": ((int, float), lambda x, limit: x <= limit),
    "exclusiveMinimum": ((int, float), lambda x, limit: x > limit),
    "exclusiveMaximum": ((int, float), lambda x, limit: x < limit),
    "multipleOf": ((int, float), lambda x, unit: (Fraction(str(x)) / Fraction(str(unit))).denominator == 1),
    "minLength": (str, lambda x, limit: len(x) >= limit),
    "maxLength": (str, lambda x, limit: len(x) <= limit),
    "pattern": (str, lambda x, pattern: re.search(pattern, x) is not None),
    "minItems": (list, lambda x, limit: len(x) >= limit),
    "maxItems": (list, lambda x, limit: len(x) <= limit),
    "uniqueItems": (list, lambda x, on: not on or len({json.dumps(y, sort_keys=True) for y in x}) == len(x)),
    "minProperties": (dict, lambda x, limit: len(x) >= limit),
    "maxProperties": (dict, lambda x, limit: len(x) <= limit),
    "required": (dict, lambda x, keys: all(key in x for key in keys)),
}
"""Keyword -> the type that it limits, and whether a value of the type is within the limit."""
_SUBSCHEMAS = ("items", "additionalProperties", "not")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_TABLES_OF_SCHEMAS = ("properties", "$defs", "definitions")
_REMARKS = ("$schema", "$id", "$comment", "title", "description", "default", "examples", "format")
_OTHERS = ("type", "enum", "const", "$ref")


def check_schema(schema: object) -> None:
    """Check that a JSON schema has only the keywords that `fits_schema` knows.

    Raises:
      ValueError: it has another one.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema is an object or a truth value; found {schema!r:.80}")
    known = (*_LIMITS, *_SUBSCHEMAS, *_LISTS_OF_SCHEMAS, *_TABLES_OF_SCHEMAS, *_REMARKS, *_OTHERS)
    if unknown := sorted(set(schema) - set(known)):
        raise ValueError(f"the JSON schema has keywords that are not supported: {', '.join(unknown)}")
    for key in _SUBSCHEMAS:
        check_schema(schema.get(key, True))
    for key in _LISTS_OF_SCHEMAS:
        for part in schema.get(key, ()):
            check_schema(part)
    for key in _TABLES_OF_SCHEMAS:
        for part in schema.get(key, {}).values():
            check_schema(part)


def fits_schema(value: object, schema: Any, root: Any = None) -> bool:
    """Return True if a value of JSON fits a JSON schema (draft 2020-12, with the keywords of `check_schema`)."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for key in schema["$ref"].lstrip("#").strip("/").split("/"):
            target = target[key.replace("~1", "/").replace("~0", "~")] if key else target
        if not fits_schema(value, target, root):
            return False
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_JSON_TYPES[name](value) for name in types):
        return False
    if "enum" in schema and not any(_same(value, x) for x in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    for key, (kind, within) in _LIMITS.items():
        if key in schema and isinstance(value, kind) and not isinstance(value, bool) and not within(value, schema[key]):
            return False
    return _parts_fit(value, schema, root)


def _parts_fit(value: object, schema: Mapping[str, Any], root: Any) -> bool:
    if isinstance(value, dict):
        known = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        if not all(fits_schema(x, known.get(key, rest), root) for key, x in value.items()):
            return False
    if isinstance(value, list):
        first: Sequence[Any] = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        if not all(fits_schema(x, first[i] if i < len(first) else rest, root) for i, x in enumerate(value)):
            return False
    fitting = {
        key: [fits_schema(value, x, root) for x in schema[key]] for key in _LISTS_OF_SCHEMAS[:3] if key in schema
    }
    return (
        any(fitting.get("anyOf", [True]))
        and sum(fitting.get("oneOf", [True])) == 1
        and all(fitting.get("allOf", []))
        and not ("not" in schema and fits_schema(value, schema["not"], root))
    )
