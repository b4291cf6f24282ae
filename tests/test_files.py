"""New directories are complete or absent."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxstack.errors import ConfigError, JaxstackError, cannot_write
from jaxstack.files import new_directory, write_file


def test_a_new_directory_appears_when_it_is_complete(tmp_path):
    folder = tmp_path / "runs" / "small"
    with new_directory(folder) as staging:
        assert staging.name == "small" and not folder.exists()
        write_file(staging / "a", b"1", durable=False)
    assert [path.name for path in folder.parent.iterdir()] == ["small"] and (folder / "a").read_bytes() == b"1"
    with pytest.raises(ConfigError, match="small exists already"), new_directory(folder):
        pytest.fail("the block must not run")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "the input cannot be read", "text")])
def test_a_directory_that_is_not_complete_is_removed(tmp_path, error):
    with pytest.raises(type(error)) as caught, new_directory(tmp_path / "small") as staging:
        write_file(staging / "a", b"1", durable=False)
        raise error
    assert caught.value is error and not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_to_is_one_message(tmp_path):
    write_file(tmp_path / "file", b"", durable=False)
    below = tmp_path / "file" / "small"
    with pytest.raises(ConfigError, match="cannot write .*file/small: Not a directory"), new_directory(below):
        pytest.fail("the block must not run")
    full = pytest.raises(ConfigError, match="cannot write .*/small: File too large; raise the limit")
    with full, new_directory(tmp_path / "small") as staging:
        raise OSError(errno.EFBIG, "File too large", str(staging / "a"))
    full = pytest.raises(ConfigError, match=f"^cannot write {tmp_path}/small/compressed")
    with full, new_directory(tmp_path / "small") as staging:
        raise cannot_write(staging / "compressed", OSError(errno.EFBIG, "File too large"))
    with pytest.raises(ConfigError, match="small exists already"), new_directory(tmp_path / "small") as staging:
        (tmp_path / "small").mkdir()  # by another command meanwhile
        write_file(tmp_path / "small" / "a", b"", durable=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "small"]


KILLED = """
import os, pathlib, signal, sys
from jaxstack.files import new_directory
with new_directory(pathlib.Path(sys.argv[1])) as folder:
    (folder / "half").write_text("1")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    """As of a conversion that a launcher starts again: it finds neither a half directory nor a full disk."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "small")], cwd=Path(__file__).parents[1])
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "small").exists()
    with new_directory(tmp_path / "small") as staging:
        assert not list(staging.iterdir())
        (staging / "whole").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["small", "whole"]


def test_two_processes_do_not_write_one_directory(tmp_path):
    another = pytest.raises(JaxstackError, match=rf"another process is writing to {tmp_path}/small \(process \d+ on")
    with new_directory(tmp_path / "small") as staging:
        with another, new_directory(tmp_path / "small"):
            pytest.fail("the block must not run")
        (staging / "a").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["small", "a"]


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "small").mkdir()
    with new_directory(tmp_path / "small") as staging:
        (staging / "a").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["small", "a"]
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="link exists already"), new_directory(tmp_path / "link"):
        pytest.fail("the block must not run")
