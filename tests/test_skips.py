"""`--strict-skips` fails a session in which a test was skipped for a reason that is not allowed."""

import re

import pytest

from tests.skips import ALLOWED, TIME_IS_OVER

CONFTEST = """
from tests.skips import SkipReasons

def pytest_addoption(parser):
    parser.addoption("--strict-skips", action="store_true")

def pytest_configure(config):
    config.pluginmanager.register(SkipReasons(config))
"""


def result_of(pytester, text: str, *options: str):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(text)
    return pytester.runpytest("-p", "no:cacheprovider", *options)


@pytest.mark.parametrize(
    "text",
    [
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('it rains')",
        "import pytest\n@pytest.mark.skipif(True, reason='it rains')\ndef test_b(): pass\ndef test_a(): pass",
        "import pytest\npytest.skip('it rains', allow_module_level=True)",
    ],
)
def test_a_reason_that_is_not_allowed_fails(pytester, text):
    assert result_of(pytester, text).ret != pytest.ExitCode.TESTS_FAILED
    result = result_of(pytester, text, "--strict-skips")
    result.stdout.fnmatch_lines(["skipped 1 (NOT ALLOWED, see tests/skips.py): it rains", "    1 in *.py"])
    assert result.ret != pytest.ExitCode.OK


def test_an_allowed_reason_passes_and_is_listed(pytester):
    text = f"import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip({TIME_IS_OVER!r})"
    result = result_of(pytester, text, "--strict-skips")
    result.stdout.fnmatch_lines([f"skipped 1 (allowed): {TIME_IS_OVER}"])
    assert result.ret == pytest.ExitCode.OK


def test_every_allowed_reason_has_its_why():
    assert all(re.compile(reason) and why.endswith((".", "`.")) for reason, why in ALLOWED.items())
