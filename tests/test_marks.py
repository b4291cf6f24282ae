"""What decides which tests the default command runs: calls that exist, and a test of each module."""

import importlib
import pkgutil
from pathlib import Path

import pytest

from tests.marks import _CALLS, _MODULES, SHOWN_ELSEWHERE, SLOW_MARKS, mark_slow_tests
from tests.small_runs import make_trainer
from tests.test_train_command import run

TESTS = Path(__file__).parent
TESTED_ELSEWHERE = {
    "jaxstack/data/augmentations": "data/test_augmentations.py",
    "jaxstack/functional": "test_trainer.py",
    "jaxstack/observe/report": "observe/test_report.py",
    "jaxstack/optim/optimizers": "optim/test_build.py",
}
"""Package without a folder of tests -> the module that tests it."""


@pytest.fixture
def starts_python():
    return run


def trains():
    return make_trainer


def trains_through_another():
    return trains()


@pytest.mark.parametrize("name", sorted({name for names in _CALLS.values() for name in names}))
def test_names_that_earn_a_mark_exist(name):
    if name.endswith("."):
        importlib.import_module(name.removesuffix("."))
    else:
        found = pkgutil.resolve_name(name)
        assert f"{found.__module__}.{found.__qualname__}" == name


def test_modules_that_earn_a_mark_exist():
    assert all(list(TESTS.rglob(f"{name}.py")) for names in _MODULES.values() for name in names)
    assert {*_CALLS, *_MODULES, "longer", "exhaustive"} == set(SLOW_MARKS)


def test_modules_that_are_shown_elsewhere_exist():
    assert all((TESTS / f"{name}.py").is_file() for name in SHOWN_ELSEWHERE)


def packages() -> list[str]:
    root = TESTS.parent
    found = [path.parent for name in ("jaxstack", "pallas_kernels") for path in (root / name).rglob("__init__.py")]
    return sorted(str(path.relative_to(root)) for path in found)


@pytest.mark.parametrize("package", packages())
def test_every_package_has_tests_in_the_default(package):
    """A module keeps a test in the default unless all of its tests are exhaustive, which no module's here are."""
    modules = [TESTS / TESTED_ELSEWHERE[package]] if package in TESTED_ELSEWHERE else None
    modules = modules or list((TESTS / package.removeprefix("jaxstack").strip("/")).glob("test_*.py"))
    assert any("pytestmark = pytest.mark.exhaustive" not in path.read_text() for path in modules)


def marks_of(pytester, text: str) -> dict[str, set[str]]:
    items = pytester.getitems(text)
    mark_slow_tests(items)
    return {item.name: {mark.name for mark in item.iter_markers()} for item in items}


@pytest.mark.longer
def test_a_test_is_marked_by_what_it_and_its_fixtures_call(pytester):
    found = marks_of(
        pytester,
        """
        import subprocess
        from tests.test_marks import starts_python, trains_through_another

        def test_plain(): pass
        def test_trains(): trains_through_another()
        def test_fixture(starts_python): pass
        def test_process(): subprocess.run(["true"])
        """,
    )
    assert found["test_plain"] == set()
    assert found["test_trains"] >= {"trains", "slow"}
    assert found["test_fixture"] == found["test_process"] == {"processes", "slow"}


@pytest.mark.longer
@pytest.mark.parametrize(
    ("mark", "runs"), [pytest.param("", "test_first", marks=pytest.mark.longer), ("@pytest.mark.quick", "test_second")]
)
def test_a_module_of_slow_tests_keeps_one_in_the_default(pytester, mark, runs):
    found = marks_of(
        pytester,
        f"""
        import pytest, subprocess
        @pytest.mark.exhaustive
        def test_all(): pass
        def test_first(): subprocess.run(["true"])
        {mark}
        def test_second(): subprocess.run(["true"])
        """,
    )
    assert [name for name, marks in found.items() if "slow" not in marks] == [runs]
