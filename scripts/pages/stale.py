"""Tells whether the code that a result measured has changed since its commit."""

import ast
import functools
import subprocess

import yaml

from scripts.pages.rows import ROOT

NO_CODE = (".pyi", ".md")
"""Ends of the names of files that no program runs."""


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@functools.cache
def has_history() -> bool:
    """Return True if the commits of rows can be looked up: in a clone with its whole history."""
    try:
        return _git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
    except OSError:
        return False


@functools.cache
def is_stale(commit: str, code: tuple[str, ...]) -> bool:
    """Return True if code below the paths `code` differs from that of a commit, or the commit lacks one of the paths.

    Comments and docstrings are no code, see `read_code`. Files that are new are not compared: what was there runs them
    only if it has changed itself.

    Args:
      commit: of this repository's history; one that is unknown has none of the paths.
      code: files and folders, relative to the root.
    """
    if any(_git("cat-file", "-e", f"{commit}:{path}").returncode for path in code):
        return True
    changed = _git("diff", "--name-only", "--no-renames", "--diff-filter=a", "-z", commit, "--", *code).stdout
    return any(_differs(commit, path) for path in changed.split("\0") if path and not path.endswith(NO_CODE))


def _differs(commit: str, path: str) -> bool:
    """Return True if a file that a commit has is gone, or has other code now."""
    now = ROOT / path
    before = _git("show", f"{commit}:{path}").stdout
    return not now.exists() or read_code(path, before) != read_code(path, now.read_text(encoding="utf-8"))


def read_code(path: str, text: str) -> object:
    """Return the code of a file, to be compared with that of another version of it.

    This is the syntax tree of Python, without strings that are statements (docstrings) and with `a, b = x, y` as two
    assignments, or the values of YAML; both are without comments and layout. Of other files it is the text.
    """
    if path.endswith(".yaml"):
        return yaml.safe_load(text)
    if not path.endswith(".py"):
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list):
                setattr(node, name, [part for statement in block for part in _separated(statement)])
    return ast.dump(tree)


def _separated(statement: ast.stmt) -> list[ast.stmt]:
    """Return a statement; nothing for a docstring, several for assignments in parallel that can follow one another."""
    match statement:
        case ast.Expr(ast.Constant(str())):
            return []
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
            read = {node.id for value in values for node in ast.walk(value) if isinstance(node, ast.Name)}
            if all(isinstance(target, ast.Name) and target.id not in read for target in targets):
                return [ast.Assign([target], value) for target, value in zip(targets, values, strict=True)]
    return [statement]
