"""A result is stale if the code that it measured has changed; comments, docstrings and layout are no code."""

import subprocess

import pytest

from scripts.pages import stale

FILES = {
    "measured/code.py": '"""What it does."""\n\nx, y = 1, 2\n',
    "measured/settings.yaml": "# a comment\nsteps: 3\n",
    "measured/notes.md": "Notes.\n",
    "other/code.py": "x = 1\n",
}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit of two folders, in place of ours; returns its folder and the commit."""

    def git(*arguments: str) -> str:
        options = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", *options, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    stale.is_stale.cache_clear()
    yield tmp_path, git("rev-parse", "HEAD")
    stale.is_stale.cache_clear()


@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        ("measured/code.py", '"""Other words."""\nx, y = 1, 2  # why\n', False),
        ("measured/code.py", "x = 1\ny = 2\n", False),
        ("measured/code.py", "x, y = 1, 3\n", True),
        ("measured/code.py", "y, x = 1, 2\n", True),
        ("measured/code.py", None, True),
        ("measured/settings.yaml", "steps:   3\n", False),
        ("measured/settings.yaml", "steps: 4\n", True),
        ("measured/notes.md", "Other notes.\n", False),
        ("measured/new.py", "x = 5\n", False),
        ("other/code.py", "x = 2\n", False),
    ],
)
def test_only_code_below_the_paths_counts(repository, name, text, changed):
    folder, commit = repository
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    assert stale.is_stale(commit, ("measured",)) is changed
    assert stale.is_stale(commit, ("measured/code.py",)) is (changed and name == "measured/code.py")


def test_a_commit_that_lacks_the_code_or_is_unknown_is_stale(repository):
    _, commit = repository
    assert not stale.is_stale(commit, ("measured", "other/code.py"))
    assert stale.is_stale(commit, ("measured", "no/such.py"))
    assert stale.is_stale("0" * 40, ("measured",))


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ("def f():\n    'Doc.'\n    return 1\n", "def f():\n    return 1\n", True),
        ("if a:\n    b, c = 1, 2\n", "if a:\n    b = 1\n    c = 2\n", True),
        ("a, b = b, a\n", "a = b\nb = a\n", False),
        ("a, b = f()\n", "a = f()\nb = f()\n", False),
        ("x = 'text'\n", "x = 'other'\n", False),
    ],
)
def test_what_python_computes_is_compared(first, second, equal):
    assert (stale.read_code("x.py", first) == stale.read_code("x.py", second)) is equal
