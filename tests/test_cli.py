"""The frame of the commands: output whose reader goes away, and errors of the file system."""

import errno
import io
import resource
import sys
from typing import NamedTuple

import jax
import pytest

from jaxstack.cli import BrokenPipeTolerantOutput, run_command
from jaxstack.errors import JaxstackError, memory_shortage
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


class Error(RuntimeError):
    """Stands for `jax.errors.JaxRuntimeError`, which tells its reason in the text only."""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", "16.00 GiB could not be"),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 5242880 bytes.\nBFC: ...", "5.0 MiB could not be allocated"),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: failed to allocate 2.50GiB (2684354560 bytes)", "2.50 GiB could not be"),
        ("RESOURCE_EXHAUSTED: the compiler gave up", "RESOURCE_EXHAUSTED: the compiler gave up"),
    ],
)
def test_too_little_device_memory_is_told_with_its_size_and_the_ways_out(text, said, capsys):
    def body() -> None:
        raise Error(text)

    assert run_command("jaxstack serve", body, "engine.slots") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0] and lines[0].endswith("Lower engine.slots.")


class Device(NamedTuple):
    """A GPU of this process with the given bytes in use of 8 GiB."""

    id: int
    used: int

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 2**33, "bytes_in_use": self.used}


def test_the_device_with_the_least_memory_is_named(monkeypatch):
    """XLA does not say which of a process's devices it was; the first one may have room."""
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(0, 2**30), Device(1, 2**33 - 2**20), Device(2, 0)])
    said = memory_shortage(Error("RESOURCE_EXHAUSTED: Out of memory allocating 5242880 bytes."))
    assert said is not None and said.endswith("could not be allocated, 1.0 MiB of 8.00 GiB are free on device 1")


class Job:
    """Stands for the module of jobs of several processes."""

    def __init__(self):
        self.exited: list[int] = []

    def as_lost_peer(self, error: Exception) -> JaxstackError | None:
        return JaxstackError("lost another process of the run: it") if "gloo" in str(error) else None

    def exit_at_once_on_failure(self, code: int) -> int:
        self.exited.append(code)
        return code


@pytest.mark.parametrize(
    ("text", "said"), [("gloo: gone", "lost another process of the run"), ("RESOURCE_EXHAUSTED", "")]
)
def test_every_command_of_several_processes_exits_at_once_where_one_fails(text, said, capsys, monkeypatch):
    """At a normal exit jax would wait for the others, which wait for this one in a collective."""
    job = Job()
    monkeypatch.setitem(sys.modules, "jaxstack.distributed.coordination", job)

    def body() -> None:
        raise Error(text)

    assert run_command("jaxstack evaluate", body) == 1 and job.exited == [1]
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown


def test_too_little_shared_memory_is_an_error_of_a_kernel(capsys):
    def body() -> None:
        raise Error("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 300000, available: 232448")

    assert run_command("jaxstack train", body) == 1 and "Traceback" in capsys.readouterr().err


CHECKPOINT = "tests/models/huggingface/gpt-oss"
"""What `serve` looks at before it loads the weights."""
EXHAUSTED = Error("RESOURCE_EXHAUSTED: Out of memory allocating 5242880 bytes.")


@pytest.mark.parametrize(
    ("command", "arguments", "place", "way_out"),
    [
        ("train", ["--config", "configs/quickstart.yaml"], "jaxstack.run.train.train", "train.global_batch_size"),
        (
            "serve",
            ["--run", CHECKPOINT, "--port", "0"],
            "jaxstack.run.load.load",
            "engine.slots",
        ),
        ("generate", ["--run", "tests", "--prompt", "a"], "jaxstack.run.load.load", "--batch-size"),
        ("evaluate", ["--run", "tests"], "jaxstack.run.evaluate.evaluate", "--batch-size"),
        ("compress", ["--run", "RUN", "--recipe", "int8"], "jaxstack.compress.after_training.run.compress", "calibr"),
        ("export", ["--run", "RUN", "--to", "stablehlo"], "jaxstack.export.source.load_source", "--context"),
    ],
)
def test_every_command_names_what_of_its_own_needs_less_memory(command, arguments, place, way_out, capsys, monkeypatch):
    from jaxstack.__main__ import main

    def exhausted(*_: object, **__: object) -> None:
        raise EXHAUSTED

    if command == "serve":
        pytest.importorskip("uvicorn")
    monkeypatch.setattr(place, exhausted)
    assert main([command, *arguments]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"jaxstack {command}: out of device memory: 5.0 MiB could not be") and way_out in last
