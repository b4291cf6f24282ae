"""New directories are complete or absent."""

import errno

import pytest

from jaxstack.errors import ConfigError, cannot_write
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
