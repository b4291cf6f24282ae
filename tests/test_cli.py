"""The frame of the commands: output whose reader goes away, and errors of the file system."""

import errno
import io
import resource

import pytest

from jaxstack.cli import BrokenPipeTolerantOutput, run_command
from jaxstack.files import write_file


class Gone(io.StringIO):
    """A stream whose reader goes away after the first write."""

    def __init__(self, error: int):
        super().__init__()
        self.error = error
        self.writes = 0

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
    output = BrokenPipeTolerantOutput(stream, lambda: noticed.append(True))
    for _ in range(4):
        print("a line", file=output, flush=True)
    assert stream.getvalue() == "a line" and noticed == [True]


def test_other_errors_are_raised():
    output = BrokenPipeTolerantOutput(Gone(errno.ENOSPC))
    output.write("first")
    with pytest.raises(OSError, match="gone"):
        output.write("second")


def test_the_stream_itself_shows_through():
    assert not BrokenPipeTolerantOutput(io.StringIO()).isatty()


def test_a_file_over_the_limit_on_file_sizes_is_named_with_the_way_out(tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        code = run_command("jaxstack train", lambda: write_file(tmp_path / "large.json", bytes(5000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = f"jaxstack train: File too large ({tmp_path}/large.json); a limit on file sizes is reached (ulimit -f)"
    assert code == 1 and capsys.readouterr().err.startswith(said)
    assert not list(tmp_path.iterdir())
