"""Row 16: nothing in the project runs code that it finds in data, and no configuration file ends in a traceback."""

import ast
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from jaxstack.errors import ConfigError
from jaxstack.run_config import load_config
from tests.reliability.runs import REPOSITORY

SCANNED = ("jaxstack", "pallas_kernels", "scripts", "benchmarks")
SANDBOX = "jaxstack/reinforce/sandbox_worker.py"
"""Runs generated code, which is its purpose, in processes with limits; `tests/reinforce/test_sandbox.py` attacks it."""
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {"yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.unsafe_load_all", "torch.load", "os.system",
         "os.popen", "numpy.fromregex", "pandas.read_pickle"}  # fmt: skip
KEYWORDS = {"allow_pickle", "trust_remote_code", "shell"}


def dangers(source: str) -> list[str]:
    """What in a Python file could run code that came as data: `LINE: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        what = None
        if isinstance(node, ast.Import):
            what = next((a.name for a in node.names if a.name.split(".")[0] in MODULES), None)
        elif isinstance(node, ast.ImportFrom):
            what = node.module if (node.module or "").split(".")[0] in MODULES else None
        elif isinstance(node, ast.Call):
            what = _danger_of_call(node)
        if what:
            found.append(f"{getattr(node, 'lineno', 0)}: {what}")
    return found


def _danger_of_call(node: ast.Call) -> str | None:
    name = ast.unparse(node.func)
    if name in BUILTINS or name in CALLS:
        return name
    loaders = [k.value for k in node.keywords if k.arg == "Loader"] + node.args[1:2]
    if name == "yaml.load" and not (loaders and ast.unparse(loaders[0]) in ("_Loader", "yaml.SafeLoader")):
        return "yaml.load without a safe loader"
    for keyword in node.keywords:
        if keyword.arg in KEYWORDS and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
            return f"{keyword.arg}={ast.unparse(keyword.value)}"
    return None


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from dill import loads", "eval('1')", "exec(x)", "yaml.load(x)", "yaml.load(x, yaml.Loader)",
     "np.load(p, allow_pickle=True)", "f(trust_remote_code=flag)", "subprocess.run(c, shell=True)", "torch.load(p)"],
)  # fmt: skip
def test_the_scan_sees(code):
    assert dangers(code)


def test_the_code_runs_nothing_that_it_finds_in_data(record):
    files = [path for folder in SCANNED for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    found = {str(path.relative_to(REPOSITORY)): dangers(path.read_text(encoding="utf-8")) for path in files}
    assert [name for name, lines in found.items() if lines] == [SANDBOX]
    assert "class _Loader(yaml.SafeLoader)" in (REPOSITORY / "jaxstack" / "config" / "loader.py").read_text()
    record(
        16, "static scan", f"{len(files)} files: no pickle, eval, exec, unsafe yaml, allow_pickle, trust_remote_code"
    )


VALUES = [
    "null", "true", "-1", "0", "1e400", ".nan", "-.inf", "10000000000000000000000", "''", "'x'", "[]", "{}", "[1, [2]]",
    "{a: {b: 1}}", "2001-01-01", "!!binary aGk=", "!!set {a}", "&a [*a]", "*missing", "\"\\0\"", "../../../etc/passwd",
    "'{__import__(\"os\").system(\"touch MARK\")}'", "!!python/object/apply:os.system ['touch MARK']",
    "!!python/name:os.system", "!!python/object/new:subprocess.Popen [[touch, MARK]]", "$(touch MARK)", "`touch MARK`",
    "!!python/module:this", "{$ref: MARK}", "💥", "0x7fffffffffffffff", "1_000", "~", "- 3", "? x", "%TAG", "@", "\t",
]  # fmt: skip


def fuzzed(chance: random.Random, base: list[str], mark: Path) -> tuple[str, list[str]]:
    """A configuration file with a few lines broken, and overrides."""
    lines = list(base)
    for _ in range(chance.randint(1, 4)):
        i = chance.randrange(len(lines))
        kind = chance.randrange(7)
        value = chance.choice(VALUES).replace("MARK", str(mark))
        if kind <= 2:
            lines[i] = lines[i].partition(":")[0] + ": " + value
        elif kind == 3:
            lines[i] = lines[i].replace(chance.choice("aeiou"), chance.choice("xé:{}[]#&*!|>'\"%@`"), 1)
        elif kind == 4:
            lines.insert(i, lines[chance.randrange(len(lines))])
        elif kind == 5:
            del lines[i : i + chance.randint(1, 3)]
            lines = lines or ["a: 1"]
        else:
            lines[i] = " " * chance.randint(1, 3) + lines[i]
    keys = [
        f"{s}.{k}" for s in ("train", "model", "parallel", "optimizer", "data") for k in ("steps", "name", "path", "")
    ]
    overrides = [f"{chance.choice(keys)}={chance.choice(VALUES)}".replace("MARK", str(mark))]
    return "\n".join(lines), overrides if chance.random() < 0.3 else []


def test_fuzzed_configurations(tmp_path, full, record):
    """In one process each is read or refused with one message; a few go through the real command."""
    count = 1000 if full else 200
    chance = random.Random(16)
    mark = tmp_path / "mark"
    bases = [p.read_text(encoding="utf-8").splitlines() for p in sorted((REPOSITORY / "configs").glob("*.yaml"))]
    refused = []
    path = tmp_path / "fuzzed.yaml"
    for _ in range(count):
        text, overrides = fuzzed(chance, chance.choice(bases), mark)
        path.write_text(text, encoding="utf-8")
        try:
            load_config(path, overrides)
        except ConfigError as error:
            assert str(error).strip() and "Traceback" not in str(error)
            refused.append((text, overrides))
    assert len(refused) > count // 3 and not mark.exists()
    for text, overrides in refused[: 5 if full else 1]:
        path.write_text(text, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            [sys.executable, "-m", "jaxstack.train", "--print-config", "--config", path, "--", *overrides],
            capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2 and "jaxstack train: " in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    assert not mark.exists()
    record(16, f"{count} fuzzed configurations", f"{len(refused)} refused with one message, no traceback, no code run")
