"""Reasons of failed saves, read from the errors of the libraries that write."""

import errno
import os
import re

import pytest

from jaxstack.checkpoint.commit import explain


@pytest.mark.parametrize(
    "number, reason",
    [
        (errno.ENOSPC, "no space left on the disk of"),
        (errno.EDQUOT, "the disk quota of"),
        (errno.EFBIG, r"would exceed the limit on file sizes: raise it \(ulimit -f\)"),
        (errno.EROFS, "is mounted read-only"),
        (errno.EMFILE, r"raise the limit \(ulimit -n\)"),
        (errno.EACCES, "no permission for"),
    ],
)
def test_an_error_of_the_system_is_told_with_the_way_out(number, reason, tmp_path):
    """Orbax passes it on in the text of an error of its own, or as its cause."""
    system = f"UNAVAILABLE: Error writing local file: [OS error {number}: {os.strerror(number)}]"
    wrapped = RuntimeError("Orbax: the save failed")
    wrapped.__cause__ = OSError(number, os.strerror(number))
    for error in (ValueError(system), wrapped):
        assert re.search(reason, explain(error, str(tmp_path)))


def test_an_unknown_error_is_told_in_one_line(tmp_path):
    assert explain(ValueError("one\ntwo"), str(tmp_path)) == "ValueError: one"
