"""The frame of the commands: output whose reader goes away."""

import errno
import io

import pytest

from jaxstack.cli import LastingOutput


class Gone(io.StringIO):
    """A stream whose reader goes away after the first write."""

    def __init__(self, error: int):
        super().__init__()
        self.error, self.writes = error, 0

    def write(self, text: str) -> int:
        self.writes += 1
        if self.writes > 1:
            raise OSError(self.error, "gone")
        return super().write(text)

    def fileno(self) -> int:
        import os

        return os.open(os.devnull, os.O_WRONLY)


@pytest.mark.parametrize("error", [errno.EPIPE, errno.EIO])
def test_output_goes_on_without_its_reader(error):
    noticed = []
    stream = Gone(error)
    output = LastingOutput(stream, lambda: noticed.append(True))
    for _ in range(4):
        print("a line", file=output, flush=True)
    assert stream.getvalue() == "a line" and noticed == [True]


def test_other_errors_are_raised():
    output = LastingOutput(Gone(errno.ENOSPC))
    output.write("first")
    with pytest.raises(OSError, match="gone"):
        output.write("second")


def test_the_stream_itself_shows_through():
    assert not LastingOutput(io.StringIO()).isatty()
